"""Memory between steps: collect cycles when the loop says so, and keep freed memory mapped."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator, Mapping

from refocused.estimate.memory_plan import HostPlan


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the `with`, import; the cycle collector rests, and walks what is then there no more.

    torch, transformers and DeepSpeed make a million objects that stay to the end. Collections in
    the midst of that took 2 s of the 9 s of CPU that a rank's start needs, and every later one
    walks them again. What else is alive at the end of the `with` is kept too, if it is a cycle:
    nothing large may be among it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


WARM_STEPS = 3  # what is alive after them is taken to stay
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's settings, in glibc's malloc.h
MOST_TRIMMED = 2**31 - 1  # mallopt takes an int
# What a user chooses malloc by: name of the variable, and what in its value does.
CHOICES = {
    **dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"), ""),
    **{"MALLOC_TOP_PAD_": "", "GLIBC_TUNABLES": "glibc.malloc", "LD_PRELOAD": "alloc"},
}


class Garbage:
    """Keeps the collector from stopping one rank, and with it all, at a time of its own.

    A collection walks every object: with torch, DeepSpeed and transformers loaded that takes some
    tenths of a second. Inside the `with`, what is alive after the warm-up is walked no more, and
    the rest only in `collect`.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._was_enabled = True

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
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
    """Keep what a step frees on the host mapped, so that the next step need not clear it again.

    Temporaries of hundreds of MB otherwise come from the kernel each time, and page faults take
    half of a large step. Call this when the states are built: what building freed is given back.

    Args:
        plan: Of this machine's memory.
        available: What is left of it, in bytes.
        ranks_here: Ranks that share it.
        environment: Settings of malloc in it are left as they are.

    Returns:
        What was done, and why, for the log; empty where a step frees nothing large.
    """
    if not plan.temporaries:
        return ""
    chosen = [n for n, word in CHOICES.items() if n in environment and word in environment[n]]
    spare = (available - plan.for_keeping) // ranks_here
    if chosen:
        return f"freed memory: as {chosen[0]} says"
    if spare <= 0:
        return f"freed memory: returned (keeping it takes {plan.for_keeping / 1e9:.1f} GB)"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Not M_MMAP_THRESHOLD: older versions of glibc refuse more than 32 MiB.
    if mallopt is None or not mallopt(MMAP_MAX, 0):
        return "freed memory: returned (no glibc)"
    mallopt(TRIM_THRESHOLD, spare if spare <= MOST_TRIMMED else -1)
    return "freed memory: kept"
