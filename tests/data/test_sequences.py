import dataclasses

import pytest
from fake_cache import manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.sequences import (
    SequenceRange,
    Split,
    sequence_count,
    sequences_of,
    split_sequences,
)
from refocused.system.errors import ShardError

FIRST, SECOND, THIRD = (SequenceRange(shard, 0, 4) for shard in range(3))


@pytest.mark.parametrize(
    ("asked", "train", "validation"),
    [
        ({}, (FIRST, SECOND, THIRD), ()),
        ({"validation_files": ["part_[1]*"]}, (FIRST, THIRD), (SECOND,)),
        ({"validation_files": ["val_*"]}, (FIRST, SECOND), (THIRD,)),  # without its folder
        (
            {"validation_fraction": 0.5},  # of the last sequences; cuts inside a shard
            (FIRST, SequenceRange(1, 0, 2)),
            (SequenceRange(1, 2, 2), THIRD),
        ),
    ],
)
def test_whole_files_or_the_last_sequences_are_held_out(asked, train, validation):
    manifest = manifest_of(9, 9, 9, 2)
    named = dataclasses.replace(manifest.shards[2], name="2024/val_b.npy")
    shards = (*manifest.shards[:2], named, manifest.shards[3])
    manifest = dataclasses.replace(manifest, shards=shards)
    assert split_sequences(manifest, sequence_length=2, **asked) == Split(train, validation)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(2, 60), min_size=1, max_size=8),
    fraction=st.floats(0, 0.9),
    sequence_length=st.integers(1, 5),
)
def test_a_split_loses_and_doubles_no_sequence(tokens, fraction, sequence_length):
    manifest = manifest_of(100, *tokens)
    split = split_sequences(manifest, sequence_length=sequence_length, validation_fraction=fraction)
    seen = [
        (one.shard, sequence)
        for one in split.train + split.validation
        for sequence in range(one.first, one.first + one.count)
    ]
    counts = [sequences_of(s.tokens, sequence_length=sequence_length) for s in manifest.shards]
    assert seen == [(s, w) for s, count in enumerate(counts) for w in range(count)]


@pytest.mark.parametrize(("fraction", "expected"), [(0.07, 7), (0.071, 8), (0.1, 10), (1e-9, 1)])
def test_a_fraction_is_exact_and_rounded_up(fraction, expected):
    split = split_sequences(manifest_of(101), sequence_length=1, validation_fraction=fraction)
    assert sequence_count(split.validation) == expected


@pytest.mark.parametrize(
    ("tokens", "asked", "said"),
    [
        ((9, 9, 9), {"validation_files": ["val_*"]}, r"'val_\*'.*3 token files.*part_0\.npy, part"),
        ((9, 9), {"validation_files": ["*"]}, "validation_files matches all 2"),
        ((9, 9), {"validation_fraction": 1.0}, "validation_fraction takes all 8 sequences"),
        ((99, 2), {"validation_files": ["part_1.npy"]}, r"no validation sequence.*_1\.npy, has 2"),
        ((1, 2), {}, r"part_1\.npy, has 2 tokens.*needs 3 .*at most 1"),
    ],
)
def test_a_split_that_cannot_be_is_refused(tokens, asked, said):
    with pytest.raises(ShardError, match=said):
        split_sequences(manifest_of(*tokens), sequence_length=2, **asked)
