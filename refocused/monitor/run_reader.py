"""Read the files of a run, repeatedly: for the screen, the alarms and the summary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.config.yaml_source import parse_yaml_mapping
from refocused.metrics.history import METRICS_FILE, MetricsTimeline, StepPoint, unix_time
from refocused.metrics.jsonl import (
    JsonLinesTail,
    Record,
    number,
    read_json,
    read_small,
    text,
    whole_number,
)
from refocused.metrics.run_time import RunTime, RunTimeReader
from refocused.monitor.readings import AlarmEvent, GpuSample, SystemSample
from refocused.system.processes import Liveness, liveness_of
from refocused.system.strict_json import MalformedError

RECENT_STEPS = 51  # logged steps: the last one, and 50 to compare it with
METRICS_BYTES = 1 << 17  # at the end of the metrics file: more than the recent steps
SAMPLES_BYTES = 1 << 20  # at the end of a file of readings: some minutes of eight GPUs
EVENTS_KEPT, PAST_ALARMS_KEPT = 50, 200
READINGS_KEPT = 4096  # of all GPUs: 17 minutes of eight
OLD_SAMPLE_SECONDS = 60.0  # older than the newest: a GPU or machine of an earlier session

_KINDS = {  # types of the fields of a reading that are not numbers
    **dict.fromkeys(("host", "uuid", "name", "gpu_note"), str),
    **dict.fromkeys(("lost", "remap_pending", "remap_failed", "mig"), bool),
    "throttle_reasons": list,
    "processes": dict,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm, raised at `time` and cleared at `ended` (Unix seconds; None: not yet, unknown)."""

    name: str
    subject: str
    critical: bool
    text: str
    time: float | None
    advice: str = ""
    ended: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A line of `events.jsonl`; `time` is in Unix seconds."""

    time: float | None
    kind: str
    text: str

    @property
    def is_trouble(self) -> bool:
        """Whether it is a warning or a failure."""
        return self.kind.endswith(("failed", "warning")) or self.kind == "alarm"


@dataclasses.dataclass(frozen=True, slots=True)
class Mirror:
    """The copy of the checkpoints elsewhere, from `mirror.json`."""

    bucket: str
    newest_step: int | None  # that is complete there
    waiting: int  # checkpoints not yet there
    uploading_fraction: float | None  # of the checkpoint being copied
    failed: int  # checkpoints that cannot be copied
    last_error: str | None  # of the last attempt
    heartbeat: float | None  # when the mirror wrote this, in Unix seconds
    drained: bool  # it was requested to finish, and did

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Mirror:
        """Read `mirror.json`, whose format `checkpoints.mirror` defines."""
        mirrored, waiting = (
            [one for one in steps if isinstance(one, int)] if isinstance(steps, list) else []
            for steps in (record.get("mirrored"), record.get("waiting"))
        )
        total, failed = number(record, "total_bytes"), record.get("failed")
        return cls(
            bucket=text(record, "bucket") or "?",
            newest_step=max(mirrored, default=None),
            waiting=len(waiting),
            uploading_fraction=(number(record, "done_bytes") or 0.0) / total if total else None,
            failed=len(failed) if isinstance(failed, dict) else 0,
            last_error=text(record, "last_error"),
            heartbeat=number(record, "heartbeat"),
            drained=record.get("drained") is not None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RunFiles:
    """The contents of the files of a run and its machines; times are in Unix seconds."""

    name: str  # of the folder
    state: Mapping[str, Any] | None = None  # the last `state.json` that could be read
    state_trouble: str | None = None  # why the present file cannot be read
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `run.yaml`
    mirror: Mirror | None = None
    steps: Sequence[StepPoint] = ()  # logged on the present branch
    validations: Sequence[StepPoint] = ()
    saved_steps: Sequence[int] = ()  # checkpoints on the disk
    saved_time: float | None = None  # of the newest of them
    gpus: Sequence[GpuSample] = ()  # the newest reading of each, as `systems`
    systems: Sequence[SystemSample] = ()
    sampled: float | None = None  # when the newest reading was taken
    gpu_history: Sequence[GpuSample] = ()  # the last readings of all, the newest last
    alarms: Sequence[Alarm] = ()  # raised now, the critical ones first
    past_alarms: Sequence[Alarm] = ()  # cleared, the newest first
    events: Sequence[Event] = ()  # the last ones
    liveness: Liveness | None = None  # of the training process
    used: RunTime | None = None  # where the time since the first start went

    @property
    def status(self) -> str | None:
        """The status written by the run itself."""
        return text(self.state or {}, "status")

    @property
    def step(self) -> int | None:
        """The last step that was logged."""
        return whole_number(self.state or {}, "step")

    @property
    def has_steps_left(self) -> bool:
        """Whether the last step of the run is not logged yet."""
        return self.step is None or self.step != (self.state or {}).get("total_steps")


class RunReader:
    """Reads one run; a file that cannot be read keeps its last known content."""

    def __init__(
        self,
        folder: Path,
        *,
        saved_steps: Callable[[Path], Sequence[int]] = lambda checkpoints: (),
        recent_only: bool = False,
    ) -> None:
        """Prepare to read; `saved_steps` lists the steps in a folder of checkpoints.

        If `recent_only`, read the state, the mirror, the checkpoints, the last logged steps and
        the readings of other machines than the first.
        """
        self.folder = folder
        self._saved_steps = saved_steps
        self._recent_only = recent_only
        self._state: Record | None = None
        self._mirror: Record | None = None
        self._settings: tuple[int, Record] = 0, {}  # and when it was written
        self._timeline = MetricsTimeline(last=RECENT_STEPS if recent_only else None)
        last_bytes = METRICS_BYTES if recent_only else sys.maxsize
        self._metrics = JsonLinesTail(folder / METRICS_FILE, last_bytes=last_bytes)
        self._tails: dict[Path, JsonLinesTail] = {}
        self._samples: dict[tuple[str, int], tuple[float, GpuSample | SystemSample]] = {}
        self._gpu_history: collections.deque[GpuSample] = collections.deque(maxlen=READINGS_KEPT)
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._past_alarms: collections.deque[Alarm] = collections.deque(maxlen=PAST_ALARMS_KEPT)
        self._events: collections.deque[Event] = collections.deque(maxlen=EVENTS_KEPT)
        self._saved_time: float | None = None
        self._times = RunTimeReader(folder)

    def read(self) -> RunFiles:
        """Return the present contents."""
        for record in self._metrics.records():
            self._timeline.add(record)
        state = read_small(self.folder / "state.json")
        if state.content is not None:
            self._state = state.content
        self._mirror = read_json(self.folder / "mirror.json") or self._mirror
        machines = "-node-*" if self._recent_only else "*"
        for record in self._new_lines(f"gpu_metrics{machines}.jsonl", last=SAMPLES_BYTES):
            sample = _sample(record)
            if sample is not None:
                index = sample.index if isinstance(sample, GpuSample) else -1
                if isinstance(sample, GpuSample):
                    self._gpu_history.append(sample)
                self._samples[sample.host, index] = unix_time(record.get("time")) or 0.0, sample
        sampled = max((at for at, _ in self._samples.values()), default=None)
        oldest = (sampled or 0.0) - OLD_SAMPLE_SECONDS
        samples = [one for _, (at, one) in sorted(self._samples.items()) if at >= oldest]
        if not self._recent_only:
            self._read_events()
            file = self.folder / "run.yaml"
            with contextlib.suppress(OSError, MalformedError):
                if (written := file.stat().st_mtime_ns) != self._settings[0]:
                    self._settings = written, parse_yaml_mapping(file.read_bytes())
        return RunFiles(
            name=self.folder.absolute().name,
            state=self._state,
            state_trouble=state.trouble,
            settings=self._settings[1],
            mirror=None if self._mirror is None else Mirror.from_record(self._mirror),
            steps=self._timeline.steps,
            validations=self._timeline.validations,
            saved_steps=self._saved_steps(self.folder / "checkpoints"),
            saved_time=self._saved_time,
            gpus=[one for one in samples if isinstance(one, GpuSample)],
            systems=[one for one in samples if isinstance(one, SystemSample)],
            sampled=sampled,
            gpu_history=self._gpu_history,
            alarms=sorted(self._alarms.values(), key=lambda alarm: not alarm.critical),
            past_alarms=list(self._past_alarms),
            events=sorted(self._events, key=lambda event: event.time or 0.0),
            liveness=None if self._state is None else liveness_of(self._state),
            used=None if self._recent_only else self._times.read(),
        )

    def _new_lines(self, pattern: str, *, last: int = sys.maxsize) -> Iterator[Record]:
        """Yield the new lines of all machines, each of which has its own files."""
        for path in sorted((self.folder / "logs").glob(pattern)):
            tail = self._tails.setdefault(path, JsonLinesTail(path, last_bytes=last))
            yield from tail.records()

    def _read_events(self) -> None:
        for record in self._new_lines("events*.jsonl"):
            if (event := event_of(record)) is None:
                continue
            self._events.append(event)
            if event.kind == "save":
                self._saved_time = event.time
            elif event.kind == AlarmEvent.kind:
                key = text(record, "alarm") or "?", text(record, "subject") or "?"
                before = self._alarms.pop(key, None)
                if record.get("raised"):
                    critical = text(record, "severity") == "critical"
                    words, advice = text(record, "text") or key[0], text(record, "advice") or ""
                    self._alarms[key] = Alarm(*key, critical, words, event.time, advice)
                elif before is not None:
                    self._past_alarms.appendleft(dataclasses.replace(before, ended=event.time))


def event_of(record: Record) -> Event | None:
    """Return a line of `events.jsonl` as an event, or None if it is not one."""
    kind = text(record, "kind")
    if kind is None:
        return None
    sample = f"sample: {text(record, 'sample')}" if kind == "sample" else ""
    words = text(record, "text") or text(record, "error") or sample
    return Event(unix_time(record.get("time")), kind, " ".join(words.split()) or kind)


def _sample(record: Record) -> GpuSample | SystemSample | None:
    """Return a record as a reading, with damaged fields unknown; None: it cannot be identified."""
    for form in (GpuSample, SystemSample):
        if record.get("kind") == form.kind:
            names = form.__slots__
            known: dict[str, Any] = {
                name: value
                for name, value in record.items()
                if name in names and isinstance(value, _KINDS.get(name, (int, float)))
                if isinstance(value, bool) == (_KINDS.get(name) is bool)
            }
            with contextlib.suppress(TypeError):  # a required field is missing
                return form(**known)
    return None
