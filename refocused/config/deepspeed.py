"""DeepSpeed's dictionary, generated from our sections: DeepSpeed takes misspelt keys in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refocused.config.batch_plan import BatchPlan
from refocused.config.fragment import checked_fragment
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig

# Elements. Gradients leave in about 16 buckets, so that sending one hides behind the passes that
# fill the next; smaller ones than 5e7 do not use a link fully, larger ones than 1e8 gain nothing.
_SMALLEST_BUCKET, _LARGEST_BUCKET = 50_000_000, 100_000_000
_BUCKETS = 16
LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's own default


def deepspeed_config(
    *,
    batch: BatchPlan,
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    zero: ZeroConfig,
    parameters: int,
    fragment: Mapping[str, Any],
) -> dict[str, Any]:
    """Write what `deepspeed.initialize` is given; the optimizer and schedule are objects of ours.

    Args:
        batch: The batch of one step.
        optimizer: Only its clipping is DeepSpeed's business.
        precision: What the passes compute in.
        zero: How the state is spread.
        parameters: Elements of the whole model, padding included.
        fragment: The content of a file of `config/deepspeed/`, or nothing.

    Raises:
        ConfigError: The fragment holds something that a section owns, or that is not known.
    """
    generated = {
        "train_batch_size": batch.windows,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": optimizer.clip,
        "zero_optimization": _zero(zero, parameters=parameters),
        # Our AdamW is torch's own, fused: no compiler is needed, also beside an offload.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Our own log lines replace DeepSpeed's; its timers synchronise the device, the one of
        # throughput (on by default) before and after every pass.
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        **_precision(precision),
        **_gradient_sums(precision, zero),
    }
    return _merged(generated, checked_fragment(fragment, zero=zero))


def reduce_bucket_elements(parameters: int) -> int:
    """Return the size of the buckets in which gradients are reduced.

    A bucket is allocated whole: a small model needs no more than its own size.
    """
    return min(parameters, max(_SMALLEST_BUCKET, min(_LARGEST_BUCKET, parameters // _BUCKETS)))


def _precision(precision: PrecisionConfig) -> dict[str, Any]:
    if precision.resolved == "fp32":
        return {}
    if precision.resolved == "bf16":
        return {"bf16": {"enabled": True}}
    return {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.scale_window,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    }


def _gradient_sums(precision: PrecisionConfig, zero: ZeroConfig) -> dict[str, Any]:
    """Sum gradients in float32; DeepSpeed's default is the 16 bit of the passes.

    Adding 16 micro-batches in bf16 loses half of its 8 bits. DeepSpeed cannot do it without ZeRO.
    """
    if precision.resolved == "fp32" or zero.stage == 0:
        return {}
    return {"data_types": {"grad_accum_dtype": "fp32"}}


def _zero(zero: ZeroConfig, *, parameters: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"stage": zero.stage}
    if zero.stage == 0:
        return settings
    settings |= {
        "contiguous_gradients": True,
        "overlap_comm": zero.stage == 3,
        "reduce_bucket_size": reduce_bucket_elements(parameters),
    }
    if zero.offload_optimizer != "none":
        settings["offload_optimizer"] = _offload(zero.offload_optimizer, zero.nvme_path)
    if zero.stage == 3:
        settings |= _stage_3(zero, parameters=parameters)
    return settings


def _stage_3(zero: ZeroConfig, *, parameters: int) -> dict[str, Any]:
    """Keep gathered parameters from the forward to the backward pass, where they fit.

    A parameter is kept when its next use is nearer than the reuse distance, which DeepSpeed counts
    in elements of the modules in between. Measured (two ranks, six blocks): each parameter is
    gathered once a micro-batch from 1 x the model on when every block is a leaf module, from 2 x
    on when not, and from 3 x on when blocks are recomputed besides. With offloaded parameters
    memory comes first, so DeepSpeed's own limits stay.
    """
    live, reuse = LIVE_PARAMETERS, LIVE_PARAMETERS
    if zero.offload_parameters == "none":
        live, reuse = max(live, parameters), max(reuse, 3 * parameters)
    settings: dict[str, Any] = {
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    if zero.offload_parameters != "none":
        settings["offload_param"] = _offload(zero.offload_parameters, zero.nvme_path)
    return settings


def _offload(device: str, nvme_path: str | None) -> dict[str, Any]:
    # Pinned memory makes copies to a GPU asynchronous; on a CPU DeepSpeed ignores it.
    settings: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        settings["nvme_path"] = nvme_path
    return settings


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `top` laid over it, level by level."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged
