"""What a rank does at this moment, in memory that its machine's watchdog reads, and its orders.

A rank writes plain memory: no write waits for a disk, a lock or another process. The memory is a
file without a name, so that nothing is left of a killed run.
"""

from __future__ import annotations

import contextlib
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
_BYTES, _REPORT, _ORDER = 16384, 1024, 8192  # the size, and where the two texts begin
# Whole numbers of 8 bytes. CHANGES grows with all that begins or ends; TAKEN counts the steps begun
# in this session, CALLS those of the control plane. BEAT is when the thread BEATER last had the
# interpreter, in monotonic ns. The watchdog writes ASKED (for collectives) and EXIT (a code).
CHANGES, STEP, TAKEN, ACTIVITY, CALLED, CALL, BEAT, BEATER, MAIN, ASKED, EXIT = range(11)


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


class Place(pydantic.BaseModel):
    """Where a rank runs, and where its memory and its stacks are found."""

    model_config = pydantic.ConfigDict(frozen=True)

    rank: int
    node: int
    host: str
    process: ProcessIdentity
    files: tuple[int, int]  # its descriptors of both


class Progress:
    """One rank's memory; only that of a rank that trains is shared."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._bytes = memoryview(bytearray(_BYTES) if memory is None else memory)
        self.fields = self._bytes.cast("q")
        self.files: tuple[int, int] | None = None  # as in a Place; None: not shared

    @classmethod
    def shared(cls) -> Progress:
        """Make the memory of this process, and register the signal that writes its stacks."""
        files = os.memfd_create("refocused-progress"), os.memfd_create("refocused-stacks")
        os.truncate(files[0], _BYTES)
        progress = cls(mmap.mmap(files[0], _BYTES))
        progress.files = files
        faulthandler.register(STACKS_SIGNAL, file=files[1], all_threads=True)
        progress.fields[MAIN] = threading.main_thread().ident or 0
        return progress

    @classmethod
    def of(cls, place: Place) -> Progress:
        """Open another process's memory; raise OSError if it has ended."""
        with Path(f"/proc/{place.process.pid}/fd/{place.files[0]}").open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _BYTES))

    def step(self, number: int) -> None:
        """Note that a step begins."""
        self.fields[STEP] = number
        self.fields[TAKEN] += 1
        self.begin("step")

    def begin(self, activity: Activity) -> None:
        """Note what begins."""
        self.fields[ACTIVITY] = ACTIVITIES.index(activity)
        self.fields[CHANGES] += 1

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Note an activity, and afterwards the one before."""
        before = ACTIVITIES[self.fields[ACTIVITY]]
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    @contextlib.contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Note that the rank waits in a call of the control plane."""
        self.fields[CALLED] += 1
        self.fields[CALL] = CALLS.index(call)
        try:
            yield
        finally:
            self.fields[CALL] = 0
            self.fields[CHANGES] += 1

    def beat(self, flight_record: Callable[[], bytes]) -> tuple[int, str] | None:
        """Note that this thread has the interpreter; return the order to exit, if there is one.

        `flight_record` returns torch's record of collectives, once the watchdog asks for it.
        """
        self.fields[BEATER], self.fields[BEAT] = threading.get_native_id(), time.monotonic_ns()
        if self.fields[ASKED] == 1:
            self._write(_REPORT, json.dumps(open_collectives(flight_record())))
            self.fields[ASKED] = 2
        return self.ordered()

    def ordered(self, *, wait_seconds: float = 0.0) -> tuple[int, str] | None:
        """Return the exit code that the watchdog orders, and a text to print, which may be empty.

        Wait for it if the watchdog is looking at this rank.
        """
        fields, deadline = self.fields, time.monotonic() + wait_seconds
        while fields[ASKED] and not fields[EXIT] and time.monotonic() < deadline:
            time.sleep(0.1)
        return (fields[EXIT], self._read(_ORDER)) if fields[EXIT] else None

    def moment(self) -> Moment:
        """Return what the rank does now."""
        changes, step, taken, activity, calls, call, beat = self.fields[: BEAT + 1]
        beat_seconds = (time.monotonic_ns() - beat) / 1e9
        return Moment(changes, step, taken, ACTIVITIES[activity], calls, CALLS[call], beat_seconds)

    def collectives(self) -> list[str] | None:
        """Return the collectives that it waits for, oldest first; None: it did not answer."""
        return list(json.loads(self._read(_REPORT))) if self.fields[ASKED] == 2 else None

    def order(self, code: int, text: str) -> None:
        """Make the rank print a text, if there is one, and exit; once it has the interpreter."""
        self._write(_ORDER, text)
        self.fields[EXIT] = code

    def _write(self, offset: int, text: str) -> None:
        content = text.encode(errors="replace")[: _ORDER - _REPORT - 1]
        self._bytes[offset : offset + len(content) + 1] = content + b"\0"

    def _read(self, offset: int) -> str:
        content = bytes(self._bytes[offset : offset + _ORDER - _REPORT])
        return content.partition(b"\0")[0].decode(errors="replace")


def open_collectives(record: bytes, *, most: int = 8) -> list[str]:
    """Name the collectives of torch's flight record that are not complete, oldest first."""
    return [
        f"{one['profiling_name']} number {one['collective_seq_id']} of group "
        f"{one['process_group'][0]}, sizes {one['input_sizes']!s:.60}"
        for one in json.loads(record).get("entries", [])
        if not one["retired"] and one["state"] != "completed"
    ][:most]
