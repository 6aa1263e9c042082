"""Build the engine: partition a model over the ranks with DeepSpeed."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig, PrecisionConfig
from refocused.engine.bit_checks import BitChecks
from refocused.engine.compiled import DTYPES
from refocused.engine.engine import Engine
from refocused.engine.finite_updates import FiniteUpdates, guard_partitioned
from refocused.engine.optimizer import build_optimizer, set_layouts
from refocused.metrics.throughput import StepPhases
from refocused.system.errors import ConfigError
from refocused.system.world import World

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor"),
)


def why_no_async_io(device: str) -> str | None:
    """Return why DeepSpeed's asynchronous I/O cannot be built here; None if it can."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # avoids a search with warnings
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if builder.is_compatible(verbose=False):
        return None
    return builder.error_log or "libaio's headers (libaio-dev) are not found"


def build_engine(
    model: nn.Module,
    *,
    block_class: type[nn.Module],
    settings: Mapping[str, Any],
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    world: World,
    replay_every: int | None = None,
) -> Engine:
    """Partition an initialized model, identical on every rank, over the ranks.

    Under ZeRO-3 each block is gathered as a unit, which halves the host's work per micro-batch.
    `settings` is DeepSpeed's dictionary, from `refocused.config.deepspeed`. `replay_every`: see
    `BitChecks`. Raises ConfigError if the processor cannot compute in fp16.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device_kind)  # avoids a search with warnings
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init, is_zero_param

    quieten_deepspeed()
    if world.device_kind == "cpu":
        # Without this DeepSpeed compiles a C++ all-reduce at start (35-80 s, needs g++); gloo
        # gives bit-identical results.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if precision.resolved == "fp16" and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            "precision.dtype is fp16, which this processor cannot compute. Set "
            "precision.dtype=bf16 or fp32."
        )
    set_product_precision(precision)
    updates = build_optimizer(model, optimizer, block_class=block_class)  # needs shapes, so first
    if settings["zero_optimization"]["stage"] == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [block_class])
        # Block by block: DeepSpeed would cast and move the whole model first.
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
        dtype = DTYPES[precision.resolved]
        converted: Any = None  # by the only `Init`, since each would make its own groups of ranks
        for part in [*(one for one in model.modules() if isinstance(one, block_class)), model]:
            whole = [one for one in part.parameters() if not is_zero_param(one)]
            for parameter in whole:
                parameter.data = parameter.data.to(dtype)
            if converted is None:
                Init(module=part, config_dict_or_path=dict(settings), dtype=dtype)
                converted = whole[0]
            else:
                converted.convert_to_zero_parameters(param_list=whole)
        for buffer in model.buffers():  # DeepSpeed would leave them: a copy, and a wait, each pass
            buffer.data = buffer.data.to(world.device)
    with contextlib.redirect_stdout(io.StringIO()):  # bf16 at stage 1 prints 20 lines
        engine, *_ = deepspeed.initialize(model=model, optimizer=updates, config=dict(settings))
    _undo_warm_up_step(engine.optimizer)
    set_layouts(engine.optimizer, stage=settings["zero_optimization"]["stage"])
    guard = _guard(engine.optimizer, zero=settings["zero_optimization"], precision=precision)
    phases = StepPhases(world.device_kind)
    _count_waits(engine, phases)
    checks = BitChecks(engine, replay_every=replay_every, world=world) if replay_every else None
    return Engine(
        engine, device=world.device, rank=world.rank, guard=guard, phases=phases, checks=checks
    )


def _count_waits(engine: Any, phases: StepPhases) -> None:
    """Count the time in which the queue of the computation waits for other ranks as `wait`.

    Under ZeRO-3 that is before each block, until its weights are gathered, and at the end of a
    backward pass, until its gradients are reduced. A collective itself counts where it is issued in
    that queue: in an update, below stage 3 and on a CPU. In another stream it delays nothing.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm

    offload = getattr(engine.optimizer, "parameter_offload", None)
    for owner, name in (
        (getattr(offload, "param_coordinator", None), "fetch_sub_module"),
        (engine.optimizer, "independent_gradient_partition_epilogue"),
        (engine.optimizer, "_post_step"),  # gathers small weights
    ):
        if hasattr(owner, name):
            setattr(owner, name, phases.as_wait(getattr(owner, name)))

    def computes() -> bool:
        accelerator = get_accelerator()
        return bool(accelerator.current_stream() == accelerator.default_stream())

    for name in COLLECTIVES:
        # All engines of a process share it: wrap the class's own method, not an earlier wrapper.
        method = getattr(type(comm.cdb), name).__get__(comm.cdb)
        setattr(comm.cdb, name, phases.as_wait(method, if_=computes))


def set_product_precision(precision: PrecisionConfig) -> None:
    """Set the precision of float32 products; call before compiling, which depends on it."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")


def load_deepspeed() -> None:
    """Import what `deepspeed.initialize` needs; `DS_ACCELERATOR` must be set.

    DeepSpeed's own Muon, unused here, calls torch.compile when imported, which imports inductor:
    1.3 s on every rank, avoided here.
    """

    def unchanged(function: Any = None, **_: Any) -> Any:
        return unchanged if function is None else function  # a decorator, with or without arguments

    compile_ = torch.compile
    torch.compile = unchanged  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        torch.compile = compile_
    import deepspeed.runtime.zero.stage3  # noqa: F401


def _guard(
    optimizer: Any, *, zero: Mapping[str, Any], precision: PrecisionConfig
) -> FiniteUpdates | None:
    """Skip non-finite updates on the device if possible; None: DeepSpeed checks on the host.

    That is so in fp16 (its loss scale is on the host), with offload (so is the gradient), and for
    DeepSpeed's 16-bit optimizer without ZeRO.
    """
    is_plain = zero["stage"] == 0
    on_the_host = precision.resolved == "fp16" or "offload_optimizer" in zero
    if on_the_host or (is_plain and precision.resolved != "fp32"):
        return None
    updating = optimizer if is_plain else optimizer.optimizer
    if not getattr(updating, "_step_supports_amp_scaling", False):
        return None  # it does not read `found_inf`
    guard = FiniteUpdates(updating)
    if not is_plain:
        guard_partitioned(optimizer, guard)
    return guard


def _undo_warm_up_step(optimizer: Any) -> None:
    """Undo the update that DeepSpeed's 16-bit optimizer of stage 0 makes when built.

    It allocates Adam's moments by a step with zero gradients, which decays the weights once and
    leaves the bias correction one step ahead.
    """
    if not hasattr(optimizer, "fp32_groups"):
        return
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def quieten_deepspeed() -> None:
    """Turn off per-operation profiler ranges (3 % of host time) and messages below warnings."""
    import deepspeed.utils.nvtx

    deepspeed.utils.nvtx.enable_nvtx = False
    # DeepSpeed 0.19 uses names of collectives that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.distributed", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It warns of our Muon, an "untested optimizer".
    logging.getLogger("DeepSpeed").addFilter(lambda one: "untested" not in one.getMessage())
