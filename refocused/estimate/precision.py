"""Decide what `precision.dtype: auto` is, from what the hardware computes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from refocused.config.load_run import LoadedRun
from refocused.config.optimization import Dtype
from refocused.system.errors import ConfigError

BF16_CAPABILITY = (8, 0)  # Ampere; torch emulates bf16 on older GPUs, at a fraction of the speed
BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
# From the fastest to the one that runs everywhere: ranks that differ take the last one of theirs.
FASTEST_FIRST: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


@dataclasses.dataclass(frozen=True, slots=True)
class NativeDtype:
    """What the hardware computes fastest in, and why."""

    dtype: Dtype
    reason: str


def native_dtype(
    *, capability: tuple[int, int] | None, cpu_flags: Collection[str] = ()
) -> NativeDtype:
    """Return the fastest precision of a GPU or a processor.

    Args:
        capability: Compute capability of the GPU; None: the run trains on the CPU.
        cpu_flags: Instruction sets of the processor, as in /proc/cpuinfo.
    """
    if capability is not None:
        number = ".".join(str(part) for part in capability)
        if capability >= BF16_CAPABILITY:
            return NativeDtype("bf16", f"the GPU computes in it (compute capability {number})")
        return NativeDtype("fp16", f"the GPU has no bf16 (compute capability {number})")
    found = [name for flag, name in BF16_FLAGS.items() if flag in cpu_flags]
    if found:
        return NativeDtype("bf16", f"the processor computes in it ({', '.join(found)})")
    names = " or ".join(BF16_FLAGS.values())
    return NativeDtype("fp32", f"the processor has no bf16 instructions ({names})")


def with_dtype(loaded: LoadedRun, dtype: Dtype) -> LoadedRun:
    """Return a run whose `precision.dtype: auto` is decided.

    Raises:
        ConfigError: The run multiplies in 8 bits, which needs bf16 beside them.
    """
    config = loaded.config
    if config.precision.fp8 != "none" and dtype != "bf16":
        raise ConfigError(
            f"precision.fp8={config.precision.fp8} needs bf16, and precision.dtype=auto is {dtype} "
            "here. Set precision.fp8=none."
        )
    precision = config.precision.model_copy(update={"dtype": dtype})
    return dataclasses.replace(loaded, config=config.model_copy(update={"precision": precision}))
