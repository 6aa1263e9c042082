"""Counts what ZeRO-3 sends in each step, by kind of collective: `traffic_ranks.py OUT`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import ACCUMULATION, Case, join_ready, start_engine, windows

from refocused.models.causal_lm import counted_parameters

SENT: Counter[str] = Counter()  # elements that a ring passes on, for each rank, by kind


# The argument that is of full size, or a list of its parts, and how often a ring passes it on: an
# all-reduce is a reduce-scatter followed by an all-gather.
WHOLE = {
    "all_gather_into_tensor": ("gather", "output_tensor", 1),
    "all_gather": ("gather", "tensor_list", 1),
    "reduce_scatter_tensor": ("reduce", "input", 1),
    "reduce_scatter": ("reduce", "input_list", 1),
    "all_reduce": ("reduce", "tensor", 2),
}


def count_what_is_sent() -> None:
    """Wrap torch's collectives, before DeepSpeed takes them."""
    for name, (kind, whole, times) in WHOLE.items():
        setattr(dist, name, counting(kind, getattr(dist, name), whole, times))


def counting(kind: str, function: Callable[..., Any], whole: str, times: int) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def counted(*args: Any, **named: Any) -> Any:
        tensors = signature.bind(*args, **named).arguments[whole]
        parts = tensors if isinstance(tensors, list) else [tensors]
        SENT[kind] += times * sum(part.numel() for part in parts)
        return function(*args, **named)

    return counted


def main() -> None:
    out = Path(sys.argv[1])
    world = join_ready()
    count_what_is_sent()
    engine = start_engine(Case(3), world)
    steps = []
    for step in windows()[:4]:
        SENT.clear()
        for accumulated in step:
            ids = accumulated[world.rank]
            engine.accumulate(ids[:, :-1], ids[:, 1:])
        engine.update(1e-3)
        steps.append(dict(SENT))
    SENT.clear()
    engine.save_shards(out / "saved")
    in_a_save = dict(SENT)
    in_samples = []
    for holding in (contextlib.nullcontext(), engine.weights_held()):
        SENT.clear()
        with holding:
            for length in (4, 5, 6):
                engine.next_token_logits(windows()[0, 0, 0, :, :length])
        in_samples.append(SENT["gather"])
    parameters = counted_parameters(engine._engine.module)
    if world.is_first:
        found = {
            "steps": steps,
            "in a save": in_a_save,
            "in samples": in_samples,
            "parameters": parameters,
            "accumulation": ACCUMULATION,
            "inductor": "torch._inductor.compile_fx" in sys.modules,
            "compile": torch.compile.__module__,
        }
        (out / "found.json").write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an ordinary end now and then


main()
