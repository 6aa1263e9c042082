"""Send measurements to trackers. They never stop or delay training."""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from refocused.config.outputs import TrackingConfig
from refocused.system.errors import short_reason

if TYPE_CHECKING:
    from refocused.system.world import World

Record = Mapping[str, Any]  # its `kind`, its `step`, and what was measured
Report = Callable[[Literal["tracker", "tracker_warning"], str], None]

# Setting of `tracking`: the tracker's class, imported if the setting is on.
TRACKERS = {
    "wandb": "refocused.metrics.wandb:WandbTracker",
    "tensorboard": "refocused.metrics.tracker_files:TensorBoardTracker",
    "openmetrics": "refocused.metrics.tracker_files:OpenMetricsTracker",
}
ROOM = 1000  # waiting records, each of less than 2 KB but for the rare histograms
END = "end"  # kind of a session's last record: the time and the cost of the whole run
_GROUPS = {"step": "train", END: "train"}  # prefix of a kind's metrics, if not the kind itself


class Tracker(Protocol):
    """A destination of records, built from a `TrackedRun`.

    All methods are called from one thread, and may raise any exception.
    """

    name: str  # for messages

    def open(self) -> str:
        """Connect; return where the records go, for the log."""

    def write(self, record: Record) -> None:
        """Write a record."""

    def close(self, exit_code: int) -> str:
        """Close; return what the user should do next, if anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    """What trackers may know of a run."""

    folder: Path
    name: str
    step: int  # where training starts
    settings: Mapping[str, object]  # all of the run, nested
    tracking: TrackingConfig
    wandb_id: str | None = None  # from the checkpoint
    is_automatic: bool = True  # it starts from the newest step, not from a chosen one


def start_tracking(
    run: TrackedRun, world: World, *, track: Callable[[Trackers], None], report: Report
) -> str | None:
    """Open the trackers on rank 0; return the run id at Weights & Biases, if any.

    Every rank must call; `track` receives the trackers on rank 0. They open in their own threads
    and cannot fail the run.
    """

    def start() -> str | None:
        trackers: list[Tracker] = [
            pkgutil.resolve_name(name)(run)
            for setting, name in TRACKERS.items()
            if getattr(run.tracking, setting)
        ]
        if trackers:
            track(Trackers(trackers, report=report))
        ids = [str(tracker.run_id) for tracker in trackers if hasattr(tracker, "run_id")]
        return ids[0] if ids else run.wandb_id

    return world.on_rank_0(start)


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Sequence[Tracker], *, report: Report, room: int = ROOM) -> None:
        """Open each tracker in its own thread, with a queue of at most `room` records.

        `report` is called from the caller's thread, so that only one thread writes the run's files.
        """
        self._threads = [_TrackerThread(tracker, room) for tracker in trackers]
        self._report = report

    def record(self, record: Record) -> None:
        """Queue a record for all trackers; never waits."""
        for thread in self._threads:
            thread.record(record)
        self._pass_on()

    def close(self, exit_code: int, *, limit_seconds: float) -> None:
        """Close all trackers; those not done within the limit end with the process."""
        deadline = time.monotonic() + limit_seconds
        for thread in self._threads:
            thread.begin_end(exit_code, deadline)
        for thread in self._threads:
            thread.finish_end(deadline)
        self._pass_on()

    def _pass_on(self) -> None:
        for thread in self._threads:
            while not thread.notes.empty():
                self._report(*thread.notes.get())


class _TrackerThread:
    """A tracker in a daemon thread, behind a bounded queue that ends with the exit code."""

    def __init__(self, tracker: Tracker, room: int) -> None:
        self._tracker = tracker
        self._queue: queue.Queue[Record | int] = queue.Queue(room)
        self.notes: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
        self._dropped = self._refused = 0
        self._is_off = False
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        if self._is_off:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._dropped:
                self._warn("is too slow: records are dropped until it has caught up")
            self._dropped += 1

    def begin_end(self, exit_code: int, deadline: float) -> None:
        with contextlib.suppress(queue.Full):  # `finish_end` finds that it has not ended
            self._queue.put(exit_code, timeout=max(0.0, deadline - time.monotonic()))

    def finish_end(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._queue.qsize()
            self._warn(f"did not finish in time: about {waiting:,} records are missing")
        if self._dropped or self._refused:
            self._warn(
                f"lacks {self._dropped + self._refused:,} records: {self._dropped:,} dropped while "
                f"it was too slow, {self._refused:,} refused"
            )

    def _work(self) -> None:
        # Whatever a tracker raises, training continues without it.
        try:
            self._note(self._tracker.open())
        except Exception as error:
            self._is_off = True
            self._warn(f"records nothing in this session: {short_reason(error)}")
            return
        is_refusing = False
        while not isinstance(record := self._queue.get(), int):
            try:
                self._tracker.write(record)
                is_refusing = False
            except Exception as error:
                self._refused += 1
                if not is_refusing:
                    self._warn(f"refused a record: {short_reason(error)}")
                is_refusing = True
        try:
            if text := self._tracker.close(record):
                self._note(text)
        except Exception as error:
            self._warn(f"failed to close: {short_reason(error)}")

    def _note(self, text: str) -> None:
        self.notes.put(("tracker", f"  tracker  {self._tracker.name}: {text}"))

    def _warn(self, text: str) -> None:
        warning = f"warning: {self._tracker.name} {text}. The run's own files are complete."
        self.notes.put(("tracker_warning", warning))


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """How the elements of a tensor are distributed, in bins of equal width."""

    name: str  # `weights/NAME` or `gradients/NAME`
    low: float  # lower edge: the smallest element, unless all are equal
    high: float  # upper edge: the largest element, unless all are equal
    counts: Sequence[int]  # elements in each bin
    total: float  # sum of the elements
    squares: float  # sum of their squares

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than `counts`."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + index * width for index in range(len(self.counts) + 1)]


def scalars(record: Record) -> dict[str, float]:
    """Return a record's known numbers by the names that trackers show.

    `train/loss` is of a step, `validation/loss` of a validation, `tasks/hellaswag/acc/value` of a
    task, `train/sources/web/tokens` of a source.
    """
    kind: str = record["kind"]
    group = _GROUPS.get(kind, kind)
    numbers = dict(_numbers(record, group))
    del numbers[f"{group}/step"]
    return numbers


def _numbers(values: Record, group: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        name = name.removeprefix("validation_")
        # A record of tasks holds them under `tasks`, the group of its kind.
        inner = group if name == group else f"{group}/{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield inner, float(value)
