"""Compile the blocks of a model with torch.compile, after a trial on one block."""

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

from refocused.engine import deepspeed_patches
from refocused.system.errors import ConfigError, counted
from refocused.system.world import World

CompileChoice = Literal["auto", "on", "off"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REASON_CHARACTERS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Compilation:
    """Whether the blocks are compiled."""

    is_on: bool
    text: str  # for the log: whether, and why
    failed: bool = False  # the compiler failed
    seconds: float | None = None  # spent compiling; None if nothing was compiled


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
    """Compile the forward pass of every block, before DeepSpeed wraps the model; collective.

    All blocks share one graph for training and one for validation. Both are compiled here, by
    passes of the first block in the shapes of training, so that a failing compiler is found before
    the first step, on all ranks together. Call `set_product_precision` first.

    Args:
        model: On any device; `forward` takes ids and labels.
        block_class: The repeated block.
        batch_shape: Micro-batch, `(B, T)`. Other shapes run uncompiled.
        dtype: Of the passes: bf16, fp16 or fp32.
        choice: `auto` compiles only on GPUs. If torch's compiler fails, both it and `on` continue
            uncompiled.
        is_partitioned: Whether ZeRO-3 will hold the parameters, which changes the graph.

    Raises:
        ConfigError: On every rank: `on`, and some rank has no C++ compiler.
    """
    if choice == "off":
        return Compilation(False, "blocks are not compiled (model.compile=off)")
    if choice == "auto" and world.device_kind == "cpu":
        return Compilation(False, "blocks are not compiled (on a CPU it would not pay off)")
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    began = time.monotonic()
    # Compile the class's function: block and weights are its inputs, so blocks share the graph.
    graph = torch.compile(block_class.forward, dynamic=False, fullgraph=True, backend=backend)
    inputs = args, _ = _inputs_of(model, blocks[0], batch_shape)
    to = world.device, DTYPES[dtype]
    failure = _failure(blocks[0], graph, inputs, to=to, is_partitioned=is_partitioned)
    reason = next(filter(None, world.gather(failure)), None)
    if reason is not None:
        compilers = (os.environ.get("CXX") or "g++", "g++", "clang++")
        if choice == "on" and not all(world.gather(any(map(shutil.which, compilers)))):
            raise ConfigError(
                f"The blocks cannot be compiled: {reason}. Install a C++ compiler, or set "
                "model.compile=off."
            )
        return Compilation(
            False,
            f"blocks are not compiled: torch's compiler failed on them in {dtype} ({reason}). "
            "Set model.compile=off to start faster.",
            failed=True,
        )
    for block in blocks:
        block.forward = _dispatching(block, graph, args[0].shape[:2])
    seconds = time.monotonic() - began
    return Compilation(
        True,
        f"{counted(len(blocks), 'block')} compiled as one graph in {seconds:.1f} s",
        seconds=seconds,
    )


def _dispatching(
    block: nn.Module, graph: Callable[..., Any], shape: torch.Size
) -> Callable[..., Any]:
    """Return a block's forward pass: compiled for training's shape, uncompiled for others."""
    written = block.forward

    def forward(hidden: Tensor, *rest: Any, **named: Any) -> Any:
        if hidden.shape[:2] == shape:
            return graph(block, hidden, *rest, **named)
        return written(hidden, *rest, **named)

    return forward


def _failure(
    block: nn.Module,
    graph: Callable[..., Any],
    inputs: Any,
    *,
    to: tuple[torch.device, torch.dtype],
    is_partitioned: bool,
) -> str | None:
    """Run a copy of a block as training (forward, backward) and validation (forward) will.

    Return why the graph cannot be used; None if it can.
    """

    def moved(value: Tensor) -> Tensor:
        return value.detach().to(to[0], to[1] if value.is_floating_point() else None)

    try:
        trial = copy.deepcopy(block).to(*to)
        if is_partitioned:
            deepspeed_patches.hold_as_zero_3(trial)
        (hidden, *rest), named = tree_map_only(Tensor, moved, inputs)
        output = graph(trial.train(), hidden.requires_grad_(), *rest, **named)
        output = output[0] if isinstance(output, tuple) else output
        output.float().sum().backward()
        with torch.no_grad():
            graph(trial.eval(), hidden.detach(), *rest, **named)
    except Exception as error:  # compilers raise any type: torch's, C++'s, Triton's
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A C++ compiler's first error follows a command of thousands of characters.
        errors = [line.partition(" error: ")[2] for line in lines if " error: " in line]
        if errors:
            lines = ["C++ compiler error:", errors[0]]
        return f"{type(error).__name__}: {' '.join(lines)[:REASON_CHARACTERS]}"
    return None


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward pass
    """A block is about to run, with these arguments."""


def _inputs_of(
    model: nn.Module, block: nn.Module, batch_shape: tuple[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a model passes to its first block, without running it."""

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
