"""Trackers: others that are told what a run measures, none of which can stop or delay it.

Each has a thread and a bounded queue: a step only puts its record there. A record that finds no
room is left out and counted, and what a tracker has to say waits until the run's own thread asks
for it, so that only one thread writes the run's files.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

Record = Mapping[str, object]
NoteKind = Literal["tracker", "tracker_warning"]

ROOM = 1000  # records of less than 2 KB each, but the rare ones of histograms
END = "end"  # kind of a session's last record: the time and the cost of the whole run
_GROUPS = {
    "step": "train",
    END: "train",
}  # what the metrics of a kind of record begin with, if not the kind


class Tracker(Protocol):
    """Whom a run is told to; all calls come from one thread, and any may raise anything.

    Attributes:
        name: What a person calls it.
    """

    name: str

    def open(self) -> str:
        """Begin; return what a person should know of where the records go."""

    def write(self, record: Record) -> None:
        """Take a record: its `kind`, its `step`, and what was measured."""

    def close(self, exit_code: int) -> str:
        """End; return what a person should do about it, if anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """What a tracker has to say: an event's kind and its text."""

    kind: NoteKind
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    exit_code: int


class TrackerThread:
    """A tracker in a thread of its own, which ends with the process at the latest."""

    def __init__(self, tracker: Tracker, *, room: int = ROOM) -> None:
        """Begin to open it.

        Args:
            tracker: Whom to tell.
            room: Records that may wait.
        """
        self._tracker = tracker
        self._queue: queue.Queue[Record | _End] = queue.Queue(room)
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._dropped = self._refused = 0
        self._is_off = False
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        """Hand over a record, or leave it out where too many wait; never waits."""
        if self._is_off:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._dropped:
                self._warn("is too slow: records are left out until it has caught up")
            self._dropped += 1

    def notes(self) -> Iterator[Note]:
        """Take what it has to say."""
        while not self._notes.empty():
            yield self._notes.get()

    def begin_end(self, exit_code: int, *, deadline_seconds: float) -> None:
        """Let it end after what waits, which may take until then by the monotonic clock."""
        try:
            left = max(0.0, deadline_seconds - time.monotonic())
            self._queue.put(_End(exit_code), timeout=left)
        except queue.Full:
            pass  # `finish_end` finds that it has not ended

    def finish_end(self, *, deadline_seconds: float) -> None:
        """Wait until it has ended or the time is over, and say what is missing."""
        self._thread.join(max(0.0, deadline_seconds - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._queue.qsize()
            self._warn(f"did not end in time: about {waiting:,} records are not there")
        if self._dropped or self._refused:
            self._warn(
                f"lacks {self._dropped + self._refused:,} records ({self._dropped:,} for which it "
                f"was too slow, {self._refused:,} that it refused)"
            )

    def _work(self) -> None:
        try:
            self._say("tracker", f"  tracker  {self._tracker.name}: {self._tracker.open()}")
        except Exception as error:  # this edge: whatever it is, training goes on without it
            self._is_off = True
            self._warn(f"is not told of this session: {_reason(error)}")
            return
        is_refusing = False
        while not isinstance(record := self._queue.get(), _End):
            try:
                self._tracker.write(record)
                is_refusing = False
            except Exception as error:  # the same edge
                self._refused += 1
                if not is_refusing:
                    self._warn(f"refused a record: {_reason(error)}")
                is_refusing = True
        try:
            said = self._tracker.close(record.exit_code)
        except Exception as error:  # the same edge
            self._warn(f"did not end well: {_reason(error)}")
            return
        if said:
            self._say("tracker", f"  tracker  {self._tracker.name}: {said}")

    def _warn(self, text: str) -> None:
        self._say(
            "tracker_warning",
            f"WARN  {self._tracker.name} {text}. The run's own files are complete.",
        )

    def _say(self, kind: NoteKind, text: str) -> None:
        self._notes.put(Note(kind, text))


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Sequence[Tracker], *, tell: Callable[[NoteKind, str], None]):
        """Open them, each in its thread.

        Args:
            trackers: Whom to tell.
            tell: Takes what they have to say, in the thread that calls the methods here.
        """
        self._threads = [TrackerThread(tracker) for tracker in trackers]
        self._tell = tell

    def record(self, record: Record) -> None:
        """Tell all of them; never waits."""
        for thread in self._threads:
            thread.record(record)
        self._pass_on()

    def close(self, exit_code: int, *, limit_seconds: float) -> None:
        """End all of them, within a time.

        Args:
            exit_code: What the command will end with.
            limit_seconds: For all together; those that need longer end with the process.
        """
        deadline = time.monotonic() + limit_seconds
        for thread in self._threads:
            thread.begin_end(exit_code, deadline_seconds=deadline)
        for thread in self._threads:
            thread.finish_end(deadline_seconds=deadline)
        self._pass_on()

    def _pass_on(self) -> None:
        for thread in self._threads:
            for note in thread.notes():
                self._tell(note.kind, note.text)


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """How the elements of a tensor are distributed.

    Attributes:
        name: `weights/NAME` or `gradients/NAME`.
        edges: Of the bins, one more than these.
        counts: Elements in each bin.
        total: Sum of the elements.
        squares: Sum of their squares.
    """

    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    total: float
    squares: float


def histograms(record: Mapping[str, Any]) -> Iterator[Histogram]:
    """Return what a record of kind `histograms` holds."""
    for group in ("weights", "gradients"):
        for name, one in record[group].items():
            low, counts = one["low"], one["counts"]
            width = (one["high"] - low) / len(counts)
            edges = [low + index * width for index in range(len(counts) + 1)]
            yield Histogram(f"{group}/{name}", edges, counts, one["total"], one["squares"])


def step_of(record: Record) -> int:
    """Return the step that a record belongs to."""
    step = record["step"]
    assert isinstance(step, int)  # the reporter writes it
    return step


def scalars(record: Record) -> dict[str, float]:
    """Return a record's numbers by the names that trackers call them.

    `train/loss` is of a step, `validation/loss` of a validation, `tasks/hellaswag/acc/value` of a
    task, `train/sources/web/tokens` of a source. What is unknown is left out.
    """
    kind = str(record["kind"])
    found = dict(_numbers(record, _GROUPS.get(kind, kind)))
    found.pop(f"{_GROUPS.get(kind, kind)}/step")
    return found


def _numbers(values: Record, group: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        name = name.removeprefix("validation_")
        # A record of tasks holds them under `tasks`, which its kind has said already.
        inner = group if name == group else f"{group}/{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield inner, float(value)


def _reason(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
