"""Build the engine: partition a model over the ranks with DeepSpeed."""

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig, PrecisionConfig
from refocused.engine import deepspeed_patches
from refocused.engine.bit_checks import BitChecks
from refocused.engine.compiled import DTYPES
from refocused.engine.engine import Engine
from refocused.engine.finite_updates import FiniteUpdates
from refocused.engine.optimizer import build_optimizer, set_layouts
from refocused.metrics.meter import Meter
from refocused.system.errors import ConfigError
from refocused.system.world import World


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
    meter: Meter | None = None,
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

    deepspeed_patches.quieten_deepspeed()
    if world.device_kind == "cpu":
        deepspeed_patches.use_plain_collectives()
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
    deepspeed_patches.undo_warm_up_step(engine.optimizer)
    set_layouts(engine.optimizer, stage=settings["zero_optimization"]["stage"])
    guard = _guard(engine.optimizer, zero=settings["zero_optimization"], precision=precision)
    meter = meter or Meter(device_kind=world.device_kind)
    deepspeed_patches.count_waits(engine, meter)
    checks = BitChecks(engine, replay_every=replay_every, world=world) if replay_every else None
    return Engine(
        engine, device=world.device, rank=world.rank, guard=guard, meter=meter, checks=checks
    )


def set_product_precision(precision: PrecisionConfig) -> None:
    """Set the precision of float32 products; call before compiling, which depends on it."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")


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
        deepspeed_patches.guard_partitioned(optimizer, guard)
    return guard
