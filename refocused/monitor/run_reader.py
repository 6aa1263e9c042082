"""What the run's own files say of it, read again and again without reading it all again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.metrics.history import METRICS_FILE, MetricsTimeline
from refocused.metrics.jsonl import JsonLinesTail, ReplacedFile

RECENT_RECORDS = 51  # of steps: the last, and 50 to compare it with
TAIL_BYTES = 2**16  # of the metrics of earlier sessions: enough for the losses before this one


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step that was logged.

    Attributes:
        step: Its number.
        loss: Its training loss; None: it was not finite.
        at: When it was logged, in seconds of Unix time.
    """

    step: int
    loss: float | None
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorSight:
    """What the mirror said last.

    Attributes:
        waiting: Steps that it has yet to copy.
        last_error: Why the last attempt failed; None: it did not.
        heartbeat: When it said so, in seconds of Unix time.
        drained: It was asked to finish and has done so; then it has ended.
    """

    waiting: int
    last_error: str | None
    heartbeat: float
    drained: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RunSight:
    """A run at one time; None: unknown.

    Attributes:
        began: When watching it began, in seconds of Unix time.
        alive: Whether the process that trains runs.
        status: `training`, `stopped`, `finished`, `failed`.
        step: The last one that was logged.
        total_steps: Of the whole run.
        logged: The last steps that were logged, in order; of one way of training only.
        mirror: Its background copy; None: there is none, or it has said nothing.
        cost_usd: What the run has cost so far, over all its sessions.
        cost_left_usd: What the rest will cost.
    """

    began: float
    alive: bool
    status: str | None = None
    step: int | None = None
    total_steps: int | None = None
    logged: tuple[LoggedStep, ...] = ()
    mirror: MirrorSight | None = None
    cost_usd: float | None = None
    cost_left_usd: float | None = None

    @property
    def logged_now(self) -> list[LoggedStep]:
        """The logged steps of this session."""
        return [logged for logged in self.logged if logged.at >= self.began]

    @property
    def is_training(self) -> bool:
        """Whether it takes steps: it says so, has taken one in this session, and has some left."""
        going_on = self.alive and self.status == "training" and bool(self.logged_now)
        return going_on and not (self.step is not None and self.step == self.total_steps)


class RunReader:
    """Follows a run's `state.json`, `mirror.json` and metrics."""

    def __init__(self, folder: Path, *, began: float) -> None:
        """Begin with the end of the metrics; `began` is when watching began, in Unix seconds."""
        self._began = began
        self._state = ReplacedFile(folder / "state.json")
        self._mirror = ReplacedFile(folder / "mirror.json")
        self._metrics = JsonLinesTail(folder / METRICS_FILE, last_bytes=TAIL_BYTES)
        self._way = MetricsTimeline(last=RECENT_RECORDS)

    def sight(self, *, alive: bool) -> RunSight:
        """Return what is to be seen now; `alive` says whether the process that trains runs."""
        for record in self._metrics.records():
            self._way.add(record)
        state, mirror = self._state.content(), self._mirror.content()
        steps = self._way.steps
        return RunSight(
            began=self._began,
            alive=alive,
            status=state.get("status"),
            step=state.get("step"),
            total_steps=state.get("total_steps"),
            logged=tuple(
                LoggedStep(step.step, step.loss, step.time)
                for step in steps
                if step.time is not None
            ),
            mirror=_mirror_sight(mirror),
            cost_usd=state.get("cost_usd"),
            cost_left_usd=steps[-1].cost_left_usd if steps else None,
        )


def _mirror_sight(status: Mapping[str, Any]) -> MirrorSight | None:
    """Read what the mirror writes; its form belongs to `checkpoints.mirror_status`."""
    heartbeat = status.get("heartbeat")
    if heartbeat is None:
        return None
    return MirrorSight(
        len(status.get("waiting", ())),
        status.get("last_error"),
        heartbeat,
        drained=status.get("drained") is not None,
    )
