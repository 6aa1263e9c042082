from __future__ import annotations

import pytest
from fake_cache import FakeManifest, FakeShard
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.windows import Split, WindowRange, split_windows, window_count, windows_of
from refocused.system.errors import ShardError


@settings(deadline=None)
@given(tokens=st.integers(0, 200), sequence_length=st.integers(1, 20))
def test_windows_fit_and_label_every_token_but_the_first_once(tokens, sequence_length):
    count = windows_of(tokens, sequence_length=sequence_length)
    labelled = [
        token
        for window in range(count)
        for token in range(window * sequence_length + 1, (window + 1) * sequence_length + 1)
    ]
    assert labelled == list(range(1, count * sequence_length + 1))
    assert all(token < tokens for token in labelled)
    assert tokens - 1 - len(labelled) < sequence_length


def test_without_a_request_everything_trains():
    split = split_windows(FakeManifest.of(9, 3, 13), sequence_length=4)
    assert split == Split((WindowRange(0, 0, 2), WindowRange(2, 0, 3)), ())


def test_named_files_validate_whole():
    split = split_windows(
        FakeManifest.of(9, 9, 13), sequence_length=4, validation_files=["part_[1]*"]
    )
    assert split == Split((WindowRange(0, 0, 2), WindowRange(2, 0, 3)), (WindowRange(1, 0, 2),))


def test_a_pattern_may_leave_out_the_folder():
    manifest = FakeManifest((FakeShard("2024/a.npy", 9), FakeShard("2024/val_b.npy", 9)))
    split = split_windows(manifest, sequence_length=4, validation_files=["val_*"])
    assert split.validation == (WindowRange(1, 0, 2),)


def test_a_fraction_takes_the_last_windows_and_cuts_inside_a_shard():
    split = split_windows(FakeManifest.of(9, 9, 9), sequence_length=2, validation_fraction=0.5)
    assert split.train == (WindowRange(0, 0, 4), WindowRange(1, 0, 2))
    assert split.validation == (WindowRange(1, 2, 2), WindowRange(2, 0, 4))


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(2, 60), min_size=1, max_size=8),
    fraction=st.floats(0, 0.9),
    sequence_length=st.integers(1, 5),
)
def test_a_split_loses_and_doubles_no_window(tokens, fraction, sequence_length):
    manifest = FakeManifest.of(100, *tokens)
    split = split_windows(manifest, sequence_length=sequence_length, validation_fraction=fraction)
    seen = [
        (one.shard, window)
        for one in split.train + split.validation
        for window in range(one.first, one.first + one.count)
    ]
    counts = [windows_of(s.tokens, sequence_length=sequence_length) for s in manifest.shards]
    assert seen == [(s, w) for s, count in enumerate(counts) for w in range(count)]


@pytest.mark.parametrize(("fraction", "expected"), [(0.07, 7), (0.071, 8), (0.1, 10), (1e-9, 1)])
def test_a_fraction_means_the_decimal_that_was_written_rounded_up(fraction, expected):
    split = split_windows(FakeManifest.of(101), sequence_length=1, validation_fraction=fraction)
    assert window_count(split.validation) == expected


def test_a_pattern_that_names_nothing_lists_names_that_there_are():
    with pytest.raises(ShardError, match=r"'val_\*'.*3 token files.*part_0\.npy, part_1\.npy"):
        split_windows(FakeManifest.of(9, 9, 9), sequence_length=2, validation_files=["val_*"])


def test_too_short_files_are_refused_with_the_numbers_and_a_length_that_works():
    manifest = FakeManifest.of(50, 64, 10)
    with pytest.raises(ShardError, match=r"part_1\.npy, has 64 tokens.*needs 65 .*at most 63"):
        split_windows(manifest, sequence_length=64)
    assert split_windows(manifest, sequence_length=63).train == (WindowRange(1, 0, 1),)


def test_validation_that_takes_everything_is_refused():
    manifest = FakeManifest.of(9, 9)
    with pytest.raises(ShardError, match=r"validation_files takes all 2"):
        split_windows(manifest, sequence_length=2, validation_files=["*"])
    with pytest.raises(ShardError, match=r"validation_fraction takes all 8 windows"):
        split_windows(manifest, sequence_length=2, validation_fraction=1.0)


def test_validation_files_shorter_than_a_window_are_refused():
    with pytest.raises(ShardError, match=r"no validation window.*part_1\.npy, has 4 tokens"):
        split_windows(FakeManifest.of(99, 4), sequence_length=8, validation_files=["part_1.npy"])
