import concurrent.futures
import contextlib
import itertools
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from fake_cache import SHARD_STRIDE, FolderCache, loader_of, manifest_of, order_of
from ranks import until

from refocused.config.batch_plan import BatchPlan
from refocused.data.loader import batch as batch_module
from refocused.data.loader.batch import IGNORED_LABEL, Batch, BatchReader
from refocused.data.loader.loader import STEPS_READY, steps_from
from refocused.data.order.sequences import Position, SequenceRange, spread_sequences
from refocused.system.errors import ShardError

LENGTH = 4
MANIFEST = manifest_of(45, 60, 33, 80, 4, 55)  # 11 + 14 + 8 + 19 + 0 + 13 sequences
WINDOWS_PER_EPOCH = 65
LARGE = manifest_of(900, 980, 1000, 960)


@pytest.fixture
def cache(tmp_path):
    return FolderCache(tmp_path, MANIFEST)


@pytest.fixture
def loader(cache):
    return loader_of(cache, order_of(MANIFEST))


@pytest.fixture
def late(cache):
    """The cache, in which the first shard is not there yet."""
    cache.late = int(order_of(MANIFEST).locate(np.array([0])).shards[0])
    return cache


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def test_a_step_is_its_micro_batches_with_the_tokens_of_their_sequences(loader):
    with contextlib.closing(loader.batches_from(Position())) as stream:
        for _ in range(40):  # more than two epochs
            step = stream.next_step()
            assert len(step) == 2
            for batch in step:
                begins = batch.shards * SHARD_STRIDE + batch.sequences * LENGTH
                expected = torch.from_numpy(begins)[:, None] + torch.arange(LENGTH)
                assert torch.equal(batch.input_ids, expected)
                assert torch.equal(batch.labels, expected + 1)
        assert stream.position == Position(2, 40 * 4 - 2 * WINDOWS_PER_EPOCH)


def test_a_position_counts_what_was_handed_out_and_may_lie_beyond_a_shrunken_epoch(loader):
    with contextlib.closing(loader.batches_from(Position(1, 63))) as stream:
        assert stream.position == Position(1, 63)
        stream.next_step()
        assert stream.position == Position(2, 2)
    with contextlib.closing(loader.batches_from(Position(0, 70))) as stream:
        assert stream.position == Position(1, 5)


def rows_of(cache, position: Position, *, ranks: int, steps: int):
    """The rows of each step of 8 sequences over all ranks, sorted, and the position after them."""
    found: list[list[list[int]]] = [[] for _ in range(steps)]
    accumulation = 1 if ranks == 8 else 2
    for rank in range(ranks):
        loader = loader_of(
            cache,
            order_of(MANIFEST),
            micro_batch_size=8 // ranks // accumulation,
            gradient_accumulation_steps=accumulation,
            world_size=ranks,
            rank=rank,
        )
        with contextlib.closing(loader.batches_from(position)) as stream:
            for rows in found:
                rows += [row for batch in stream.next_step() for row in batch.input_ids.tolist()]
            after = stream.position
    return [sorted(rows) for rows in found], after


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (8, 8)])
def test_the_stream_is_the_same_when_the_number_of_ranks_changes(cache, before, after):
    # 160 sequences in all; the epoch of 65 ends twice on the way.
    unbroken, end = rows_of(cache, Position(), ranks=1, steps=20)
    first, position = rows_of(cache, Position(), ranks=before, steps=7)
    saved = Position.from_dict(position.to_dict())
    rest, last = rows_of(cache, saved, ranks=after, steps=13)
    assert first + rest == unbroken
    assert sum(map(len, first + rest)) == 160
    assert last == end


def test_a_rank_of_many_computes_few_numbers_of_the_others():
    order = order_of(manifest_of(*[2**25] * 4), sequence_length=1)
    steps = steps_from(order, Position(), plan=BatchPlan(1, 1, 1024, 1), rank=0)
    tracemalloc.start()
    next(steps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24  # 4,096 steps of 1,024 sequences: 2**25


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(45, 60, 33, 80, 4, 55), (900, 980, 1000, 800, 4, 960)])
def test_a_slower_rank_finds_its_shards_though_the_planning_rank_reads_ahead(tmp_path, tokens):
    # FolderCache refuses what is not in the last plan. Rank 1 only reads, one step behind the
    # steps that rank 0 has begun to train on.
    manifest = manifest_of(*tokens)
    cache, slow_cache = FolderCache(tmp_path, manifest), FolderCache(tmp_path, manifest)
    slow_cache.plans = cache.plans
    slow_reader = BatchReader(slow_cache, sequence_length=LENGTH)
    plan = BatchPlan(2, 1, 2, LENGTH)
    slow_steps = steps_from(order_of(manifest), Position(), plan=plan, rank=1)
    planning = loader_of(cache, order_of(manifest), gradient_accumulation_steps=1, world_size=2)
    with contextlib.closing(planning.batches_from(Position())) as stream:
        for taken, step in enumerate(itertools.islice(slow_steps, 40 * max(tokens) // 80), 1):
            stream.next_step()
            until(lambda taken=taken: cache.reads == 2 * (taken + STEPS_READY))
            slow_reader.read(step.shards, step.sequences, micro_batch_size=2)
    assert min(len(needed) for needed in cache.plans) < 5  # not all that have sequences


def test_reading_ahead_is_bounded_and_ends_with_the_stream(cache, loader):
    stream = loader.batches_from(Position())
    until(lambda: cache.reads == 4 * STEPS_READY)
    time.sleep(0.05)  # in which a thread without bounds reads on
    assert cache.reads == 4 * STEPS_READY
    stream.close()
    until(lambda: not reading_threads())
    with pytest.raises(RuntimeError, match="closed"):
        stream.next_step()


def test_a_step_is_handed_over_though_the_next_one_waits_for_a_shard(tmp_path):
    cache, order = FolderCache(tmp_path, LARGE), order_of(LARGE)
    shards = order.locate(np.arange(8)).shards.tolist()
    cache.late = next(shard for shard in shards if shard != shards[0])
    small = loader_of(cache, order, micro_batch_size=1, gradient_accumulation_steps=1)
    with contextlib.closing(small.batches_from(Position())) as stream:
        for shard in itertools.takewhile(lambda shard: shard != cache.late, shards):
            assert stream.next_step(timeout_seconds=10)[0].shards.tolist() == [shard]
        assert stream.next_step(timeout_seconds=0.01) is None
        cache.arrived.set()
        assert stream.next_step(timeout_seconds=10)[0].shards.tolist() == [cache.late]


def test_an_error_while_reading_is_raised_itself_after_the_steps_before_it(cache, loader):
    cache.broken = list(itertools.islice(order_of(MANIFEST).blocks_from(0), 2))[1][0]
    text = rf"part_{cache.broken}\.npy is broken. Fetch"
    with contextlib.closing(loader.batches_from(Position())) as stream:
        handed_out = 0
        with pytest.raises(ShardError, match=text) as caught:
            while True:
                step = stream.next_step()
                handed_out += 1
                assert all(cache.broken not in batch.shards for batch in step)
        assert handed_out > 0
        assert caught.value.__cause__ is None
        assert stream.position == Position(*divmod(4 * handed_out, WINDOWS_PER_EPOCH))
        with pytest.raises(ShardError):
            stream.next_step()


def test_close_returns_while_a_shard_is_awaited_and_wakes_whoever_waits_for_a_step(late, loader):
    until(lambda: not reading_threads())  # of other tests
    stream = loader.batches_from(Position())
    assert late.waiting.wait(timeout=60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(stream.next_step)
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(timeout=60)
    (reading,) = reading_threads()
    assert reading.daemon  # it cannot keep the process from ending
    late.arrived.set()
    reading.join(timeout=60)
    assert not reading.is_alive()


def test_a_step_that_is_not_there_in_time_can_be_asked_for_again_and_waiting_is_measured(late):
    readings = itertools.count(step=0.25)
    loader = loader_of(late, order_of(MANIFEST), clock=lambda: next(readings))
    with contextlib.closing(loader.batches_from(Position())) as stream:
        assert late.waiting.wait(timeout=60)
        assert stream.wait_seconds == 0
        for _ in range(3):
            assert stream.next_step(timeout_seconds=0.01) is None
        assert stream.wait_seconds == 3 * 0.25
        assert stream.position == Position()
        late.arrived.set()
        first = stream.next_step()
        assert stream.position == Position(0, 4)
    with contextlib.closing(loader.batches_from(Position())) as stream:
        for batch, same in zip(first, stream.next_step(), strict=True):
            assert torch.equal(batch.input_ids, same.input_ids)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_ranks_share_the_validation_sequences_in_equally_many_batches(
    cache, world_size, micro_batch_size
):
    chosen = spread_sequences([SequenceRange(0, 0, 10), SequenceRange(1, 1, 6)], sequences=7)
    pairs = list(zip(chosen.shards.tolist(), chosen.sequences.tolist(), strict=True))
    # Evenly over all 16 sequences.
    assert pairs == [(0, 0), (0, 2), (0, 4), (0, 6), (0, 9), (1, 2), (1, 4)]
    shape = {"micro_batch_size": micro_batch_size, "world_size": world_size}
    loaders = [loader_of(cache, order_of(MANIFEST), rank=r, **shape) for r in range(world_size)]
    ranks = [list(loader.validation_batches(chosen)) for loader in loaders]
    assert {len(batches) for batches in ranks} == {-(-7 // (micro_batch_size * world_size))}
    rows = [
        (inputs, labels)
        for batches in ranks
        for batch in batches
        for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
    ]
    real = sorted(inputs for inputs, labels in rows if labels != [IGNORED_LABEL] * LENGTH)
    firsts = [shard * SHARD_STRIDE + sequence * LENGTH for shard, sequence in pairs]
    assert real == [list(range(first, first + LENGTH)) for first in firsts]
    assert all(inputs == [0] * LENGTH for inputs, labels in rows if labels[0] == IGNORED_LABEL)
    again = [batch.input_ids.tolist() for batch in loaders[0].validation_batches(chosen)]
    assert again == [batch.input_ids.tolist() for batch in ranks[0]]


def test_validation_batches_name_their_source_and_mask_documents(cache):
    loader = loader_of(cache, order_of(MANIFEST), micro_batch_size=1, document_id=6)
    [batch] = loader.validation_batches(
        spread_sequences([SequenceRange(0, 1, 1)], sequences=1), source="web"
    )
    assert batch.source == "web"
    assert batch.labels.tolist() == [[5, IGNORED_LABEL, 7, 8]]
    assert list(loader.validation_batches(spread_sequences([], sequences=10))) == []


def reader_of(folder, *, sequence_length, wide=None, vocabulary=1 << 32, **reading) -> BatchReader:
    cache = FolderCache(folder, manifest_of(40, 41, 60, wide=wide), vocabulary=vocabulary)
    return BatchReader(cache, sequence_length=sequence_length, **reading)


def read_one(
    reader: BatchReader, shards: list[int], sequences: list[int], *, micro_batch_size: int
) -> Batch:
    (batch,) = reader.read(
        np.array([shards]), np.array([sequences]), micro_batch_size=micro_batch_size
    ).batches()
    return batch


@pytest.mark.parametrize("wide", [None, 1])
def test_an_id_beyond_the_vocabulary_is_named_with_its_shard(tmp_path, wide):
    reader = reader_of(tmp_path, sequence_length=8, wide=wide, vocabulary=2050)
    assert read_one(reader, [1, 0], [1, 2], micro_batch_size=2).input_ids.max() < 2050
    content = np.load(tmp_path / "part_1.npy")
    content[12] = 2050  # meanwhile, in the second sequence
    np.save(tmp_path / "part_1.npy", content)
    with pytest.raises(ShardError, match=r"part_1\.npy sequence 1: .* id 2,050.* ends at 2,049"):
        read_one(reader, [0, 1], [2, 1], micro_batch_size=2)


def test_shards_of_both_types_share_a_batch_and_batches_share_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_module, "STAGED_TOKENS", 3 * 4)  # three rows at a time
    reader = reader_of(tmp_path, sequence_length=4, wide=1)
    np.save(tmp_path / "part_1.npy", np.load(tmp_path / "part_1.npy") + 2**31)
    first = read_one(reader, [0, 1, 2, 1], [1, 2, 3, 4], micro_batch_size=5)
    kept = first.input_ids.clone()
    read_one(reader, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], micro_batch_size=5)
    wide = 2**31 + SHARD_STRIDE
    begins = torch.tensor([4, wide + 8, 2 * SHARD_STRIDE + 12, wide + 16])
    assert torch.equal(first.input_ids[:4], begins[:, None] + torch.arange(4))
    assert torch.equal(first.labels[:4], first.input_ids[:4] + 1)
    assert torch.equal(first.input_ids, kept)


def test_describe_names_files_and_draws_runs_together(tmp_path):
    reader = reader_of(tmp_path, sequence_length=2)
    batch = read_one(reader, [1, 0, 1, 1, 1], [12, 3, 10, 4, 11], micro_batch_size=6)
    assert batch.describe() == "part_0.npy sequence 3; part_1.npy sequences 4, 10-12"


def test_where_a_masked_document_ends_there_is_no_label(tmp_path):
    reader = reader_of(tmp_path, sequence_length=8, document_id=9)
    np.save(tmp_path / "part_0.npy", np.array([9, 1, 2, 9, 9, 3, 4, 5, 9], dtype=np.uint16))
    batch = read_one(reader, [0], [0], micro_batch_size=2)
    none = IGNORED_LABEL
    assert batch.input_ids[0].tolist() == [9, 1, 2, 9, 9, 3, 4, 5]
    assert batch.labels[0].tolist() == [1, 2, none, none, 3, 4, 5, none]
    assert batch.labels[1].tolist() == [none] * 8
    assert batch.counted_labels == 5
