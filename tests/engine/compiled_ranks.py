"""Trains compiled and uncompiled engines on this rank: `compiled_ranks.py OUT`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import (
    ACCUMULATION,
    DOCUMENT,
    LENGTH,
    MICRO,
    RATES,
    Case,
    join_ready,
    start_engine,
    windows,
)
from torch._dynamo.utils import counters

from refocused.config.optimization import PrecisionConfig
from refocused.engine.build_engine import set_product_precision
from refocused.engine.compiled import compile_blocks
from refocused.models.causal_lm import CausalLM
from refocused.system.world import World

CASES = [
    Case(0),
    Case(1, "gpt_neox"),
    Case(2, masked=True),
    Case(3),
    Case(3, dropout=0.2, recomputes=True),
    Case(1, "gpt_neox", "bf16", fp8="rowwise"),
    Case(3, dtype="bf16", fp8="tensorwise", recomputes=True),
    Case(3, "gpt_neox", recomputes=True, masked=True),
]


def compiling(world: World, case: Case) -> Callable[[CausalLM], None]:
    def compile_all(model: CausalLM) -> None:
        if case.masked:
            model.block_shape = (MICRO, LENGTH)
        compiled = compile_blocks(
            model,
            block_class=model.block_class,
            batch_shape=(MICRO, LENGTH),
            dtype=case.dtype,
            choice="on",
            world=world,
            is_partitioned=case.stage == 3,
            backend="aot_eager",  # the graph as it is; what inductor makes of it takes a minute
        )
        assert compiled.is_on

    return compile_all


def train(case: Case, world: World, *, compiled: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.nn.functional.linear = LINEAR  # stage 3 of an earlier case has replaced it
    set_product_precision(PrecisionConfig())
    engine = start_engine(
        case, world, prepare=compiling(world, case) if compiled else lambda model: None
    )
    torch.manual_seed(world.rank)
    losses, graphs = [], []
    batches = windows()
    if case.masked:
        batches[batches % 8 == 0] = DOCUMENT
    for step, rate in enumerate(RATES):
        for accumulated in batches[step]:
            ids = accumulated[world.rank]
            losses.append(engine.accumulate(ids[:, :-1], ids[:, 1:]).item())
        engine.update(rate)
        graphs.append(counters["stats"]["unique_graphs"])
    ids = batches[0, 0, world.rank]
    validated = [engine.validation_loss(ids[:, :-1], ids[:, 1:]).item() for _ in range(2)]
    graphs.append(counters["stats"]["unique_graphs"])
    # Other shapes, as those of the first loss and of samples.
    odd = [engine.validation_loss(ids[:1, :-1], ids[:1, 1:]).item()]
    odd.append(engine.next_token_logits(ids[:, :7]).sum().item())
    names = [name for name, _ in engine._engine.module.named_parameters()]
    engine.close()
    return {
        "losses": losses,
        "step losses": step_losses(losses, world),
        "validated": validated,
        "odd": odd,
        "graphs": graphs,
        "graphs after odd shapes": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "names": names,
    }


def step_losses(losses: list[float], world: World) -> list[float]:
    """Return the mean loss of each step over its passes and all ranks."""
    of_ranks = world.gather(torch.tensor(losses).view(-1, ACCUMULATION).mean(1))
    return torch.stack(of_ranks).mean(0).tolist()


def main() -> None:
    out = Path(sys.argv[1])
    world = join_ready()
    # Without inductor FlexAttention has a backward pass on CPUs, but refuses it all the same.
    torch.nn.attention.flex_attention._validate_device = lambda *tensors: None
    found = {
        case.name: {kind: train(case, world, compiled=kind == "compiled") for kind in KINDS}
        for case in CASES
    }
    if world.is_rank_0:
        (out / "found.json").write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an ordinary end now and then


KINDS = ("compiled", "written")
LINEAR = torch.nn.functional.linear
if __name__ == "__main__":
    main()
