"""The alarms: what they watch, when they are raised and cleared, and who is notified.

Between its two limits an alarm keeps its state, so that a value near one of them does not raise and
clear it repeatedly.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pydantic

from refocused.config import shipped_files
from refocused.config.outputs import CostConfig
from refocused.config.yaml_source import parse_yaml
from refocused.metrics.history import StepMetrics
from refocused.metrics.jsonl import number
from refocused.metrics.rank_times import DEVIATION, SlowestRank
from refocused.monitor.readings import AlarmEvent, GpuSample, Severity, SystemSample, as_record
from refocused.monitor.run_reader import RunView
from refocused.system.errors import counted
from refocused.system.number_text import duration, known, value
from refocused.system.processes import run_shell

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 10.0  # of one attempt to send a message
PAUSES_SECONDS = (2.0, 10.0)  # before the second and the third attempt
REPEAT_SECONDS = 600.0  # between two messages that the same alarm is raised
END_SECONDS = 20.0  # within which the last attempts must begin when the sampler ends

SLOWDOWN_CELSIUS = 87  # of a GPU that does not report it; that of the H100 and similar ones
LEAST_DISK_FRACTION, LEAST_DISK_GB = 0.02, 5.0
# A shorter trend would be that of a single save; retention takes back what a longer one has.
SHORTEST_TREND_SECONDS, LONGEST_TREND_SECONDS = 1200.0, 3600.0
FEWEST_LOSSES = 20
SPIKE_NATS, SPIKE_DEVIATIONS = 0.5, 6.0
LOW_CLOCK = 0.95  # share of the clock of other GPUs; healthy ones differ by 1 or 2 %
BUSY_CPU = 0.9  # share of all cores' time
# Alarm, field and text of what a GPU should have as much of as others of its kind.
_AS_OTHERS = (
    ("gpu_nvlink", "nvlinks_active", "has {} active NVLinks; others of its kind have {}."),
    ("gpu_pcie", "pcie_width", "has {} PCIe lanes; others of its kind have {}."),
    ("gpu_power_limit", "power_limit_watts", "may draw {:.0f} W; others of its kind {:.0f} W."),
)


DiskPoint = tuple[float, float]  # seconds, and GB that were free then
Level = Literal["bad", "between", "good"]
Key = tuple[str, str]  # the alarm and its subject
# Whether an alarm is raised, and since when (in seconds) its readings contradict that.
Standing = tuple[bool, float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One alarm of `config/alarms.yaml`: a value at `bad` raises it, one at `good` clears it."""

    bad: float = 1
    good: float = 0
    severity: Severity = "warning"
    begins_after: float = 0.0  # seconds that the value must be bad before
    ends_after: float = 0.0  # seconds that it must be good before
    when: str = ""  # the condition in words
    advice: str = ""  # what to do


@functools.cache
def alarm_rules() -> dict[str, Rule]:
    """Return the rule of each alarm by its name."""
    file = shipped_files() / "alarms.yaml"
    return pydantic.TypeAdapter(dict[str, Rule]).validate_python(parse_yaml(file.read_bytes()))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The value of one subject (`node1 GPU 5`, `run`), and a sentence that states it."""

    alarm: str
    subject: str
    value: float | None  # True is bad and False is good; None: unknown
    text: str

    @property
    def level(self) -> Level | None:
        """Where the value lies between the limits of its rule."""
        if self.value is None:
            return None
        rule = alarm_rules()[self.alarm]
        sign = 1 if rule.bad >= rule.good else -1
        if sign * self.value >= sign * rule.bad:
            return "bad"
        return "good" if sign * self.value <= sign * rule.good else "between"


def judge(
    standings: Mapping[Key, Standing], readings: Iterable[Reading], *, now: float, host: str
) -> tuple[dict[Key, Standing], list[AlarmEvent]]:
    """Return the state of every alarm after these readings, and those raised or cleared.

    An alarm without a reading keeps its state: a lost GPU reports no temperature. `standings` is
    what the last call returned, `now` is in monotonic seconds.
    """
    after, events = dict(standings), []
    for reading in readings:
        if reading.level is None:
            continue
        key, rule = (reading.alarm, reading.subject), alarm_rules()[reading.alarm]
        raised, turned = after.get(key, (False, None))
        contrary, delay = ("good", rule.ends_after) if raised else ("bad", rule.begins_after)
        turned = (now if turned is None else turned) if reading.level == contrary else None
        has_turned = turned is not None and now - turned >= delay
        after[key] = (not raised, None) if has_turned else (raised, turned)
        if has_turned:
            text = f"over: {reading.text}" if raised else reading.text
            events.append(AlarmEvent(*key, not raised, rule.severity, text, host, rule.advice))
    return after, events


def still_raised(records: Iterable[Mapping[str, object]], *, host: str) -> list[AlarmEvent]:
    """Clear all alarms that lines of `events.jsonl` have raised and not cleared.

    A new sampler, maybe on another machine (`host`), does this before its first reading: an alarm
    about something that is no longer read would never be cleared.
    """
    raised: dict[Key, Severity] = {}
    for record in records:
        if record.get("kind") == AlarmEvent.kind:
            key = (str(record.get("alarm")), str(record.get("subject")))
            raised.pop(key, None)
            if record.get("raised"):
                raised[key] = "critical" if record.get("severity") == "critical" else "warning"
    text = "over: cleared at the restart of training; the readings begin again"
    return [AlarmEvent(*key, False, severity, text, host) for key, severity in raised.items()]


def gpu_readings(samples: Sequence[GpuSample], *, is_training: bool) -> Iterator[Reading]:
    """Yield the readings of a machine's GPUs, which should be busy if the run trains."""
    for gpu in samples:
        name = f"{gpu.host} GPU {gpu.index}"
        lost = f"({gpu.uuid or 'unknown UUID'}) has fallen off the bus: the driver cannot reach it."
        yield Reading("gpu_lost", name, gpu.lost, f"{name} {lost if gpu.lost else 'responds.'}")
        if gpu.lost:
            continue
        celsius, slowdown = gpu.temperature_celsius, gpu.slowdown_celsius or SLOWDOWN_CELSIUS
        excess = None if celsius is None else celsius - slowdown
        memory, errors = gpu.memory_temperature_celsius, gpu.ecc_uncorrected
        throttled = None if gpu.throttle_reasons is None else bool(gpu.throttle_reasons)
        watts, limit = value(gpu.power_watts, ".0f"), value(gpu.power_limit_watts, ".0f")
        drawn = None
        if gpu.power_watts is not None and gpu.power_limit_watts:
            drawn = gpu.power_watts / gpu.power_limit_watts
        of_driver = "uncorrected memory errors since the driver was loaded."
        spare = "no" if gpu.remap_failed else "enough"
        row = "a broken memory row, which" if gpu.remap_pending else "no memory row that"
        values: list[tuple[str, float | None, str]] = [
            ("gpu_temperature", excess, f"is at {celsius} C; it slows down at {slowdown} C."),
            ("gpu_memory_temperature", memory, f"has memory at {memory} C."),
            ("gpu_throttle", throttled, _clock_text(gpu)),
            ("gpu_power", drawn, f"draws {watts} W; its limit is {limit} W."),
            ("gpu_ecc", errors, f"has had {errors or 0:,} {of_driver}"),
            ("gpu_remap_failed", gpu.remap_failed, f"has {spare} spare rows for broken memory."),
            ("gpu_remap_pending", gpu.remap_pending, f"has {row} a reset will replace."),
        ]
        for alarm, field, text in _AS_OTHERS:  # where all are alike, the machine is built so
            amount = getattr(gpu, field)
            peers = [getattr(peer, field) for peer in samples if peer.name == gpu.name]
            most = max((peer for peer in peers if peer is not None), default=None)
            if amount is not None and most:
                values.append((alarm, amount / most, text.format(amount, most)))
        if gpu.local_rank is not None:
            busy, text = gpu.utilization_fraction, "of the time while the run trains."
            idle = "gpu_idle", busy, f"is busy {busy or 0:.0%} {text}"
            # The other clears the alarm of a run that has stopped.
            values.append(idle if is_training else ("gpu_idle", 1.0, "has no steps to compute."))
        yield from (
            Reading(alarm, name, amount, f"{name} {text}") for alarm, amount, text in values
        )


def _clock_text(gpu: GpuSample) -> str:
    reasons = ", ".join(gpu.throttle_reasons or ()).replace("_", " ")
    clock = known(": {} of {} MHz", gpu.sm_clock_mhz, gpu.sm_clock_max_mhz)
    text = f"is {f'throttled ({reasons})' if reasons else 'not throttled'}{clock}"
    return f"{text}{known(', {} C', gpu.temperature_celsius)}."


def system_readings(system: SystemSample, disk: Sequence[DiskPoint]) -> Iterator[Reading]:
    """Yield the readings of a machine and of its disk, whose oldest point is the first."""
    free, total = system.disk_free_gb, system.disk_total_gb
    if free is not None and total is not None:
        least, text = max(LEAST_DISK_GB, LEAST_DISK_FRACTION * total), "free on the run's disk"
        full = f"{free:.1f} GB of {total:.0f} GB are {text}."
        yield Reading("disk_full", system.host, free / least, full)
        hours = hours_until_full(disk)
        rate = known("; at this rate it is full in {:.1f} h", hours)
        left = math.inf if hours is None else hours
        yield Reading("disk_filling", system.host, left, f"{free:.1f} GB are {text}{rate}.")
    used, memory = system.memory_used_gb, system.memory_total_gb
    if used is not None and memory:
        text = f"{system.host} uses {used:.1f} of {memory:.1f} GB of memory."
        yield Reading("memory", system.host, used / memory, text)


def hours_until_full(disk: Sequence[DiskPoint]) -> float | None:
    """Return when a disk is full at its present rate; None: never, or too few points to tell."""
    if not disk:
        return None
    end, free = disk[-1]
    began, free_then = next(point for point in disk if end - point[0] <= LONGEST_TREND_SECONDS)
    if end - began < SHORTEST_TREND_SECONDS or free_then <= free:
        return None
    return free / (free_then - free) * (end - began) / 3600


def run_readings(run: RunView, cost: CostConfig, *, began: float, alive: bool) -> Iterator[Reading]:
    """Yield the readings of a run.

    Steps logged before `began` (Unix seconds) do not count; `alive`: the training process runs.
    """
    is_training, mirror = run.reported_status == "training", run.mirror
    died = is_training and not alive
    cause = "ended without reporting why; it was probably killed" if died else "has not died"
    text = f"The training process {cause} (step {run.step:,})."
    yield Reading("run_died", "run", died, text)
    yield from _loss(run.steps, began=began)
    # While the status is an earlier session's, the mirror's file may be, too.
    if mirror is not None and mirror.heartbeat is not None and (is_training or not alive):
        error, silent = mirror.last_error, max(0.0, run.now - mirror.heartbeat)
        text = f"The mirror's uploads {'work.' if error is None else f'fail: {error}'}"
        yield Reading("mirror_failing", "run", error is not None, text)
        text = f"{counted(mirror.waiting, 'checkpoint waits', 'checkpoints wait')} to be mirrored."
        yield Reading("mirror_behind", "run", mirror.waiting, text)
        text = f"The mirror's last heartbeat was {duration(silent)} ago."
        yield Reading("mirror_silent", "run", 0.0 if mirror.drained else silent, text)
    yield from _money(run, cost)


def rank_readings(
    run: RunView, gpus: Sequence[GpuSample], systems: Sequence[SystemSample], *, began: float
) -> Iterator[Reading]:
    """Yield the reading of the slowest rank, if it is of this session, with the likely cause."""
    last = run.steps[-1] if run.steps else StepMetrics(0)
    slow = last.slowest
    if slow is None or (last.time or 0.0) < began:
        return
    excess = f"takes {slow.excess_fraction:.0%} longer than the others (mostly {slow.phase})"
    text = f"In each step {slow.place} {excess}"
    if slow.is_slow:
        text += f", and they wait for it. {_slow_cause(slow, gpus, systems)}"
    else:
        text += "."
    yield Reading("slow_rank", "run", slow.excess_fraction / slow.limit_fraction, text)


def _slow_cause(
    slow: SlowestRank, gpus: Sequence[GpuSample], systems: Sequence[SystemSample]
) -> str:
    if slow.phase == "data":
        return "Its data come late: look at the disk, the network and the CPU of its machine."
    for gpu in gpus:
        if (gpu.host, gpu.local_rank) != (slow.host, slow.local_rank):
            continue
        name, clock = f"{gpu.host} GPU {gpu.index}", gpu.sm_clock_mhz
        if gpu.throttle_reasons:
            return f"{name} {_clock_text(gpu)}"
        peers = [peer for peer in gpus if peer.name == gpu.name and peer.local_rank is not None]
        usual = statistics.median(peer.sm_clock_mhz or 0 for peer in peers)
        if clock and clock < LOW_CLOCK * usual:
            return f"{name} runs at {clock} MHz; others of its kind at {usual:.0f} MHz."
    for system in systems:
        busy, load = system.cpu_fraction or 0.0, system.load_1m or 0.0
        if system.host == slow.host:
            if busy >= BUSY_CPU or load > (system.cpu_cores or load):
                return f"The CPU of {system.host} is busy: {busy:.0%}, load {load:.0f}."
            return "The readings of its machine show no cause."
    return "There are no readings of its machine here."


def _loss(steps: Sequence[StepMetrics], *, began: float) -> Iterator[Reading]:
    logged = [step for step in steps if step.time is not None]
    if not logged or (logged[-1].time or 0.0) < began:
        return
    last = logged[-1]
    loss = known("{:.4f}", last.loss) or "not finite"
    text = f"The loss of step {last.step:,} is {loss}"
    yield Reading("non_finite", "run", last.loss is None, f"{text}.")
    before = [step.loss for step in logged[:-1] if step.loss is not None]
    if last.loss is not None and len(before) >= FEWEST_LOSSES:
        median = statistics.median(before)
        spread = DEVIATION * statistics.median(abs(loss - median) for loss in before)
        jump = max(SPIKE_NATS, SPIKE_DEVIATIONS * spread)
        text += f"; the median of the {len(before)} logged before it is {median:.4f}."
        yield Reading("loss_spike", "run", (last.loss - median) / jump, text)


def _money(run: RunView, cost: CostConfig) -> Iterator[Reading]:
    spent = number(run.state or {}, "cost_usd")  # of all sessions
    if spent is None:
        return
    budget, credit, price = cost.budget_usd, cost.credit_usd, cost.per_hour_usd
    if budget is not None:  # at 100 % the run itself saves and stops
        text = f"The run has cost ${spent:,.2f}, {spent / budget:.0%} of its budget"
        for alarm in ("budget_80", "budget_95"):
            yield Reading(alarm, "run", spent / budget, f"{text} (${budget:,.2f}).")
    if credit is None or not price:
        return
    left = credit - spent
    lasts = f"The credit lasts for {max(0.0, left / price):.1f} h"
    rest = run.steps[-1].cost_left_usd if run.steps else None
    if rest is not None:
        share = rest / left if left > 0 else math.inf
        text = f"the rest of the run takes {rest / price:.1f} h (${rest:,.2f})."
        is_short = share if run.has_steps_left else 0.0
        yield Reading("credit_short", "run", is_short, f"{lasts} (${left:,.2f}); {text}")
    text = f"{lasts} more; then the provider takes the machine."
    hours = left / price if run.has_steps_left else math.inf
    yield Reading("credit_ending", "run", hours, text)


class AlarmMessages:
    """Sends a message when a critical alarm is raised, and another when it is cleared.

    An alarm that is raised again within `REPEAT_SECONDS` is reported after them, if it still is.
    """

    def __init__(self, target: str) -> None:
        """Start the thread; `target` is an address or a shell command."""
        is_address = target.startswith(("http://", "https://"))
        self._send_to = functools.partial(_post if is_address else _run, target)
        self._newest: dict[Key, AlarmEvent] = {}
        self._sent: dict[Key, tuple[bool, float]] = {}  # whether raised, and when that was sent
        self._has_failed = False
        self._deadline = math.inf
        self._ending = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def add(self, events: Iterable[AlarmEvent], *, run: str, step: int | None, now: float) -> None:
        """Send the messages that are due at `now` (monotonic seconds), without waiting."""
        critical = [event for event in events if event.severity == "critical"]
        self._newest |= {(event.alarm, event.subject): event for event in critical}
        for key, event in self._newest.items():
            # The first event of a session may clear an alarm of the session before.
            was_raised, at = self._sent.get(key, (not event.raised, -math.inf))
            if event.raised != was_raised and (was_raised or now - at >= REPEAT_SECONDS):
                self._sent[key] = event.raised, now if event.raised else at
                now_utc = datetime.datetime.now(datetime.UTC).isoformat()
                message = {"run": run, "step": step, "time": now_utc, **as_record(event)}
                self._thread.submit(self._send, json.dumps(message).encode())

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        self._deadline = time.monotonic() + END_SECONDS
        self._ending.set()
        self._thread.shutdown()

    def _send(self, message: bytes) -> None:
        """Send one message, with retries; log the first of several failures."""
        reason: str | None = "the run has ended"
        for pause in (0.0, *PAUSES_SECONDS):
            if (pause and self._ending.wait(pause)) or time.monotonic() > self._deadline:
                break
            try:
                reason = self._send_to(message)
            except Exception as error:  # the edge of a background owner
                reason = type(error).__name__  # its text may hold the address, which may be secret
            if reason is None:
                break
        if reason is not None and not self._has_failed:
            logger.warning("log.on_alarm: an alarm could not be sent (%s).", reason)
        self._has_failed = reason is not None


def _post(address: str, message: bytes) -> str | None:
    """POST a message; return why it was not accepted."""
    import requests  # a run without an address does not need it

    kind = {"Content-Type": "application/json"}
    options: dict[str, Any] = {"timeout": LIMIT_SECONDS, "allow_redirects": False, "stream": True}
    with requests.post(address, message, headers=kind, **options) as answer:
        return None if 200 <= answer.status_code < 300 else f"HTTP {answer.status_code}"


def _run(command: str, message: bytes) -> str | None:
    """Run a shell command with a message on its standard input; return why it failed."""
    return run_shell(command, message, LIMIT_SECONDS)
