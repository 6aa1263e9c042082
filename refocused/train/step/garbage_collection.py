"""Memory between steps: collect garbage only on request, and keep freed memory mapped."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refocused.estimate.memory_plan import HostPlan

WARM_STEPS = 3  # objects that are alive after them are taken to stay
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h
MOST_TRIMMED = 2**31 - 1  # mallopt takes an int
# Environment variables by which a user configures malloc, and what their values then contain.
CHOICES = {
    "MALLOC_TRIM_THRESHOLD_": "",
    "MALLOC_MMAP_THRESHOLD_": "",
    "MALLOC_MMAP_MAX_": "",
    "MALLOC_TOP_PAD_": "",
    "GLIBC_TUNABLES": "glibc.malloc",
    "LD_PRELOAD": "alloc",
}


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude everything imported from later collections.

    torch, transformers and DeepSpeed create a million objects that stay. Collecting them while they
    are imported took 2 s of the 9 s of CPU time of a rank's start. Cycles that are alive at the end
    are never freed, so nothing large may be among them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Garbage:
    """Collects garbage only on request, once the warm-up steps are over.

    A collection walks every object, which takes some tenths of a second with torch, DeepSpeed and
    transformers loaded. An automatic one would stop one rank, and the others would wait for it.
    Objects alive after the warm-up are not walked again.
    """

    def __init__(self) -> None:
        self._steps, self._was_enabled = 0, gc.isenabled()

    def __enter__(self) -> Garbage:
        return self

    def __exit__(self, *reason: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def step(self) -> None:
        """Count a step; freeze when the warm-up is over."""
        self._steps += 1
        if self._steps == WARM_STEPS:
            gc.collect()
            gc.freeze()
            gc.disable()

    def collect(self) -> None:
        """Remove the cycles made since the warm-up."""
        if self._steps >= WARM_STEPS:
            gc.collect()


def keep_freed_memory(
    plan: HostPlan, *, available: int, ranks_here: int, environment: Mapping[str, str]
) -> str:
    """Keep memory that a step frees on the host mapped, for the next step to use.

    Otherwise the kernel maps and clears temporaries of hundreds of MB anew at each step, and page
    faults take half of a large one. Call this once the model and optimizer states are built.

    The `available` bytes are shared by `ranks_here`. Settings of malloc in `environment` are kept.

    Returns:
        What was done and why, for the log; empty if a step frees nothing large.
    """
    if not plan.temporaries:
        return ""
    chosen = [n for n, word in CHOICES.items() if n in environment and word in environment[n]]
    if chosen:
        return f"freed memory: as {chosen[0]} says"
    spare = (available - plan.for_keeping) // ranks_here
    if spare <= 0:
        return f"freed memory: returned (keeping it takes {plan.for_keeping / 1e9:.1f} GB)"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Not M_MMAP_THRESHOLD: older versions of glibc refuse more than 32 MiB.
    if mallopt is None or not mallopt(MMAP_MAX, 0):
        return "freed memory: returned (no glibc)"
    mallopt(TRIM_THRESHOLD, spare if spare <= MOST_TRIMMED else -1)
    return "freed memory: kept"
