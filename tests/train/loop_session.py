"""A session of training with stand-ins, and what their log holds of it."""

from __future__ import annotations

from typing import cast

from run_fakes import OPTIMIZER, SCHEDULE, FakeStop, Log

from refocused.engine.schedule import learning_rate
from refocused.train.step.loop import Outcome, train
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest


def run(
    parts: Parts, log: Log, *, stop_when: str | None = None, state: TrainState | None = None
) -> Outcome:
    """Train; the stop is asked for as soon as the log holds the entry `stop_when`."""
    stop = cast("StopRequest", FakeStop(log, stop_when))
    return train(parts, state or TrainState(), stop)


def rate(step: int, total: int) -> str:
    """Return the entry of the update that follows on `step` of `total` steps."""
    value = learning_rate(step, peak=OPTIMIZER.lr, total_steps=total, schedule=SCHEDULE)
    return f"update {value:.6f}"


def happened(log: Log, *words: str) -> list[str]:
    """Return the entries that begin with one of the words, in order."""
    return [entry for entry in log if entry.split()[0] in words]
