from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time

import numpy as np
import pytest
import torch
from fake_cache import SHARD_STRIDE, FakeManifest, FolderCache

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.fetch_plan import FetchAhead
from refocused.data.loader.batch import BatchReader
from refocused.data.loader.loader import STEPS_READY, BatchStream, Loader, steps_from
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import split_windows
from refocused.system.errors import ShardError

SEQUENCE_LENGTH = 4
WINDOWS_PER_EPOCH = 65


@pytest.fixture
def manifest() -> FakeManifest:
    return FakeManifest.of(45, 60, 33, 80, 4, 55)  # 11 + 14 + 8 + 19 + 0 + 13 windows


@pytest.fixture
def cache(tmp_path, manifest) -> FolderCache:
    return FolderCache(tmp_path, manifest)


def order_of(manifest: FakeManifest) -> Order:
    split = split_windows(manifest, sequence_length=SEQUENCE_LENGTH)
    return Order(split.train, seed=5, block_shards=2)


def loader_of(cache, manifest, *, rank=0, micro=2, accumulation=2, world_size=1, **settings):
    plan = BatchPlan(micro, accumulation, world_size, SEQUENCE_LENGTH)
    return Loader(order_of(manifest), cache, plan=plan, rank=rank, ahead=FetchAhead(1), **settings)


def tokens_of(loader: Loader, position: Position, *, steps: int) -> list[list[list[int]]]:
    with contextlib.closing(loader.batches_from(position)) as stream:
        return [
            [row for batch in stream.next_step() for row in batch.input_ids.tolist()]
            for _ in range(steps)
        ]


def test_a_step_is_its_micro_batches_with_the_tokens_of_their_windows(cache, manifest):
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        for _ in range(40):  # more than two epochs
            step = stream.next_step()
            assert len(step) == 2
            for batch in step:
                begins = batch.shards * SHARD_STRIDE + batch.windows * SEQUENCE_LENGTH
                expected = torch.from_numpy(begins)[:, None] + torch.arange(SEQUENCE_LENGTH)
                assert torch.equal(batch.input_ids, expected)
                assert torch.equal(batch.labels, expected + 1)
        assert stream.position == Position(2, 40 * 4 - 2 * WINDOWS_PER_EPOCH)


def test_position_counts_what_was_handed_out_not_what_was_read(cache, manifest):
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position(1, 63))) as stream:
        assert stream.position == Position(1, 63)
        stream.next_step()
        assert stream.position == Position(2, 2)


@pytest.mark.parametrize(("micro", "accumulation", "world_size"), [(4, 1, 2), (1, 2, 4), (2, 4, 1)])
def test_ranks_together_read_the_same_steps(cache, manifest, micro, accumulation, world_size):
    alone = tokens_of(loader_of(cache, manifest, micro=8, accumulation=1), Position(), steps=20)
    ranks = [
        tokens_of(
            loader_of(
                cache,
                manifest,
                rank=rank,
                micro=micro,
                accumulation=accumulation,
                world_size=world_size,
            ),
            Position(),
            steps=20,
        )
        for rank in range(world_size)
    ]
    together = [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert [sorted(step) for step in together] == [sorted(step) for step in alone]


def test_a_resumed_stream_equals_one_that_went_on(cache, manifest):
    whole = tokens_of(loader_of(cache, manifest), Position(), steps=30)
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        for _ in range(17):
            stream.next_step()
        saved = Position.from_dict(stream.position.to_dict())
    assert tokens_of(loader_of(cache, manifest), saved, steps=13) == whole[17:]


def test_other_ranks_and_micro_batches_go_on_with_the_same_stream_mid_epoch(cache, manifest):
    whole = tokens_of(loader_of(cache, manifest, micro=8, accumulation=1), Position(), steps=30)
    saved = Position()
    shapes = [(2, 2, 2, 5), (4, 1, 2, 6), (1, 2, 4, 7), (2, 4, 1, 12)]
    done = 0
    for micro, accumulation, world_size, steps in shapes:
        ranks = []
        for rank in range(world_size):
            loader = loader_of(
                cache,
                manifest,
                rank=rank,
                micro=micro,
                accumulation=accumulation,
                world_size=world_size,
            )
            ranks.append(tokens_of(loader, saved, steps=steps))
        together = [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
        expected = whole[done : done + steps]
        assert [sorted(step) for step in together] == [sorted(step) for step in expected]
        done += steps
        saved = Position.from_dict(Position(*divmod(8 * done, WINDOWS_PER_EPOCH)).to_dict())
        assert saved.windows > 0  # inside an epoch


def wait_until_read_ahead(stream: BatchStream) -> None:
    deadline = time.monotonic() + 10
    while stream._ahead._ready.qsize() < STEPS_READY:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("tokens", [(45, 60, 33, 80, 4, 55), (900, 980, 1000, 800, 4, 960)])
def test_a_slower_rank_finds_its_shards_though_the_planning_rank_reads_ahead(tmp_path, tokens):
    # FolderCache refuses what is not in the last plan. Rank 1 only reads, one step behind the
    # steps that rank 0 has begun to train on.
    manifest = FakeManifest.of(*tokens)
    cache = FolderCache(tmp_path, manifest)
    plan = BatchPlan(2, 1, 2, SEQUENCE_LENGTH)
    slow_steps = steps_from(order_of(manifest), Position(), plan=plan, rank=1)
    slow_reader = BatchReader(cache, sequence_length=SEQUENCE_LENGTH)
    planning = loader_of(cache, manifest, accumulation=1, world_size=2)
    with contextlib.closing(planning.batches_from(Position())) as stream:
        for step in itertools.islice(slow_steps, 40 * max(tokens) // 80):
            stream.next_step()
            wait_until_read_ahead(stream)
            slow_reader.read(step.shards, step.windows, micro=2)
    assert min(len(needed) for needed in cache.plans) < 5  # not all that have windows


def test_reading_ahead_is_bounded(cache, manifest):
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        wait_until_read_ahead(stream)
        time.sleep(0.05)  # in which a thread without bounds reads on
        assert stream._ahead._ready.qsize() == STEPS_READY
        assert next(stream._ahead._items)[0].after == Position(0, 4 * (STEPS_READY + 1))


@pytest.fixture
def large_manifest() -> FakeManifest:
    return FakeManifest.of(900, 980, 1000, 960)


def test_a_step_is_handed_over_though_the_next_one_waits_for_a_shard(tmp_path, large_manifest):
    cache = FolderCache(tmp_path, large_manifest)
    order = order_of(large_manifest)
    shards = order.locate(np.arange(8)).shards.tolist()
    cache.late = next(shard for shard in shards if shard != shards[0])
    small = loader_of(cache, large_manifest, micro=1, accumulation=1)
    with contextlib.closing(small.batches_from(Position())) as stream:
        for shard in itertools.takewhile(lambda shard: shard != cache.late, shards):
            assert stream.next_step(patience_seconds=10)[0].shards.tolist() == [shard]
        assert stream.next_step(patience_seconds=0.01) is None
        cache.arrived.set()
        assert stream.next_step(patience_seconds=10)[0].shards.tolist() == [cache.late]


def test_an_error_while_reading_is_raised_itself_after_the_steps_before_it(cache, manifest):
    cache.broken = list(itertools.islice(order_of(manifest).blocks_from(0), 2))[1][0]
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        handed_out = 0
        with pytest.raises(
            ShardError, match=rf"part_{cache.broken}\.npy is broken. Fetch"
        ) as caught:
            while True:
                step = stream.next_step()
                handed_out += 1
                assert all(cache.broken not in batch.shards for batch in step)
        assert handed_out > 0
        assert caught.value.__cause__ is None
        assert stream.position == Position(*divmod(4 * handed_out, WINDOWS_PER_EPOCH))
        with pytest.raises(ShardError):
            stream.next_step()


def test_close_ends_the_thread_that_waits_for_room(cache, manifest):
    stream = loader_of(cache, manifest).batches_from(Position())
    wait_until_read_ahead(stream)
    stream.close()
    assert not stream._ahead._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        stream.next_step()


def first_shard(manifest: FakeManifest) -> int:
    return int(order_of(manifest).locate(np.array([0])).shards[0])


def test_close_returns_while_a_shard_is_awaited_and_the_thread_ends_after(cache, manifest):
    cache.late = first_shard(manifest)
    stream = loader_of(cache, manifest).batches_from(Position())
    assert cache.waiting.wait(timeout=10)
    stream.close()
    assert stream._ahead._thread.is_alive()
    assert stream._ahead._thread.daemon  # it cannot keep the process from ending
    cache.arrived.set()
    stream._ahead._thread.join(timeout=10)
    assert not stream._ahead._thread.is_alive()


def test_close_wakes_whoever_waits_for_a_step(cache, manifest):
    cache.late = first_shard(manifest)
    stream = loader_of(cache, manifest).batches_from(Position())
    assert cache.waiting.wait(timeout=10)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(stream.next_step)
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(timeout=10)
    cache.arrived.set()


def test_a_step_that_is_not_there_in_time_can_be_asked_for_again(cache, manifest):
    cache.late = first_shard(manifest)
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        assert cache.waiting.wait(timeout=10)
        assert stream.next_step(patience_seconds=0.01) is None
        assert stream.position == Position()
        cache.arrived.set()
        first = stream.next_step()
        assert stream.position == Position(0, 4)
    cache.late = None
    with contextlib.closing(loader_of(cache, manifest).batches_from(Position())) as stream:
        for batch, same in zip(first, stream.next_step(), strict=True):
            assert torch.equal(batch.input_ids, same.input_ids)


def test_waiting_is_measured_by_the_given_clock(cache, manifest):
    cache.late = first_shard(manifest)
    readings = itertools.count(step=0.25)
    loader = loader_of(cache, manifest, clock=lambda: next(readings))
    with contextlib.closing(loader.batches_from(Position())) as stream:
        assert stream.wait_seconds == 0
        for _ in range(3):
            assert stream.next_step(patience_seconds=0.01) is None
        assert stream.wait_seconds == 3 * 0.25
        cache.arrived.set()


def test_a_position_beyond_a_shrunken_epoch_starts_in_the_next(cache, manifest):
    stream = loader_of(cache, manifest).batches_from(Position(0, 70))
    assert stream.position == Position(1, 5)
    stream.close()
