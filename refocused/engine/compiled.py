"""Blocks compiled one by one, tried out on one of them before the run depends on it."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refocused.system.errors import ConfigError
from refocused.system.world import World

CompileChoice = Literal["auto", "on", "off"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REASON_CHARACTERS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Compilation:
    """How the blocks are computed."""

    is_on: bool  # whether they are compiled
    text: str  # the same, and why, for a person
    failed: bool = False  # whether they should have been compiled, but could not be
    seconds: float | None = None  # what compiling took; None when nothing was


def compile_blocks(
    model: nn.Module,
    *,
    block_class: type[nn.Module],
    batch_shape: tuple[int, int],
    dtype: str,
    choice: CompileChoice,
    world: World,
    is_partitioned: bool = False,
    backend: str = "inductor",
) -> Compilation:
    """Compile the forward pass of every block, before DeepSpeed takes the model; all ranks call.

    One graph serves all blocks in training, one in validation. Both are made here, by passes of the
    first block on the device and in the shapes of training, so that a compiler that is missing or
    fails shows before the first step, and the same way on every rank. Parameters keep their names.
    The precision of float32 products must have been set (`set_product_precision`).

    Args:
        model: On any device; `forward` takes ids and labels.
        block_class: The repeated block.
        batch_shape: Micro-batch, `(B, T)`. Other shapes (samples, the test of the first loss) run
            as they are written, for each would be compiled anew.
        dtype: What the passes compute in: bf16, fp16 or fp32.
        choice: `auto` compiles on GPUs alone. Both it and `on` continue without if torch's compiler
            fails, which no setting of the machine mends.
        world: The ranks.
        is_partitioned: Whether ZeRO-3 will hold the parameters, which makes another graph.
        backend: What torch.compile hands the graph to.

    Raises:
        ConfigError: On every rank: `on`, and some rank has no C++ compiler.
    """
    if choice == "off":
        return Compilation(False, "blocks run as written (model.compile=off)")
    if choice == "auto" and world.device_kind == "cpu":
        return Compilation(
            False, "blocks run as written (on a CPU compiling takes longer than it gains)"
        )
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    began = time.monotonic()
    # The class's own function: the block is an argument of it, and its weights are inputs.
    graph = torch.compile(block_class.forward, dynamic=False, fullgraph=True, backend=backend)
    trial = _Trial(blocks[0], graph, world.device, DTYPES[dtype], is_partitioned)
    args, named = _inputs_of(model, blocks[0], batch_shape)
    reason = next(filter(None, world.gather(trial.failure(args, named))), None)
    if reason is not None:
        if choice == "on" and not all(world.gather(_has_compiler())):
            raise ConfigError(
                f"The blocks cannot be compiled: {reason}. Install a C++ compiler, or set "
                "model.compile=off."
            )
        return Compilation(
            False,
            f"blocks run as written: torch's compiler failed on them in {dtype} ({reason}). "
            "model.compile=off starts faster.",
            failed=True,
        )
    for block in blocks:
        block.forward = _dispatching(block, graph, batch_shape)
    seconds = time.monotonic() - began
    return Compilation(
        True, f"{len(blocks)} blocks compiled as one graph in {seconds:.1f} s", seconds=seconds
    )


def _dispatching(
    block: nn.Module, graph: Callable[..., Any], batch_shape: tuple[int, int]
) -> Callable[..., Any]:
    """Return the forward pass of a block: compiled for training's shape, as written for others."""
    written = block.forward

    def forward(hidden: Tensor, *rest: Any, **named: Any) -> Any:
        if hidden.shape[:2] == batch_shape:
            return graph(block, hidden, *rest, **named)
        return written(hidden, *rest, **named)

    return forward


def _has_compiler() -> bool:
    """Whether a C++ compiler is on the path."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """Runs a copy of a block forward and backward as training will, forward as validation will."""

    block: nn.Module
    graph: Callable[..., Any]
    device: torch.device
    dtype: torch.dtype
    is_partitioned: bool

    def failure(self, args: tuple[Any, ...], named: dict[str, Any]) -> str | None:
        """Return why the graph cannot be used; None when it can."""
        try:
            self._run(args, named)
        except (
            Exception
        ) as error:  # a compiler fails with anything: its own, C++'s, Triton's errors
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # A C++ compiler's own first error comes after a command of thousands of characters.
            refused = [line.partition(" error: ")[2] for line in lines if " error: " in line]
            if refused:
                lines = ["the C++ compiler refuses the code:", refused[0]]
            return f"{type(error).__name__}: {' '.join(lines)[:REASON_CHARACTERS]}"
        return None

    def _run(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        trial = copy.deepcopy(self.block).to(self.device, self.dtype)
        if self.is_partitioned:
            _hold_as_zero_3(trial)
        (hidden, *rest), named = tree_map_only(Tensor, self._moved, (args, named))
        output = self.graph(trial.train(), hidden.requires_grad_(), *rest, **named)
        output = output[0] if isinstance(output, tuple) else output
        output.float().sum().backward()
        with torch.no_grad():
            self.graph(trial.eval(), hidden.detach(), *rest, **named)

    def _moved(self, value: Tensor) -> Tensor:
        return value.detach().to(self.device, self.dtype if value.is_floating_point() else None)


def _hold_as_zero_3(block: nn.Module) -> None:
    """Make what a graph of the block is guarded by as DeepSpeed's stage 3 will make it.

    That is the kind of dictionary that holds parameters, and the linear function, which replaces
    torch's for the whole process when an engine starts and reads two attributes of a weight.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    nn.functional.linear = zero3_linear_wrap
    for parameter in block.parameters():
        parameter.ds_id, parameter.ds_status = -1, ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for module in block.modules():
        ensure_zero_ordered_dict(module)
        module._parameters._in_forward = True  # type: ignore[attr-defined]


class _Reached(Exception):  # noqa: N818 - no error: the way out of a forward pass
    """A block is about to run, with these arguments."""


def _inputs_of(
    model: nn.Module, block: nn.Module, batch_shape: tuple[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model passes to its first block, without computing any block."""

    def stop(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _Reached(args, named)

    device = next(model.parameters()).device
    ids = torch.zeros(batch_shape, dtype=torch.long, device=device)
    hook = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model(ids, ids)
    except _Reached as reached:
        args, named = reached.args
        return args, named
    finally:
        hook.remove()
    raise RuntimeError(f"the model does not run its {type(block).__name__}")
