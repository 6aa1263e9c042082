"""Python's cycle collector, run when the loop says so and not in the middle of a step."""

from __future__ import annotations

import gc

WARM_STEPS = 3  # what is alive after them is taken to stay


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
