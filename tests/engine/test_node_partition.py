"""ZeRO++ hpZ on two pretended nodes: what the backward pass gathers, and the losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from end_to_end.forked import measured
from engine_cases import ACCUMULATION, SAVED_AT, STEPS, Case, start_engine, windows

from refocused.engine.engine import Engine
from refocused.system.world import World

RANKS, NODE = 4, 2
# Or this small model stays gathered, and the forward pass fetches all that the backward needs.
GATHERING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
CALLS: list[int] = []  # the ranks of each all-gather
BACKWARD: list[int] = []


def measure(world: World, folder: Path) -> dict[str, Any]:
    for name in ("all_gather_into_tensor", "all_gather"):
        setattr(dist, name, _counting(getattr(dist, name)))
    saved = folder / "saved"
    if world.is_rank_0:
        (saved / "ranks").mkdir(parents=True)
    world.barrier()
    found: dict[str, Any] = {}
    for partition in ("world", "node"):
        case = Case(3, accumulation=2 * ACCUMULATION, partition=partition)
        engine = start_engine(case, world, fragment={"zero_optimization": GATHERING})
        engine._engine.backward = _watching(engine._engine.backward)
        BACKWARD.clear()
        losses = _train(engine, world, 0, SAVED_AT)
        if partition == "world":
            engine.save_shards(saved)
        losses += _train(engine, world, SAVED_AT, STEPS)
        found[partition] = {"losses": losses, "backward": list(BACKWARD)}
    ids = windows()[0, 0, world.rank % 2]
    engine.validation_loss(ids[:, :-1], ids[:, 1:])  # fills the nodes' copies
    engine.load_shards(saved)
    found["resumed"] = _train(engine, world, SAVED_AT, STEPS)
    engine.validation_loss(ids[:, :-1], ids[:, 1:])
    engine.load_resharded(saved, ranks=RANKS)
    found["resharded"] = _train(engine, world, SAVED_AT, STEPS)
    return found


def _train(engine: Engine, world: World, first: int, end: int) -> list[float]:
    losses = []
    for step in windows()[first:end]:
        for accumulated in step:
            ids = accumulated[world.rank % 2]
            losses.append(float(engine.accumulate(ids[:, :-1], ids[:, 1:])))
        engine.update(1e-3)
    return losses


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, group: Any = None, **named: Any) -> Any:
        CALLS.append(dist.get_world_size(group))
        return function(*args, group=group, **named)

    return counted


def _watching(backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def watched(loss: Any) -> Any:
        CALLS.clear()
        done = backward(loss)
        BACKWARD.extend(CALLS)
        return done

    return watched


@pytest.mark.slow
def test_a_partition_by_nodes_gathers_inside_them_for_equal_losses(tmp_path: Path) -> None:
    for rank in measured("test_node_partition", tmp_path, ranks=RANKS)[0]:
        assert set(rank["world"]["backward"]) == {RANKS}
        assert set(rank["node"]["backward"]) == {NODE}
        assert rank["node"]["losses"] == rank["world"]["losses"]
        later = rank["world"]["losses"][SAVED_AT * ACCUMULATION :]
        assert rank["resumed"] == rank["resharded"] == later
