"""Read a run's files incrementally, for the screen and for alarms."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from refocused.config.yaml_source import parse_yaml_mapping
from refocused.metrics.history import METRICS_FILE, MetricsTimeline, unix_time
from refocused.metrics.jsonl import JsonLinesTail, Record, ReplacedFile, read_json, read_small, text
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_findings import Findings, view_of
from refocused.monitor.run_status import Alarm, Event, Liveness, RunView
from refocused.monitor.sample_lines import SamplesTail
from refocused.system.strict_json import MalformedError

SAMPLES_BYTES = 1 << 20  # of the end of a file of samples: some minutes of eight GPUs
EVENTS_SHOWN = 50
OLD_SAMPLE_SECONDS = 60.0  # before the newest one: that GPU or machine is of an earlier session

_Sample = TypeVar("_Sample", GpuSample, SystemSample)
_TEXTS = {"host", "uuid", "name", "gpu_note"}
_FLAGS = {"lost", "remap_pending", "remap_failed", "mig"}


class RunFollower:
    """Reads one run again and again."""

    def __init__(
        self,
        folder: Path,
        *,
        liveness: Callable[[Mapping[str, Any]], Liveness | None],
        saved_steps: Callable[[Path], Sequence[int]],
    ) -> None:
        """Read nothing yet.

        Args:
            folder: The run's.
            liveness: Tells of the process that wrote a `state.json`.
            saved_steps: Lists the steps in a folder of step directories.
        """
        self.folder = folder
        self._liveness = liveness
        self._saved_steps = saved_steps
        self._way = MetricsTimeline()
        self._metrics = JsonLinesTail(folder / METRICS_FILE)
        self._event_tails: dict[Path, JsonLinesTail] = {}
        self._sample_tails: dict[Path, SamplesTail] = {}
        self._gpus: dict[tuple[str, int], tuple[float, GpuSample]] = {}
        self._systems: dict[str, tuple[float, SystemSample]] = {}
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._events: collections.deque[Event] = collections.deque(maxlen=EVENTS_SHOWN)
        self._saved_time: float | None = None
        self._settings = ReplacedFile(folder / "run.yaml", read=_read_settings)

    def view(self, *, now: float) -> RunView:
        """Return what there is to see at a time, in Unix seconds."""
        for record in self._metrics.records():
            self._way.add(record)
        # Each machine has files of its own.
        for path in sorted((self.folder / "logs").glob("events*.jsonl")):
            for record in self._event_tails.setdefault(path, JsonLinesTail(path)).records():
                self._take_event(record)
        for path in sorted((self.folder / "logs").glob("gpu_metrics*.jsonl")):
            samples = SamplesTail(path, last_bytes=SAMPLES_BYTES)
            for record in self._sample_tails.setdefault(path, samples).records():
                self._take_sample(record)
        state = read_small(self.folder / "state.json")
        sampled = max(
            (at for at, _ in (*self._gpus.values(), *self._systems.values())), default=None
        )
        oldest = (sampled or 0.0) - OLD_SAMPLE_SECONDS
        return view_of(
            Findings(
                name=self.folder.absolute().name,
                state=state.content,
                state_trouble=state.trouble,
                settings=self._settings.content(),
                mirror=read_json(self.folder / "mirror.json"),
                steps=self._way.steps,
                validations=self._way.validations,
                saved_steps=self._saved_steps(self.folder / "checkpoints"),
                saved_time=self._saved_time,
                gpus=[one for _, (at, one) in sorted(self._gpus.items()) if at >= oldest],
                systems=[one for _, (at, one) in sorted(self._systems.items()) if at >= oldest],
                sampled=sampled,
                alarms=sorted(self._alarms.values(), key=lambda alarm: not alarm.critical),
                events=sorted(self._events, key=lambda event: event.time or 0.0),
                liveness=None if state.content is None else self._liveness(state.content),
            ),
            now=now,
        )

    def _take_event(self, record: Record) -> None:
        event = event_of(record)
        if event is None:
            return
        if event.kind == "alarm":
            self._take_alarm(record, event.time)
        elif event.kind == "save":
            self._saved_time = event.time
        self._events.append(event)

    def _take_alarm(self, record: Record, at: float | None) -> None:
        name, subject = text(record, "alarm") or "?", text(record, "subject") or "?"
        self._alarms.pop((name, subject), None)
        if record.get("raised"):
            critical = text(record, "severity") == "critical"
            words = text(record, "text") or name
            self._alarms[name, subject] = Alarm(name, subject, critical, words, at)

    def _take_sample(self, record: Record) -> None:
        at = unix_time(record.get("time")) or 0.0
        if record.get("kind") == GpuSample.kind:
            gpu = _sample(GpuSample, record)
            if gpu is not None:
                self._gpus[gpu.host, gpu.index] = at, gpu
        elif record.get("kind") == SystemSample.kind:
            system = _sample(SystemSample, record)
            if system is not None:
                self._systems[system.host] = at, system


def event_of(record: Record) -> Event | None:
    """Return a line of `events.jsonl` as the event that it tells of; None: of none."""
    kind = text(record, "kind")
    if kind is None:
        return None
    words = text(record, "text") or text(record, "error") or ""
    return Event(unix_time(record.get("time")), kind, " ".join(words.split()) or kind)


def _read_settings(file: Path) -> Record | None:
    try:
        return parse_yaml_mapping(file.read_bytes())
    except (OSError, MalformedError):
        return None


def _sample(form: type[_Sample], record: Record) -> _Sample | None:
    """Return a record as the sample that it is; None where it does not say of whom."""
    if text(record, "host") is None or (form is GpuSample and "index" not in record):
        return None
    names = {field.name for field in dataclasses.fields(form)}
    fields = {name: value for name, value in record.items() if name in names and _fits(name, value)}
    try:
        return form(**fields)
    except TypeError:  # a field that it cannot be without does not fit
        return None


def _fits(name: str, value: object) -> bool:
    """Whether a value is of its field's kind; a damaged one is unknown."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _FLAGS:
        return isinstance(value, bool)
    if name == "throttle_reasons":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if name == "processes":
        return isinstance(value, dict)
    return isinstance(value, int | float) and not isinstance(value, bool)


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
