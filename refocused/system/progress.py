"""What a rank does at this moment, in memory that its machine's watchdog reads, and its orders.

A rank writes plain memory: no write waits for a disk, a lock or another process. The memory is a
file without a name, so that nothing is left of a killed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import pydantic

from refocused.system.processes import ProcessIdentity

Activity = Literal["start-up", "step", "data", "validation", "save", "ending"]
Call = Literal["", "gather", "broadcast", "largest"]
ACTIVITIES, CALLS = get_args(Activity), get_args(Call)
STACKS_SIGNAL = signal.SIGUSR2  # to the thread that beats: all stacks are written, from C
# How long a rank may make no progress, beside the time that is set for a step.
LEAST_SECONDS = 300.0  # where that is derived from the measured time of steps
EVALUATION_FACTOR = 3  # of a step's time; a validation's first batch may compile
OTHER_SECONDS = 3600.0  # for start-up, the first steps (they compile), late batches, saves, the end
UNLIMITED_SECONDS = 24 * 3600.0  # longer than a rank waits for another that works
ORDER_SECONDS = 25.0  # for a watchdog that looks at this rank to order its exit
_TEXT = 8192  # bytes of a text


def longest_wait(hang_minutes: float | None) -> float:
    """Return for how many seconds a rank's collective has to wait before it may fail by itself.

    The watchdog, which knows what the ranks do and explains a hang, has ended the run before, or
    is not to end it. The limit that it derives from steps is not known when groups are made.
    """
    if not hang_minutes:
        return UNLIMITED_SECONDS
    return max(OTHER_SECONDS, EVALUATION_FACTOR * hang_minutes * 60) + LEAST_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What a rank does at one moment."""

    changes: int
    step: int
    taken: int
    activity: Activity
    calls: int
    call: Call  # the one of the control plane that it waits in; empty: none
    beat_seconds: float  # since another thread last had the interpreter


class Place(pydantic.BaseModel, frozen=True):
    """Where a rank runs, and where its memory and its stacks are found."""

    rank: int
    node: int
    host: str
    process: ProcessIdentity
    files: tuple[int, int]  # its descriptors of both


class Progress(ctypes.Structure):
    """One rank's memory; only that of a rank that trains is shared.

    `changes` grows with all that begins or ends; `taken` counts the steps begun in this session,
    `calls` those of the control plane. `beaten` is when the thread `beater` last had the
    interpreter, in monotonic ns. The watchdog writes `asked` (for collectives), and as an order
    `text` and `code`, to exit with.
    """

    _NUMBERS = "changes number taken activity calls call beaten beater main asked code"
    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        ("open_collectives", ctypes.c_char * _TEXT),
        ("text", ctypes.c_char * _TEXT),
    )
    asked: int
    files: tuple[int, int] | None = None  # as in a Place; None: not shared

    @classmethod
    def shared(cls) -> Progress:
        """Make the memory of this process, and register the signal that writes its stacks."""
        files = os.memfd_create("refocused-progress"), os.memfd_create("refocused-stacks")
        os.truncate(files[0], ctypes.sizeof(cls))
        progress = cls.from_buffer(mmap.mmap(files[0], 0))
        progress.files = files
        faulthandler.register(STACKS_SIGNAL, file=files[1], all_threads=True)
        progress.main = threading.main_thread().ident or 0
        return progress

    @classmethod
    def of(cls, place: Place) -> Progress:
        """Open another process's memory; raise OSError if it has ended."""
        with Path(f"/proc/{place.process.pid}/fd/{place.files[0]}").open("r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), 0))

    def step(self, number: int) -> None:
        """Note that a step begins."""
        self.number = number
        self.taken += 1
        self.begin("step")

    def begin(self, activity: Activity) -> None:
        """Note what begins, unless the watchdog looks at this rank."""
        self._halt()
        self.activity = ACTIVITIES.index(activity)
        self.changes += 1

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Note an activity, and afterwards the one before."""
        before = ACTIVITIES[self.activity]
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    @contextlib.contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Note that the rank waits in a call of the control plane, unless as above."""
        self._halt()
        self.calls += 1
        self.call = CALLS.index(call)
        try:
            yield
        finally:
            self.call = 0
            self.changes += 1

    def beat(self, flight_record: Callable[[], bytes]) -> tuple[int, str] | None:
        """Note that this thread has the interpreter; return the order to exit, if there is one.

        `flight_record` returns torch's record of collectives, once the watchdog asks for it.
        """
        self.beater, self.beaten = threading.get_native_id(), time.monotonic_ns()
        if self.asked == 1:
            self.open_collectives = "\n".join(open_collectives(flight_record())).encode()[:_TEXT]
            self.asked = 2
        return self.ordered(wait_seconds=0.0)

    def ordered(self, *, wait_seconds: float = ORDER_SECONDS) -> tuple[int, str] | None:
        """Return the exit code that the watchdog orders, and a text to print, which may be empty.

        Wait for it if the watchdog is looking at this rank.
        """
        deadline = time.monotonic() + wait_seconds
        while self.asked and not self.code and time.monotonic() < deadline:
            time.sleep(0.1)
        if wait_seconds and not self.code:
            self.asked = 0  # the watchdog failed
        return (self.code, self.text.decode(errors="replace")) if self.code else None

    def _halt(self) -> None:
        """Wait for the exit that is ordered: a rank that is continued would take steps until then.

        So would those that waited for it.
        """
        if self.asked and self.ordered():
            time.sleep(ORDER_SECONDS)  # another thread exits

    def moment(self) -> Moment:
        """Return what the rank does now."""
        activity, call = ACTIVITIES[self.activity], CALLS[self.call]
        beat_seconds = (time.monotonic_ns() - self.beaten) / 1e9
        counts = self.changes, self.number, self.taken
        return Moment(*counts, activity, self.calls, call, beat_seconds)

    def collectives(self) -> list[str] | None:
        """Return the collectives that it waits for, oldest first; None: it did not answer."""
        return self.open_collectives.decode().splitlines() if self.asked == 2 else None

    def order(self, code: int, text: str) -> None:
        """Make the rank print a text, if there is one, and exit; once it has the interpreter."""
        self.text = text.encode(errors="replace")[:_TEXT]
        self.code = code


def open_collectives(record: bytes, *, most: int = 8) -> list[str]:
    """Name the collectives of torch's flight record that are not complete, oldest first."""
    return [
        f"{entry['profiling_name']} number {entry['collective_seq_id']} of group "
        f"{entry['process_group'][0]}, sizes {entry['input_sizes']!s:.60}"
        for entry in json.loads(record).get("entries", [])
        if not entry["retired"] and entry["state"] != "completed"
    ][:most]
