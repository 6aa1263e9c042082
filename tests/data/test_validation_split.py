from __future__ import annotations

import dataclasses

import pytest

from refocused.data.manifest.select_files import choose_validation
from refocused.data.manifest.shard_manifest import Manifest, Shard
from refocused.system.errors import ShardError


def manifest(*tokens: int) -> Manifest:
    rows = (Shard(f"{n:04d}.npy", t, "uint16", 2 * t, None, None) for n, t in enumerate(tokens))
    return Manifest(tuple(rows), "x")


def test_whole_files_come_near_the_share() -> None:
    split = choose_validation(manifest(*[100] * 1000), ratio=0.01, seed=0)
    assert (len(split.files), split.tokens, split.total_tokens) == (10, 1000, 100_000)
    assert split.fraction == 0


def test_the_choice_depends_on_the_seed_and_not_on_the_order() -> None:
    data = manifest(*[100] * 200)
    turned = dataclasses.replace(data, shards=data.shards[::-1])
    first = choose_validation(data, ratio=0.05, seed=1)
    assert choose_validation(turned, ratio=0.05, seed=1) == first
    assert choose_validation(data, ratio=0.05, seed=2).files != first.files


def test_a_large_file_is_passed_over() -> None:
    for seed in range(20):
        split = choose_validation(manifest(100_000, *[100] * 100), ratio=0.01, seed=seed)
        assert "0000.npy" not in split.files
        assert len(split.files) == 11


@pytest.mark.parametrize("tokens", [(1000,), (1000, 1000, 1000)])
def test_too_few_files_get_a_share_of_the_windows(tokens: tuple[int, ...]) -> None:
    split = choose_validation(manifest(*tokens), ratio=0.01, seed=0)
    assert (split.files, split.fraction) == ((), 0.01)
    assert split.tokens == round(0.01 * sum(tokens))


def test_no_share_is_refused() -> None:
    for ratio in (0.0, 1.0):
        with pytest.raises(ShardError, match="--val-ratio"):
            choose_validation(manifest(1), ratio=ratio, seed=0)
