"""Counts what each stage of ZeRO sends in a step, by collective."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from engine_cases import ACCUMULATION, Case, start_engine, windows
from torch import Tensor

from refocused.engine.engine import Engine
from refocused.models.causal_lm import counted_parameters
from refocused.system.world import World

BUCKET = 40_000  # elements: the model has 136,960, the largest matrix 32,768
SMALL = {"reduce_bucket_size": BUCKET}
GATHERING = {"stage3_param_persistence_threshold": 0}  # or it keeps what is as small as this model
# By name: stage, precision, DeepSpeed settings. The last is saved and samples.
CASES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    **{
        f"{stage}, {dtype}": (stage, dtype, {}) for stage in (0, 1, 2) for dtype in ("bf16", "fp32")
    },
    **{f"{stage}, small buckets": (stage, "fp32", SMALL) for stage in (1, 2)},
    "3, kept": (3, "fp32", {}),
    "3, bf16": (3, "bf16", GATHERING),
    "3, small buckets": (3, "fp32", GATHERING | SMALL),
    "3, fp32": (3, "fp32", GATHERING),
}

SENT: Counter[str] = Counter()  # bytes of whole tensors, by collective
CALLS: Counter[str] = Counter()

# The argument that is of full size, or a list of its parts.
WHOLE = {
    "all_gather_into_tensor": "output_tensor",
    "all_gather": "tensor_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter": "input_list",
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_to_all_single": "input",
}
LEAST_ELEMENTS = 64  # fewer are numbers that ranks agree on: norms, flags


def count_what_is_sent() -> None:
    """Wrap torch's collectives, before DeepSpeed takes them."""
    for name, whole in WHOLE.items():
        setattr(dist, name, counting(name, getattr(dist, name), whole))


def counting(name: str, function: Callable[..., Any], whole: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def counted(*args: Any, **named: Any) -> Any:
        tensors = signature.bind(*args, **named).arguments[whole]
        parts = tensors if isinstance(tensors, list) else [tensors]
        if sum(part.numel() for part in parts) >= LEAST_ELEMENTS:
            SENT[name] += sum(part.numel() * part.element_size() for part in parts)
            CALLS[name] += 1
        return function(*args, **named)

    return counted


def counted_in(act: Callable[[], Any]) -> dict[str, list[int]]:
    """Return the calls and bytes of each collective while something is done."""
    SENT.clear(), CALLS.clear()
    act()
    return {name: [CALLS[name], SENT[name]] for name in SENT}


def train(engine: Engine, world: World, step: Tensor) -> None:
    for accumulated in step:
        ids = accumulated[world.rank]
        engine.accumulate(ids[:, :-1], ids[:, 1:])
    engine.update(1e-3)


def measure(world: World, folder: Path) -> dict[str, Any]:
    count_what_is_sent()
    steps: dict[str, Any] = {}
    for name, (stage, dtype, zero) in CASES.items():
        fragment = {"zero_optimization": zero} if zero else {}
        engine = start_engine(Case(stage, dtype=dtype), world, fragment=fragment)
        steps[name] = [
            counted_in(functools.partial(train, engine, world, step)) for step in windows()[:4]
        ]
        if name != list(CASES)[-1]:
            engine.close()
    saved = counted_in(lambda: engine.save_shards(folder / "saved"))
    holding = (contextlib.nullcontext(), engine.weights_held())
    return {
        "steps": steps,
        "in a save": saved,
        "in samples": [counted_in(functools.partial(sample, engine, one)) for one in holding],
        "parameters": counted_parameters(engine._engine.module),
        "accumulation": ACCUMULATION,
        "bucket": BUCKET,
    }


def sample(engine: Engine, holding: contextlib.AbstractContextManager[Any]) -> None:
    with holding:
        for length in (4, 5, 6):
            engine.next_token_logits(windows()[0, 0, 0, :, :length])
