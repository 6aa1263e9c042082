"""When an alarm begins and ends: a pure function of what was read, and of when.

A rule reads a measurement as bad, good, or between the two. Between, an alarm stays what it is:
a value that wavers around one limit would otherwise raise and end it again and again. A rule may
also ask that a reading lasts before it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from refocused.monitor.readings import AlarmEvent, Severity

Level = Literal["bad", "between", "good"]
Key = tuple[str, str]  # the alarm and its subject


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a rule says of one subject at one time.

    Attributes:
        alarm: Name of the rule.
        subject: Whom it is about.
        level: How it is.
        text: What a person reads when an alarm begins or ends here, with the value.
        severity: `critical`: somebody should act now.
        raised_after_seconds: How long it must have been bad before the alarm begins.
        cleared_after_seconds: How long it must have been good before the alarm ends.
    """

    alarm: str
    subject: str
    level: Level
    text: str
    severity: Severity = "warning"
    raised_after_seconds: float = 0.0
    cleared_after_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where an alarm stands.

    Attributes:
        raised: Whether it has begun.
        turned: Since when readings say the opposite of that, in seconds; None: they do not.
    """

    raised: bool = False
    turned: float | None = None


def level_above(value: float, *, bad: float, good: float) -> Level:
    """Return how a value is that should be low: bad from one limit on, good up to a lower one."""
    return "bad" if value >= bad else "good" if value <= good else "between"


def level_below(value: float, *, bad: float, good: float) -> Level:
    """Return how a value is that should be high: bad down from one limit, good from a higher."""
    return "bad" if value <= bad else "good" if value >= good else "between"


def judge(
    standings: Mapping[Key, Standing], readings: Iterable[Reading], *, now: float, host: str
) -> tuple[dict[Key, Standing], list[AlarmEvent]]:
    """Return where every alarm stands after these readings, and those that begin or end.

    An alarm without a reading stays: a GPU that is lost has no temperature any more.

    Args:
        standings: What the last call returned; empty at first.
        readings: At most one for each alarm and subject.
        now: On any clock that does not go back, in seconds.
        host: Of the machine that judges.
    """
    after, events = dict(standings), []
    for reading in readings:
        key = (reading.alarm, reading.subject)
        before = after.get(key, Standing())
        after[key] = _next(before, reading, now)
        if after[key].raised != before.raised:
            events.append(_event(reading, raised=after[key].raised, host=host))
    return after, events


def still_raised(records: Iterable[Mapping[str, object]], *, host: str) -> list[AlarmEvent]:
    """Return the ends of all alarms that lines of `events.jsonl` have begun and not ended.

    Whoever watches anew, maybe on another machine, ends them first and then looks for itself:
    of what nobody reads any more, none would ever end.

    Args:
        records: The lines, in order.
        host: Of the machine that watches now.
    """
    raised: dict[Key, AlarmEvent] = {}
    for record in records:
        if record.get("kind") != AlarmEvent.kind:
            continue
        key = (str(record.get("alarm")), str(record.get("subject")))
        raised.pop(key, None)
        if record.get("raised"):
            severity: Severity = "critical" if record.get("severity") == "critical" else "warning"
            text = "over: watched anew, since training was started again"
            raised[key] = AlarmEvent(*key, False, severity, text, host)
    return list(raised.values())


def _next(before: Standing, reading: Reading, now: float) -> Standing:
    opposite, delay = (
        ("good", reading.cleared_after_seconds)
        if before.raised
        else ("bad", reading.raised_after_seconds)
    )
    if reading.level != opposite:
        return Standing(before.raised)
    turned = now if before.turned is None else before.turned
    if now - turned < delay:
        return Standing(before.raised, turned)
    return Standing(not before.raised)


def _event(reading: Reading, *, raised: bool, host: str) -> AlarmEvent:
    return AlarmEvent(
        alarm=reading.alarm,
        subject=reading.subject,
        raised=raised,
        severity=reading.severity,
        text=reading.text if raised else f"over: {reading.text}",
        host=host,
    )
