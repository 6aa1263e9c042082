"""ZeRO++ hpZ on two pretended nodes: what the backward pass gathers, and the losses."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    ACCUMULATION,
    SAVED_AT,
    STEPS,
    Case,
    make_step,
    saved,
    sequences,
    start_engine,
)
from ranks import on_ranks

from refocused.models.sequence_parallel import join_sequence_group
from refocused.system.world import GROUP_SECONDS

RANKS, NODE = 4, 2
PARTITIONS = ("world", "node")
# Or this small model stays gathered, and the forward pass fetches all that the backward needs.
# Vectors do stay, as in a run.
GATHERING = {
    "stage3_param_persistence_threshold": 200,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
CALLS = []  # the ranks of each all-gather
PASSES = []  # those of each pass


def measure(world):
    folder = Path.cwd()
    for name in ("all_gather_into_tensor", "all_gather"):
        setattr(dist, name, _counting(getattr(dist, name)))
    join_sequence_group(world.rank, world.world_size, ranks=2)
    found = {}
    engines = {}
    for partition in PARTITIONS:
        case = Case(3, gradient_accumulation_steps=2 * ACCUMULATION, partition=partition)
        engines[partition] = start_engine(case, world, fragment={"zero_optimization": GATHERING})
        engine = engines[partition]
        engine._engine.backward = _watching(engine._engine.backward)
        PASSES.clear()
        losses = _train(engine, world, 0, SAVED_AT)
        saved(engine, world, folder / partition)
        losses += _train(engine, world, SAVED_AT, STEPS)
        found[partition] = {"losses": losses, "passes": list(PASSES)}
    ids = sequences()[0, 0, world.rank % 2]
    for source, partition in (PARTITIONS, PARTITIONS[::-1]):
        engine = engines[partition]
        engine.validation_loss(ids[:, :-1], ids[:, 1:])  # fills the nodes' copies
        engine.load_shards(folder / source)
        found[f"{source} to {partition}"] = _train(engine, world, SAVED_AT, STEPS)
        engine.validation_loss(ids[:, :-1], ids[:, 1:])
        engine.load_resharded(folder / source, ranks=RANKS)
        found[f"{source} to {partition}, resharded"] = _train(engine, world, SAVED_AT, STEPS)
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return found | {"seconds": [one.options._timeout.total_seconds() for one in backends]}


def _train(engine, world, first, end):
    batches = sequences()[first:end, :, world.rank % 2]
    return [loss for passes in batches for loss in make_step(engine, passes)[0]]


def _counting(function):
    def counted(*args, group=None, **named):
        CALLS.append(dist.get_process_group_ranks(group or dist.group.WORLD))
        return function(*args, group=group, **named)

    return counted


def _watching(backward):
    def watched(loss):
        forward = list(CALLS)
        CALLS.clear()
        done = backward(loss)
        PASSES.append({"forward": forward, "backward": list(CALLS)})
        CALLS.clear()
        return done

    return watched


@pytest.mark.slow
def test_a_partition_by_nodes_gathers_inside_them_for_equal_losses(tmp_path):
    for rank in on_ranks(measure, folder=tmp_path, ranks=RANKS):
        seconds = rank.pop("seconds")  # of every group, of which DeepSpeed makes most
        assert len(seconds) >= 4 and set(seconds) == {GROUP_SECONDS}
        world, node = (rank.pop(partition) for partition in PARTITIONS)
        for number, (one, other) in enumerate(zip(world["passes"], node["passes"], strict=True)):
            assert all(map(_crosses, one["backward"])) and all(map(_crosses, one["forward"]))
            assert len(other["backward"]) == len(one["backward"]) > 0
            assert not any(map(_crosses, other["backward"]))
            # The first forward pass after an update fills the copies for the others.
            assert any(map(_crosses, other["forward"])) == (number % ACCUMULATION == 0)
            assert len(other["forward"]) > 0
        assert node["losses"] == world["losses"]
        later = world["losses"][SAVED_AT * ACCUMULATION :]
        assert rank == dict.fromkeys(rank, later) and len(rank) == 4


def _crosses(ranks):
    return len({rank // NODE for rank in ranks}) > 1
