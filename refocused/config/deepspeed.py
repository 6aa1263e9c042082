"""Generate DeepSpeed's configuration from the run's sections and a file of `config/deepspeed/`.

DeepSpeed 0.19.8 ignores misspelt top-level keys, so the names allowed in such a file are listed
here (from its `runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/config.py`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from refocused.config.batch_plan import BatchPlan
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig, ZeroSettings
from refocused.config.section import Count, CountOrZero, NotNegative, Section
from refocused.config.setting_help import wanted
from refocused.system.errors import ConfigError, did_you_mean
from refocused.system.strict_json import MalformedError, parse_json

# Elements. With about 16 buckets, sending one overlaps with the passes that fill the next. Buckets
# below 5e7 do not saturate a link; above 1e8 they gain nothing.
_SMALLEST_BUCKET, _LARGEST_BUCKET = 50_000_000, 100_000_000
_BUCKETS = 16
LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's own default


def _of(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


ALLOWED: dict[str, Any] = {
    "aio": {
        **_of(Count, "block_size queue_depth intra_op_parallelism"),
        **_of(bool, "single_submit overlap_events use_gds"),
    },
    "comms_logger": {**_of(bool, "enabled prof_all verbose debug"), "prof_ops": list[str]},
    "communication_data_type": Literal["fp32", "fp16", "bf16"],
    "flops_profiler": {
        **_of(bool, "enabled detailed"),
        **_of(Count, "profile_step top_modules"),
        **{"module_depth": int, "output_file": str, "recompute_fwd_factor": NotNegative},
    },
    "zero_optimization": {
        "offload_optimizer": {
            "buffer_count": Count,
            **_of(bool, "pin_memory pipeline_read pipeline_write fast_init"),
        },
        "offload_param": {
            **_of(Count, "buffer_count buffer_size"),
            **{"max_in_cpu": CountOrZero, "pin_memory": bool},
        },
        **_of(Count, "allgather_bucket_size reduce_bucket_size sub_group_size"),
        **_of(bool, "allgather_partitions contiguous_gradients overlap_comm reduce_scatter"),
        "round_robin_gradients": bool,
        **_of(CountOrZero, "stage3_max_live_parameters stage3_max_reuse_distance"),
        **_of(CountOrZero, "stage3_param_persistence_threshold stage3_prefetch_bucket_size"),
    },
}


def _schema(name: str, allowed: Mapping[str, Any]) -> type[Section]:
    fields: dict[str, Any] = {}
    for key, kind in allowed.items():
        fields[key] = ((_schema(key, kind) if isinstance(kind, dict) else kind) | None, None)
    return pydantic.create_model(name, __base__=Section, **fields)


_Fragment = _schema("fragment", ALLOWED)

_OWNED = {
    "activation_checkpointing": "model.activation_checkpointing",
    **_of("precision.dtype", "bf16 bfloat16 data_types fp16 torch_autocast"),
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "optimizer.lr and the rest of optimizer",
    "scheduler": "schedule.kind and the rest of schedule",
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload_parameters",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "zero.nvme_path",
    "zero_optimization.offload_param.device": "zero.offload_parameters",
    "zero_optimization.offload_param.nvme_path": "zero.nvme_path",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.zero_hpz_partition_size": "zero.partition",
}
_FIXED = {
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_MICS = "set zero.partition=node in the run file."
_REMOVED = {  # by DeepSpeed 0.19 (`runtime/config.py`)
    "elasticity": "keep batch.global_batch_size and resume on any number of ranks.",
    "zero_optimization.mics_hierarchical_params_gather": _MICS,
    "zero_optimization.mics_shard_size": _MICS,
}


def read_fragment(file: Path) -> dict[str, Any]:
    """Read a file of DeepSpeed settings.

    Raises:
        ConfigError: It is not a JSON object, has a key twice, or a setting that is unknown, wrong
            or belongs in the run file; a line for each.
    """
    try:
        content = parse_json(file.read_bytes(), unique_names=True)
    except MalformedError as error:
        raise ConfigError(f"{file}: not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected an object of DeepSpeed settings.")
    try:
        return _Fragment.model_validate(content).model_dump(exclude_unset=True, exclude_none=True)
    except pydantic.ValidationError as failure:
        problems = []
        for detail in failure.errors():
            name, problem = ".".join(map(str, detail["loc"])), f"= {json.dumps(detail['input'])}: "
            is_unknown = detail["type"] == "extra_forbidden"
            problem = _refusal(name, detail["loc"]) if is_unknown else problem + wanted(detail)
            problems.append(f"{file}: {name} {problem}")
        raise ConfigError("\n".join(problems)) from None


def _refusal(name: str, path: tuple[int | str, ...]) -> str:
    if name in _OWNED:
        return f"belongs in the run file: set {_OWNED[name]} there and remove it here."
    if name in _REMOVED:
        return f"was removed from DeepSpeed 0.19. Remove it; instead, {_REMOVED[name]}"
    if name in _FIXED:
        return "is set by the trainer. Remove it."
    level: Any = ALLOWED
    for part in path[:-1]:
        level = level[part]
    hint = did_you_mean(str(path[-1]), level) or f" Known: {', '.join(level)}."
    return f"is not allowed here.{hint}"


def idle_offloads(content: Mapping[str, Any], *, zero: ZeroSettings) -> list[str]:
    """Return the offload settings whose offload the run does not use, one line each."""
    blocks = content.get("zero_optimization", {})
    return [
        f"zero_optimization.{block} works only with {setting}: cpu or nvme."
        for block, setting, device in (
            ("offload_optimizer", "zero.offload_optimizer", zero.offload_optimizer),
            ("offload_param", "zero.offload_parameters", zero.offload_parameters),
        )
        if device == "none" and block in blocks
    ]


def deepspeed_config(
    *,
    batch: BatchPlan,
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    zero: ZeroConfig,
    parameters: int,
    fragment: Mapping[str, Any],
    ranks_here: int = 1,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`; optimizer and schedule are our objects.

    `parameters` counts the whole model with padding; `fragment` is what `read_fragment` returns, or
    empty. The ranks on this node matter to `zero.partition: node`.

    Raises:
        ConfigError: The fragment is for an offload that the run does not have, or the nodes cannot
            partition the weights.
    """
    ranks = batch.world_size
    if zero.partition == "node" and (ranks_here in (1, ranks) or ranks % ranks_here):
        raise ConfigError(
            f"zero.partition=node needs several nodes with the same number of ranks, at least 2; "
            f"here are {ranks_here} of {ranks:,} ranks. Set zero.partition=world."
        )
    if problems := idle_offloads(fragment, zero=zero):
        raise ConfigError("\n".join(problems))
    generated: dict[str, Any] = {
        "train_batch_size": batch.micro_batch_size * batch.gradient_accumulation_steps * ranks,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": optimizer.clip,
        "zero_optimization": _zero(zero, parameters=parameters, ranks_here=ranks_here),
        # Our AdamW is torch's fused one, which needs no compiler, also with an offload.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # We log instead. DeepSpeed's timers synchronize the device; its throughput timer (on by
        # default) does so before and after every pass.
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    if precision.resolved == "bf16":
        generated["bf16"] = {"enabled": True}
    elif precision.resolved == "fp16":
        generated["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.scale_window,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    if precision.resolved != "fp32" and zero.stage > 0:
        # Sum gradients in float32: summing 16 micro-batches in bf16, DeepSpeed's default, loses
        # half of its 8 bits. Stage 0 has no float32 sums.
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(generated, fragment)


def reduce_bucket_elements(parameters: int) -> int:
    """Return the size of a gradient bucket, at most the model's, since it is allocated whole."""
    return min(parameters, max(_SMALLEST_BUCKET, min(_LARGEST_BUCKET, parameters // _BUCKETS)))


def _zero(zero: ZeroConfig, *, parameters: int, ranks_here: int) -> dict[str, Any]:
    """Return the ZeRO section; stage 3 keeps gathered parameters until the backward pass.

    DeepSpeed keeps a parameter if its next use is nearer than the reuse distance, counted in
    elements of the modules in between. Measured (two ranks, six blocks): each parameter is gathered
    once a micro-batch with 1 x the model if every block is a leaf module, 2 x if not, and 3 x if
    blocks are recomputed. Offloaded parameters keep DeepSpeed's limits, to save memory, and a copy
    in the node makes it cheap to release parameters after the forward pass.
    """
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
    if zero.stage < 3:
        return settings
    live = reuse = LIVE_PARAMETERS
    if zero.partition == "node":
        settings["zero_hpz_partition_size"], reuse = ranks_here, 0
    elif zero.offload_parameters == "none":
        live, reuse = max(live, parameters), max(reuse, 3 * parameters)
    else:
        settings["offload_param"] = _offload(zero.offload_parameters, zero.nvme_path)
    return settings | {
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
        "stage3_gather_16bit_weights_on_model_save": False,
    }


def _offload(device: str, nvme_path: str | None) -> dict[str, Any]:
    # Pinned memory makes copies to a GPU asynchronous; on a CPU DeepSpeed ignores it.
    settings: dict[str, Any] = {"device": device, "pin_memory": True}
    return settings | ({"nvme_path": nvme_path} if device == "nvme" else {})


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `top` laid over it, level by level."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merged(below, value)
        merged[key] = value
    return merged
