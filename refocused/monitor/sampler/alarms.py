"""The alarms: their limits, and when they begin and end.

Between its two limits an alarm stays what it is, so that a value near one of them does not raise
and end it again and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from refocused.monitor.readings import AlarmEvent, Severity

Level = Literal["bad", "between", "good"]
Key = tuple[str, str]  # the alarm and its subject


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """When a value is bad or good, and for how many seconds before that counts.

    A value is bad from `bad` on and good from `good` on, where `good` lies on the other side.
    """

    bad: float = 1
    good: float = 0
    severity: Severity = "warning"  # `critical`: somebody should act now
    begins_after: float = 0.0
    ends_after: float = 0.0


SHORT_SECONDS = 10.0  # what lasts less is a spike
RULES = {
    "gpu_lost": Rule(severity="critical"),
    "gpu_temperature": Rule(-2, -7, begins_after=SHORT_SECONDS),  # degrees above its slowdown
    "gpu_memory_temperature": Rule(95, 90, begins_after=SHORT_SECONDS),  # HBM3's specification
    "gpu_throttle": Rule(begins_after=SHORT_SECONDS, ends_after=3 * SHORT_SECONDS),
    "gpu_power": Rule(1.1, 1.02, begins_after=3 * SHORT_SECONDS),  # share of its limit
    "gpu_ecc": Rule(severity="critical"),
    "gpu_remap_failed": Rule(severity="critical"),
    "gpu_remap_pending": Rule(),
    "gpu_nvlink": Rule(0.99, 1, begins_after=SHORT_SECONDS),  # share of the others', as below
    "gpu_pcie": Rule(0.99, 1, begins_after=SHORT_SECONDS),
    "gpu_power_limit": Rule(0.95, 0.97, begins_after=SHORT_SECONDS),
    "gpu_idle": Rule(0.3, 0.5, begins_after=120.0),  # longer than a validation or a save
    "disk_full": Rule(1, 2, "critical"),  # multiples of what must be free
    "disk_filling": Rule(3, 6, begins_after=60.0),  # hours until it is full
    "memory": Rule(0.95, 0.90, "critical"),
    "run_died": Rule(severity="critical"),
    "no_step": Rule(severity="critical"),
    "non_finite": Rule(severity="critical"),
    "loss_spike": Rule(1, 0.5),  # multiples of a usual deviation
    "mirror_failing": Rule(begins_after=300.0),
    "mirror_behind": Rule(3, 1, begins_after=60.0),  # checkpoints
    "mirror_silent": Rule(300, 150),  # seconds
    "budget_80": Rule(0.80, 0.80),
    "budget_95": Rule(0.95, 0.95, "critical"),
    "credit_short": Rule(1.0, 0.95),  # what the rest costs, as a share of what is left
    "credit_ending": Rule(2.0, 2.5, "critical"),  # hours
}


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What was found of one subject (`node1 GPU 5`, `run`); the text is for a person."""

    alarm: str
    subject: str
    value: float | None  # True is bad and False is good; None: unknown
    text: str

    @property
    def level(self) -> Level | None:
        """Where the value lies between the limits of its rule."""
        if self.value is None:
            return None
        rule = RULES[self.alarm]
        sign = 1 if rule.bad >= rule.good else -1
        if sign * self.value >= sign * rule.bad:
            return "bad"
        return "good" if sign * self.value <= sign * rule.good else "between"


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Whether an alarm is raised, and since when (in seconds) readings say the opposite."""

    raised: bool = False
    turned: float | None = None


def judge(
    standings: Mapping[Key, Standing], readings: Iterable[Reading], *, now: float, host: str
) -> tuple[dict[Key, Standing], list[AlarmEvent]]:
    """Return the state of every alarm after these readings, and those that begin or end.

    An alarm without a reading stays: a lost GPU has no temperature any more. `standings` is what
    the last call returned, `now` monotonic seconds.
    """
    after, events = dict(standings), []
    for found in readings:
        if found.level is None:
            continue
        key, rule = (found.alarm, found.subject), RULES[found.alarm]
        before = after.get(key, Standing())
        after[key] = _next(before, found.level, rule, now)
        raised = after[key].raised
        if raised != before.raised:
            text = found.text if raised else f"over: {found.text}"
            events.append(AlarmEvent(*key, raised, rule.severity, text, host))
    return after, events


def _next(before: Standing, level: Level, rule: Rule, now: float) -> Standing:
    opposite, delay = ("good", rule.ends_after) if before.raised else ("bad", rule.begins_after)
    if level != opposite:
        return Standing(before.raised)
    turned = now if before.turned is None else before.turned
    if now - turned < delay:
        return Standing(before.raised, turned)
    return Standing(not before.raised)


def still_raised(records: Iterable[Mapping[str, object]], *, host: str) -> list[AlarmEvent]:
    """Return the ends of all alarms that lines of `events.jsonl` have begun and not ended.

    A new sampler, maybe on another machine (`host`), ends them before it looks for itself: an
    alarm of something that is not read any more would never end.
    """
    raised: dict[Key, Severity] = {}
    for record in records:
        if record.get("kind") == AlarmEvent.kind:
            key = (str(record.get("alarm")), str(record.get("subject")))
            raised.pop(key, None)
            if record.get("raised"):
                raised[key] = "critical" if record.get("severity") == "critical" else "warning"
    text = "over: watched anew, since training was started again"
    return [AlarmEvent(*key, False, severity, text, host) for key, severity in raised.items()]
