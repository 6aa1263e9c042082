from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.permutation import derived_key, hashed, permuted, shuffled


def permutation(size: int, *, seed: int) -> list[int]:
    keys = np.full(size, derived_key(seed)[0])
    return permuted(np.arange(size), sizes=np.full(size, size), keys=keys).tolist()


def test_the_hash_is_splitmix64():
    # The first five outputs for seed 1234567, as published with other implementations.
    outputs = hashed(np.array([1234567], dtype=np.uint64), np.arange(1, 6, dtype=np.uint64))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(deadline=None)
@given(size=st.integers(1, 2000), seed=st.integers(0, 2**70))
def test_every_size_is_permuted_without_loss(size, seed):
    assert sorted(permutation(size, seed=seed)) == list(range(size))


def test_values_of_different_sizes_and_keys_do_not_touch_each_other():
    sizes, seeds = [1, 7, 2, 300], [5, 6, 7, 8]
    together = permuted(
        np.concatenate([np.arange(size) for size in sizes]),
        sizes=np.repeat(sizes, sizes),
        keys=np.repeat(np.concatenate([derived_key(seed) for seed in seeds]), sizes),
    )
    apart = [permutation(size, seed=seed) for size, seed in zip(sizes, seeds, strict=True)]
    assert together.tolist() == list(itertools.chain(*apart))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 11])
def test_each_element_of_a_small_permutation_reaches_every_place_evenly(size):
    draws = 12_000
    keys = hashed(derived_key(1), np.arange(draws, dtype=np.uint64))
    for element in range(size):
        places = permuted(np.full(draws, element), sizes=np.full(draws, size), keys=keys)
        counts = np.bincount(places, minlength=size)
        deviation = np.sqrt(draws / size * (1 - 1 / size))
        assert np.abs(counts - draws / size).max() < 5 * deviation


@pytest.mark.parametrize("size", [1000, 4096, 4097, 20_000])
def test_a_large_permutation_looks_random(size):
    places = np.array(permutation(size, seed=3))
    limit = 5 / np.sqrt(size)  # five standard deviations of a random permutation's correlation
    assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < limit
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < limit
    neighbours = np.count_nonzero(np.abs(np.diff(places)) == 1)
    assert neighbours < 2 + 5 * np.sqrt(2)  # about Poisson with mean 2


def test_keys_of_different_paths_differ():
    paths = [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    keys = {int(derived_key(seed, *path)[0]) for seed in (0, 1) for path in paths}
    assert len(keys) == 2 * len(paths)


def test_pinned_values_hold_on_every_platform():
    assert permutation(10, seed=1337) == [9, 2, 3, 5, 8, 7, 4, 6, 1, 0]
    assert shuffled(10, key=derived_key(1337)).tolist() == [8, 3, 5, 7, 4, 6, 1, 0, 2, 9]
    assert sorted(shuffled(100, key=derived_key(1)).tolist()) == list(range(100))
