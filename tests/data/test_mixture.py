import contextlib
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from fake_cache import SHARD_STRIDE, FolderCache, loader_of, manifest_of, wanted
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.mixture_order import (
    PERIOD,
    Mixture,
    Stage,
    interleaved,
    shares_of,
    source_seed,
)
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position, SequenceRange

SEED = 5
# Sequences of the shards of each source: shards 0 to 2, 3 to 4 and 5.
WINDOWS = {"code": (30, 41, 22), "math": (9, 14), "web": (300,)}
WEIGHTS = {"web": 6, "code": 3, "math": 1}
FIRST_SHARD = {"code": 0, "math": 3, "web": 5}
SHARDS = {"code": range(3), "math": range(3, 5), "web": range(5, 6)}
EPOCHS = {name: sum(sequences) for name, sequences in WINDOWS.items()}


def order_of(name: str, *, block_shards: int = 2) -> Order:
    ranges = [
        SequenceRange(FIRST_SHARD[name] + number, 0, count)
        for number, count in enumerate(WINDOWS[name])
    ]
    return Order(ranges, seed=source_seed(SEED, name), block_shards=block_shards)


def mixture_of(
    weights: dict[str, float] = WEIGHTS, *, block_shards: int = 2, later: Sequence[Stage] = ()
) -> Mixture:
    orders = {name: order_of(name, block_shards=block_shards) for name in WINDOWS}
    mixture = Mixture(orders, weights=weights, seed=SEED)
    mixture.stages += later
    return mixture


def sequences_from(position: Position, count: int, **changes: object) -> list[tuple[int, int]]:
    stream = mixture_of(**changes).stream_from(position)
    located = stream.locate(stream.number_of(position) + np.arange(count))
    return list(zip(located.shards.tolist(), located.sequences.tolist(), strict=True))


def of_source(name: str, sequences: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [sequence for sequence in sequences if sequence[0] in SHARDS[name]]


def own_stream(name: str, start: int, count: int) -> list[tuple[int, int]]:
    located = order_of(name).locate(np.arange(start, start + count))
    return list(zip(located.shards.tolist(), located.sequences.tolist(), strict=True))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 1, "b": 1}, {"a": 512, "b": 512}),
        ({"b": 0.25, "a": 0.75}, {"a": 768, "b": 256}),
        ({"web": 0.7, "code": 0.3}, {"code": 307, "web": 717}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 342, "b": 341, "c": 341}),
        ({"big": 1e6, "tiny": 1e-6}, {"big": 1023, "tiny": 1}),
        ({"only": 3.5}, {"only": 1024}),
        ({"a": 1, "b": 0, "c": 3}, {"a": 256, "b": 0, "c": 768}),
    ],
)
def test_shares_are_whole_sequences_of_a_period(weights, shares):
    assert shares_of(weights) == shares
    assert list(shares_of(weights)) == sorted(weights)


weights_drawn = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


@settings(deadline=None)
@given(drawn=weights_drawn)
def test_shares_add_up_are_near_the_weights_and_include_every_source(drawn):
    weights = {f"s{number}": weight for number, weight in enumerate(drawn)}
    shares = shares_of(weights)
    assert sum(shares.values()) == PERIOD
    assert min(shares.values()) >= 1
    for name, weight in weights.items():
        raised = len(weights) / PERIOD  # what sources of a tiny weight take from the others
        assert abs(shares[name] / PERIOD - weight / sum(drawn)) <= 1 / PERIOD + raised


@settings(deadline=None, max_examples=30)
@given(drawn=weights_drawn)
def test_no_source_is_ever_off_its_share_by_a_sequence(drawn):
    counts = list(shares_of({f"s{number}": weight for number, weight in enumerate(drawn)}).values())
    places = interleaved(counts)
    assert np.bincount(places, minlength=len(counts)).tolist() == counts
    for source, count in enumerate(counts):
        before = np.concatenate([[0], np.cumsum(places == source)])
        off = np.abs(before * PERIOD - np.arange(PERIOD + 1) * count)
        assert Fraction(int(off.max()), PERIOD) <= 1 - Fraction(1, max(2, 2 * len(counts) - 2))


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 3000))
def test_a_position_holds_what_was_consumed_of_each_source(count):
    sequences = sequences_from(Position(), count)
    position = mixture_of().stream_from(Position()).position_at(count)
    consumed = {name: len(of_source(name, sequences)) for name in WINDOWS}
    assert position == Position(
        min(consumed[name] // EPOCHS[name] for name in WINDOWS), count, consumed
    )
    assert Position.from_dict(position.to_dict()) == position


@settings(deadline=None, max_examples=30)
@given(done=st.integers(1, 2500), again=st.integers(1, 500))
def test_with_other_weights_every_source_continues_at_its_position(done, again):
    first = mixture_of().stream_from(Position()).position_at(done)
    changed = {"web": 1, "code": 1, "math": 8}
    after = sequences_from(first, PERIOD, weights=changed)
    assert [len(of_source(name, after)) for name in WINDOWS] == [102, 820, 102]
    for name in WINDOWS:
        own = of_source(name, after)
        assert own == own_stream(name, first.sources[name], len(own))
    # And once more, from a position that two sets of weights have led to.
    second = mixture_of(changed).stream_from(first).position_at(done + again)
    assert sum(second.sources.values()) == second.sequences == done + again
    for name, own in ((name, of_source(name, sequences_from(second, 300))) for name in WINDOWS):
        assert own == own_stream(name, second.sources[name], len(own))


# The run begins without math; later code ends, and then there is only math. No border is at a
# multiple of the period.
FIRST = {"web": 3, "code": 1, "math": 0}
LATER = [
    Stage(700, {"code": 512, "math": 256, "web": 256}),
    Stage(701, {"code": 1, "math": 1, "web": 1022}),
    Stage(2500, {"code": 0, "math": 1024, "web": 0}),
]


def staged(position: Position, count: int) -> list[tuple[int, int]]:
    return sequences_from(position, count, weights=FIRST, later=LATER)


def test_shares_are_exact_on_both_sides_of_each_border_and_epochs_go_on():
    sequences = staged(Position(), 4000)
    borders = [0, *(stage.begins for stage in LATER), 4000]
    stages = [Stage(0, shares_of(FIRST)), *LATER]
    for stage, (begin, end) in zip(stages, itertools.pairwise(borders), strict=True):
        for name, share in stage.shares.items():
            for until in range(begin, end, 97):
                done = len(of_source(name, sequences[begin:until]))
                assert abs(done - (until - begin) * share / PERIOD) < 1
            whole = of_source(name, sequences[begin : begin + PERIOD])
            assert end - begin < PERIOD or len(whole) == share
    for name in WINDOWS:  # none is lost or repeated at a border
        own = of_source(name, sequences)
        assert own == own_stream(name, 0, len(own))


@settings(deadline=None, max_examples=30)
@given(done=st.sampled_from([0, 699, 700, 701, 2499, 2500]) | st.integers(0, 3000))
def test_a_resumed_stream_equals_one_that_went_on(done):
    stream = mixture_of(FIRST, later=LATER).stream_from(Position())
    position = Position.from_dict(stream.position_at(done).to_dict())
    assert staged(position, 200) == staged(Position(), done + 200)[done:]


def test_with_other_data_the_stages_go_on_and_every_source_begins():
    own = of_source("math", staged(Position(0, 2400, {}), 900))
    assert own == own_stream("math", 0, len(own))
    assert len(own) >= 800


def test_a_later_stage_is_fetched_ahead_of_its_border_and_not_before():
    stream = mixture_of(FIRST, block_shards=1, later=LATER).stream_from(Position())
    math = set(SHARDS["math"])
    needed = {stream.locate(np.array([n])).shards[0] for n in range(700, 710)} & math
    assert not math & set(wanted(stream, oldest=0, newest=19, shards=0))
    ahead = [wanted(stream, oldest=n, newest=n + 3, shards=2) for n in range(300, 697)]
    assert needed <= set(ahead[-1])
    used = stream.locate(np.arange(650, 6000)).shards.tolist()  # not every shard of code
    assert set(used) == set(wanted(stream, oldest=650, newest=699, shards=100)) != {*range(6)}
    # Only math is left: nothing else is kept or fetched, however much there is room for.
    assert set(wanted(stream, oldest=2600, newest=2620, shards=100)) == math


def test_what_is_local_holds_every_sequence_in_use_and_the_next_shards_ahead():
    stream = mixture_of(block_shards=1).stream_from(Position())
    for oldest in range(0, 900, 7):
        located = stream.locate(np.arange(oldest, oldest + 20))
        in_use = wanted(stream, oldest=oldest, newest=oldest + 19, shards=0)
        assert set(located.shards.tolist()) <= set(in_use)
        assert len(in_use) < 6  # not simply everything
        soon = wanted(stream, oldest=oldest, newest=oldest + 19, shards=1)
        later = stream.locate(np.arange(oldest + 20, oldest + 2000)).shards.tolist()
        following = next(shard for shard in later if shard not in in_use)
        assert soon == [*in_use, following]
        assert sorted(wanted(stream, oldest=oldest, newest=oldest, shards=100)) == [*range(6)]


SEQUENCE_LENGTH = 3
MANIFEST = manifest_of(
    *(SEQUENCE_LENGTH * count + 1 for name in WINDOWS for count in WINDOWS[name])
)


def tokens_of(cache: FolderCache, position: Position, *, steps: int, **plan: int):
    order = mixture_of(FIRST, block_shards=1, later=LATER)
    loader = loader_of(cache, order, sequence_length=SEQUENCE_LENGTH, **plan)
    with contextlib.closing(loader.batches_from(position)) as stream:
        read = [
            [row for batch in stream.next_step() for row in batch.input_ids.tolist()]
            for _ in range(steps)
        ]
        return read, stream.position


def test_a_loader_reads_the_sequences_of_a_mixture_with_few_shards_planned(tmp_path):
    cache = FolderCache(tmp_path, MANIFEST)  # refuses what was not planned
    read, position = tokens_of(cache, Position(), steps=150, micro_batch_size=4)
    expected = [
        [shard * SHARD_STRIDE + sequence * SEQUENCE_LENGTH + t for t in range(SEQUENCE_LENGTH)]
        for shard, sequence in sequences_from(
            Position(), 1200, weights=FIRST, block_shards=1, later=LATER
        )
    ]
    assert list(itertools.chain(*read)) == expected
    assert position.sequences == 1200
    assert min(len(plan) for plan in cache.plans) < 6
    assert all(before != after for before, after in itertools.pairwise(cache.plans))
