"""Read the files of a run, repeatedly, into one view: for the screen, the alarms, the summary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic_core import to_jsonable_python

from refocused.config.prices import cost_usd
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.metrics.expected_loss import EXPECTED_LOSS_FILE
from refocused.metrics.history import (
    METRICS_FILE,
    MetricsTimeline,
    StepMetrics,
    Validation,
    lowest,
    unix_time,
)
from refocused.metrics.jsonl import (
    JsonLinesTail,
    Record,
    dotted,
    number,
    read_json,
    read_small,
    text,
    whole_number,
)
from refocused.metrics.run_time import RunTime, RunTimeReader
from refocused.monitor.readings import AlarmEvent, GpuSample, SystemSample, sample_of
from refocused.system.processes import Liveness, liveness_of
from refocused.system.strict_json import MalformedError

RECENT_STEPS = 51  # logged steps: the last one, and 50 to compare it with
METRICS_BYTES = 1 << 17  # at the end of the metrics file: more than the recent steps
SAMPLES_BYTES = 1 << 20  # at the end of a file of readings: some minutes of eight GPUs
EVENTS_KEPT, PAST_ALARMS_KEPT = 50, 200
READINGS_KEPT = 4096  # of all GPUs: 17 minutes of eight
OLD_SAMPLE_SECONDS = 60.0  # older than the newest: a GPU or machine of an earlier session
# Without a log line or a reading for so long a run is silent: its machine may be lost. Whether its
# ranks hang is known to the watchdog alone, which sees what they do.
SILENT_SECONDS = 1800.0

T = TypeVar("T")
Field = Callable[[Record, str], T | None]  # `number`, `text`: a field of a record
Status = Literal[
    "starting", "training", "silent", "finished", "stopped", "failed", "crashed", "unknown"
]
LIVE: tuple[Status, ...] = ("starting", "training", "silent")
ENDED_EARLY: tuple[Status, ...] = ("stopped", "failed", "crashed")
_ENDED: dict[str | None, Status] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
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
        return self.kind.endswith(("failed", "warning")) or self.kind == AlarmEvent.kind


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
            [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []
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
class Saves:
    """The checkpoints that would be left if the machine was lost now."""

    newest_step: int | None  # of the last checkpoint on the disk; without one, in the mirror
    seconds_ago: float | None  # since it was saved
    steps_at_risk: int  # taken since
    seconds_at_risk: float | None  # of training that would be lost
    local: int  # checkpoints on the disk


class Reported(Generic[T]):
    """A figure that the run reports in `state.json`, or a setting; None: unknown."""

    def __init__(self, read: Field[T], name: str = "", *, source: str = "state") -> None:
        self._read, self._name, self._source = read, name, source

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, view: RunView, owner: type) -> T | None:
        return self._read(getattr(view, self._source) or {}, self._name)


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment, as its files and those of its machines show it.

    The fields are what the files hold, the rest follows from them. Time and cost of a live run
    include the time since its last line.
    """

    folder_name: str
    now: float = 0.0  # Unix seconds, as all times
    # The last `state.json` that could be read; where the present one cannot, what other files show.
    state: Record | None = None
    state_trouble: str | None = None  # why the present one cannot be read
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by dotted name
    mirror: Mirror | None = None
    steps: Sequence[StepMetrics] = ()  # logged on the present branch
    validations: Sequence[Validation] = ()
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
    expected_loss: Record | None = None  # the curve of the run, or the `reason` why it has none

    reported_status = Reported(text, "status")
    host = Reported(text)
    exit_code = Reported(whole_number)
    total_steps = Reported(whole_number)
    tokens = Reported(whole_number)
    loss = Reported(number)
    validation_loss = Reported(number)
    bits_per_byte = Reported(number)
    best_loss = Reported(number)
    best_bits_per_byte = Reported(number)
    best_step = Reported(whole_number)
    per_hour_usd = Reported(number, "cost.per_hour_usd", source="settings")  # of the machines
    budget_usd = Reported(number, "cost.budget_usd", source="settings")

    @property
    def name(self) -> str:
        """The run's own name, or that of its folder."""
        return text(self.state or {}, "run") or self.folder_name

    @property
    def status(self) -> Status:
        """`silent`: the ranks hang or write nothing; `crashed`: it says `training`, but is gone."""
        reported = self.reported_status
        if self.state_trouble is not None:
            return "unknown"
        if self.state is None or (reported == "starting" and self.liveness != "gone"):
            return "starting"
        if reported not in ("starting", "training"):
            return _ENDED.get(reported, "unknown")
        if self.liveness == "gone":
            return "crashed"
        if any(alarm.name == "no_step" for alarm in self.alarms):
            return "silent"
        updated = self.updated
        if updated is None or not self.has_steps_left:
            return "training"  # after the last step the model is exported, without log lines
        is_silent = self.now - max(updated, self.sampled or 0.0) > SILENT_SECONDS
        return "silent" if is_silent else "training"

    @property
    def is_live(self) -> bool:
        """Whether it trains, as far as its files show."""
        return self.status in LIVE

    @property
    def has_ended(self) -> bool:
        """Whether it certainly no longer trains."""
        return self.status == "finished" or self.status in ENDED_EARLY

    @property
    def note(self) -> str:
        """More about the status: why it failed, what cannot be read."""
        state, status = self.state or {}, self.status
        if self.state_trouble is not None:
            return f"state.json cannot be read: {self.state_trouble}"
        if status == "unknown":
            return f"state.json has an unknown status: {state.get('status')!r}"
        if status == "starting":
            return text(state, "phase") or "no step yet"
        if status == "crashed":
            return "the process ended without reporting why"
        if status == "failed":
            errors = [event.text for event in self.events if event.kind == "failed"]
            return errors[-1].partition("\n")[0] if errors else ""
        if status == "stopped":
            return f"by {str(state.get('stopped_by') or 'a request').lower().replace('_', ' ')}"
        return f"on {self.host}" if self.liveness == "elsewhere" else ""

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return whole_number(self.state or {}, "step") or 0

    @property
    def has_steps_left(self) -> bool:
        """Whether the last step of the run is not logged yet."""
        return self.step != self.total_steps

    @property
    def progress_fraction(self) -> float | None:
        """Share of the run's steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    @property
    def last_step(self) -> StepMetrics | None:
        """The last logged step; None before this session's first one."""
        last = self.steps[-1] if self.steps else None
        began = unix_time((self.state or {}).get("session_began"))
        if last is None or self.reported_status != "training" or began is None:
            return last
        return last if last.time is not None and last.time >= began else None

    @property
    def updated(self) -> float | None:
        """When the run last wrote its state."""
        return unix_time((self.state or {}).get("updated"))

    @property
    def silent_seconds(self) -> float | None:
        """Since its last line."""
        return None if self.updated is None else max(0.0, self.now - self.updated)

    @property
    def unreported_seconds(self) -> float:
        """Of a live run since its last line; while it starts its figures are of another session."""
        is_counted = self.is_live and "phase" not in (self.state or {})
        return (self.silent_seconds or 0.0) if is_counted else 0.0

    @property
    def seconds_trained(self) -> float | None:
        """Of all sessions."""
        trained = number(self.state or {}, "seconds")
        return None if trained is None else trained + self.unreported_seconds

    @property
    def cost_usd(self) -> float | None:
        """Of that time."""
        spent = number(self.state or {}, "cost_usd")
        more = cost_usd(self.unreported_seconds, self.per_hour_usd)
        return None if spent is None else spent + (more or 0.0)

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step over the last lines."""
        seconds = [step.step_seconds for step in self.steps[-RECENT_STEPS:]]
        measured = [each for each in seconds if each is not None]
        return statistics.fmean(measured) if measured else None

    @property
    def tokens_per_second(self) -> float | None:
        """The mean speed over the last lines, weighted by time."""
        speeds = [step.tokens_per_second or 0.0 for step in self.steps[-RECENT_STEPS:]]
        measured = [speed for speed in speeds if speed > 0]
        return statistics.harmonic_mean(measured) if measured else None

    @property
    def resumes_from(self) -> int | None:
        """The step from which a run that ended early would resume; 0: from none."""
        mirrored = self.mirror.newest_step if self.mirror is not None else None
        is_early = self.status in ENDED_EARLY
        return max([*self.saved_steps, mirrored or 0]) if is_early else None

    @property
    def seconds_left(self) -> float | None:
        """The time left as training estimated it in its last line; None: unknown, or over.

        A run that ended early repeats the steps after `resumes_from` at its mean pace.
        """
        resumed = self.resumes_from
        last = self.last_step if resumed is None else next(iter(self.steps[-1:]), None)
        if last is None or last.seconds_left is None or not (self.is_live or resumed is not None):
            return None
        left = last.seconds_left - self.unreported_seconds
        if resumed is not None:
            left += (last.step - resumed) * (self.step_seconds or 0.0)
        return left if left >= 0 else None

    @property
    def cost_left_usd(self) -> float | None:
        """Of the time left."""
        return cost_usd(self.seconds_left, self.per_hour_usd)

    @property
    def ends(self) -> float | None:
        """When a live run will end."""
        left = self.seconds_left
        return self.now + left if left is not None and self.is_live else None

    @property
    def saves(self) -> Saves:
        """What a crash would leave, and what it would lose."""
        mirrored = self.mirror.newest_step if self.mirror is not None else None
        newest, last = max(self.saved_steps, default=mirrored), self.last_step
        steps = max(0, self.step - (newest or 0))
        pace = last.step_seconds if last is not None else None
        return Saves(
            newest_step=newest,
            seconds_ago=None if self.saved_time is None else max(0.0, self.now - self.saved_time),
            steps_at_risk=steps,
            seconds_at_risk=None if pace is None else steps * pace,
            local=len(self.saved_steps),
        )

    @property
    def shards(self) -> Mapping[str, Any] | None:
        """Of the first machine: `local` ones, `total` of the data, the next ones that are `ready`.

        The ready ones end before the first that is not local.
        """
        names = ("local", "total", "ready")
        counts = {name: whole_number(self.state or {}, f"shards_{name}") for name in names}
        return None if None in counts.values() else counts

    @property
    def samples_age_seconds(self) -> float | None:
        """Since the newest reading of GPUs and machines."""
        return None if self.sampled is None else max(0.0, self.now - self.sampled)

    def as_record(self) -> dict[str, Any]:
        """Return the view for JSON, without the curves, the history and the past alarms."""
        values = {name: getattr(self, name) for name in _SHOWN}
        record: dict[str, Any] = to_jsonable_python(values)
        return record


_SHOWN = (
    *("name", "status", "host", "exit_code", "note", "step", "total_steps", "tokens", "loss"),
    *("validation_loss", "bits_per_byte", "best_loss", "best_bits_per_byte", "best_step"),
    *("last_step", "silent_seconds"),
    *("seconds_trained", "cost_usd", "seconds_left", "cost_left_usd", "resumes_from"),
    *("budget_usd", "ends", "saves", "mirror", "shards", "gpus", "systems"),
    *("samples_age_seconds", "alarms", "events", "used"),
)


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
        self._sampled: float | None = None
        self._gpu_history: collections.deque[GpuSample] = collections.deque(maxlen=READINGS_KEPT)
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._past_alarms: collections.deque[Alarm] = collections.deque(maxlen=PAST_ALARMS_KEPT)
        self._events: collections.deque[Event] = collections.deque(maxlen=EVENTS_KEPT)
        self._saved_time: float | None = None
        self._times = RunTimeReader(folder)

    def read(self, now: float) -> RunView:
        """Return the run as its files show it at a Unix time."""
        for record in self._metrics.records():
            self._timeline.add(record)
        state = read_small(self.folder / "state.json")
        self._state = self._state if state.content is None else state.content
        self._mirror = read_json(self.folder / "mirror.json") or self._mirror
        machines = "-node-*" if self._recent_only else "*"
        for record in self._new_lines(f"gpu_metrics{machines}.jsonl", last=SAMPLES_BYTES):
            if (reading := sample_of(record)) is not None:
                index = -1
                if isinstance(reading, GpuSample):
                    index = reading.index
                    self._gpu_history.append(reading)
                at = unix_time(record.get("time")) or self._sampled  # the file is in order of time
                self._samples[reading.host, index] = at or 0.0, reading
                self._sampled = max(at or 0.0, self._sampled or 0.0)
        oldest = (self._sampled or 0.0) - OLD_SAMPLE_SECONDS
        samples = [reading for _, (at, reading) in sorted(self._samples.items()) if at >= oldest]
        if not self._recent_only:
            for record in self._new_lines("events*.jsonl"):
                self._add_event(record)
            file = self.folder / "run.yaml"
            with contextlib.suppress(OSError, MalformedError):
                if (written := file.stat().st_mtime_ns) != self._settings[0]:
                    self._settings = written, dotted(parse_yaml_mapping(file.read_bytes()))
        expected_file = self.folder / EXPECTED_LOSS_FILE
        view = RunView(
            self.folder.absolute().name,
            now=now,
            state=self._state,
            state_trouble=state.trouble,
            settings=self._settings[1],
            mirror=None if self._mirror is None else Mirror.from_record(self._mirror),
            steps=list(self._timeline.steps),
            validations=list(self._timeline.validations),
            saved_steps=self._saved_steps(self.folder / "checkpoints"),
            saved_time=self._saved_time,
            gpus=[reading for reading in samples if isinstance(reading, GpuSample)],
            systems=[reading for reading in samples if isinstance(reading, SystemSample)],
            sampled=self._sampled,
            gpu_history=self._gpu_history,
            alarms=sorted(self._alarms.values(), key=lambda alarm: not alarm.critical),
            past_alarms=list(self._past_alarms),
            events=sorted(self._events, key=lambda event: event.time or 0.0),
            liveness=None if self._state is None else liveness_of(self._state),
            used=None if self._recent_only else self._times.read(),
            expected_loss=None if self._recent_only else read_json(expected_file),
        )
        return view if state.trouble is None else dataclasses.replace(view, state=_restored(view))

    def _new_lines(self, pattern: str, *, last: int = sys.maxsize) -> Iterator[Record]:
        """Yield the new lines of all machines, each of which has its own files."""
        for path in sorted((self.folder / "logs").glob(pattern)):
            tail = self._tails.setdefault(path, JsonLinesTail(path, last_bytes=last))
            yield from tail.records()

    def _add_event(self, record: Record) -> None:
        if (event := event_of(record)) is None:
            return
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


def _restored(view: RunView) -> Record:
    """Return what the other files show of `state.json` while it cannot be read."""
    best = lowest(view.validations)
    last = view.steps[-1] if view.steps else StepMetrics(0)
    validation = view.validations[-1] if view.validations else Validation(0, None)
    return {
        "step": last.step,
        "total_steps": whole_number(view.settings, "run.steps") or last.total_steps,
        "tokens": last.tokens,
        "loss": last.loss,
        "validation_loss": validation.loss,
        "bits_per_byte": validation.bits_per_byte,
        "best_loss": None if best is None else best.loss,
        "best_bits_per_byte": None if best is None else best.bits_per_byte,
        "best_step": None if best is None else best.step,
        "seconds": last.seconds_trained,
        "cost_usd": last.cost_usd,
    }
