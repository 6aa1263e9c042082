"""What a file of `config/deepspeed/` may say: DeepSpeed settings that no section of a run owns.

DeepSpeed 0.19.8 takes misspelt top-level keys in silence, so the names it may hold are listed here
(from its `runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/config.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic_core import ErrorDetails

from refocused.config.optimization import ZeroSettings
from refocused.config.section import Count, CountOrZero, NotNegative, Section
from refocused.config.suggestions import did_you_mean, wanted
from refocused.system.errors import ConfigError
from refocused.system.strict_json import MalformedError, parse_json

_Dtype = Literal["fp32", "fp16", "bf16"]


class _OffloadOptimizer(Section):
    buffer_count: Count | None = None
    pin_memory: bool | None = None
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None


class _OffloadParameters(Section):
    buffer_count: Count | None = None
    buffer_size: Count | None = None
    max_in_cpu: CountOrZero | None = None
    pin_memory: bool | None = None


class _Zero(Section):
    allgather_bucket_size: Count | None = None
    allgather_partitions: bool | None = None
    contiguous_gradients: bool | None = None
    offload_optimizer: _OffloadOptimizer | None = None
    offload_param: _OffloadParameters | None = None
    overlap_comm: bool | None = None
    reduce_bucket_size: Count | None = None
    reduce_scatter: bool | None = None
    round_robin_gradients: bool | None = None
    stage3_max_live_parameters: CountOrZero | None = None
    stage3_max_reuse_distance: CountOrZero | None = None
    stage3_param_persistence_threshold: CountOrZero | None = None
    stage3_prefetch_bucket_size: CountOrZero | None = None
    sub_group_size: Count | None = None
    zero_hpz_partition_size: Count | None = None


class _Aio(Section):
    block_size: Count | None = None
    queue_depth: Count | None = None
    intra_op_parallelism: Count | None = None
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None


class _CommsLogger(Section):
    enabled: bool | None = None
    prof_all: bool | None = None
    prof_ops: list[str] | None = None
    verbose: bool | None = None
    debug: bool | None = None


class _FlopsProfiler(Section):
    enabled: bool | None = None
    recompute_fwd_factor: NotNegative | None = None
    profile_step: Count | None = None
    module_depth: int | None = None
    top_modules: Count | None = None
    detailed: bool | None = None
    output_file: str | None = None


class _Fragment(Section):
    aio: _Aio | None = None
    comms_logger: _CommsLogger | None = None
    communication_data_type: _Dtype | None = None
    flops_profiler: _FlopsProfiler | None = None
    zero_optimization: _Zero | None = None


_OWNED = {
    "activation_checkpointing": "model.activation_checkpointing",
    "bf16": "precision.dtype",
    "bfloat16": "precision.dtype",
    "data_types": "precision.dtype",
    "fp16": "precision.dtype",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "optimizer.lr and the rest of optimizer",
    "scheduler": "schedule.kind and the rest of schedule",
    "torch_autocast": "precision.dtype",
    "train_batch_size": "batch.windows",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload_parameters",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "zero.nvme_path",
    "zero_optimization.offload_param.device": "zero.offload_parameters",
    "zero_optimization.offload_param.nvme_path": "zero.nvme_path",
    "zero_optimization.stage": "zero.stage",
}
_FIXED = {
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def read_fragment(file: Path) -> dict[str, Any]:
    """Read a fragment; `fragment_problems` says whether it may be used.

    Raises:
        ConfigError: The file is not a JSON object, or has a key twice.
    """
    try:
        content = parse_json(file.read_bytes(), unique_names=True)
    except MalformedError as error:
        raise ConfigError(f"{file}: not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: an object of DeepSpeed settings is wanted.")
    return content


def fragment_problems(content: Mapping[str, Any]) -> list[str]:
    """Say everything that a fragment may not hold, one line each."""
    try:
        _Fragment.model_validate(content)
    except pydantic.ValidationError as failure:
        return [_explain(error) for error in failure.errors()]
    return []


def idle_offloads(content: Mapping[str, Any], *, zero: ZeroSettings) -> list[str]:
    """Say which offload buffers of a valid fragment belong to an offload the run has not got."""
    blocks = content.get("zero_optimization", {})
    return [
        f"zero_optimization.{block} is of use only with {setting}: cpu or nvme."
        for block, setting, device in (
            ("offload_optimizer", "zero.offload_optimizer", zero.offload_optimizer),
            ("offload_param", "zero.offload_parameters", zero.offload_parameters),
        )
        if device == "none" and block in blocks
    ]


def checked_fragment(content: Mapping[str, Any], *, zero: ZeroSettings) -> dict[str, Any]:
    """Return a fragment's settings in DeepSpeed's types.

    Raises:
        ConfigError: It holds something it may not; every such thing is named.
    """
    problems = fragment_problems(content) or idle_offloads(content, zero=zero)
    if problems:
        raise ConfigError("\n".join(problems))
    return _Fragment.model_validate(content).model_dump(exclude_unset=True, exclude_none=True)


def _explain(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _refusal(name, error["loc"])
    return f"{name} = {json.dumps(error['input'])}: {wanted(error)}"


def _refusal(name: str, path: tuple[int | str, ...]) -> str:
    if name in _OWNED:
        return f"{name} belongs to the run file: set {_OWNED[name]} there and leave it out here."
    if name in _FIXED:
        return f"{name} is set by the trainer itself. Leave it out."
    level: Any = _FIELDS
    for part in path[:-1]:
        level = level[part]
    there_are = f" There are {', '.join(level)}."
    return f"{name} is not taken here.{did_you_mean(str(path[-1]), level) or there_are}"


def _tree(section: type[Section]) -> dict[str, Any]:
    """Return a section's names, each with the names below it."""
    return {name: dict(_below(field.annotation)) for name, field in section.model_fields.items()}


def _below(annotation: Any) -> Iterator[tuple[str, Any]]:
    for part in getattr(annotation, "__args__", ()):
        if isinstance(part, type) and issubclass(part, Section):
            yield from _tree(part).items()


_FIELDS = _tree(_Fragment)
