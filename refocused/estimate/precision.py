"""Choose the type for `precision.dtype: auto` from the hardware."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection

from refocused.config.load_run import LoadedRun
from refocused.config.optimization import Dtype
from refocused.system.errors import ConfigError
from refocused.system.hardware import BF16_FLAGS

BF16_CAPABILITY = (8, 0)  # Ampere; torch emulates bf16 on older GPUs, at a fraction of the speed
TIMED_ROUNDS, TIMED_SIZE = 5, (1024, 768)  # 0.1 s in all on one core of a Xeon
# If the types of the ranks differ, all take the last one in this order.
FASTEST_FIRST: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


@dataclasses.dataclass(frozen=True, slots=True)
class NativeDtype:
    """The fastest type of the hardware, and why."""

    dtype: Dtype
    reason: str


def native_dtype(
    *,
    capability: tuple[int, int] | None,
    cpu_flags: Collection[str] = (),
    cpu_gain: Callable[[], float] | None = None,
) -> NativeDtype:
    """Return the fastest type of a GPU or a processor.

    Args:
        capability: Compute capability of the GPU; None: the run trains on the CPU.
        cpu_flags: Instruction sets of the processor, as in /proc/cpuinfo.
        cpu_gain: Measures the gain of bf16; called if the flags have it, because on some virtual
            machines it is slower than float32. None: trust the flags.
    """
    if capability is not None:
        number = ".".join(str(part) for part in capability)
        if capability >= BF16_CAPABILITY:
            return NativeDtype("bf16", f"the GPU computes in it (compute capability {number})")
        return NativeDtype("fp16", f"the GPU has no bf16 (compute capability {number})")
    names = " or ".join(BF16_FLAGS.values())
    found = ", ".join(name for flag, name in BF16_FLAGS.items() if flag in cpu_flags)
    if not found:
        return NativeDtype("fp32", f"the processor has no bf16 instructions ({names})")
    if cpu_gain is not None and (gain := cpu_gain()) < 1:
        reason = f"a product in bf16 takes {1 / gain:.1f} times as long here, despite {found}"
        return NativeDtype("fp32", reason)
    return NativeDtype("bf16", f"the processor computes in it ({found})")


def cpu_bf16_gain() -> float:
    """Time a matrix product in float32 and bf16 alternately; return the speed-up of bf16."""
    import torch

    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(TIMED_ROUNDS):
        for dtype in seconds:
            rows, weight = (torch.ones(TIMED_SIZE, dtype=dtype) for _ in range(2))
            began = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - began)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def with_dtype(loaded: LoadedRun, dtype: Dtype) -> LoadedRun:
    """Return a run with `dtype` in place of `auto`; raise ConfigError if its fp8 needs bf16."""
    config = loaded.config
    if config.precision.fp8 != "none" and dtype != "bf16":
        raise ConfigError(
            f"precision.fp8={config.precision.fp8} needs bf16, and precision.dtype=auto is {dtype} "
            "here. Set precision.fp8=none."
        )
    precision = config.precision.model_copy(update={"dtype": dtype})
    return dataclasses.replace(loaded, config=config.model_copy(update={"precision": precision}))
