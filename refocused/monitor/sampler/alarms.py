"""When an alarm begins and ends: a pure function of what was read, and of when.

A rule reads a measurement as bad, good, or between the two. Between, an alarm stays what it is, so
that a value near a limit does not raise and end it again and again. A rule may also require that a
reading lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from refocused.monitor.readings import AlarmEvent, Severity

Level = Literal["bad", "between", "good"]
Key = tuple[str, str]  # the alarm and its subject


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a rule finds of one subject at one time.

    Attributes:
        alarm: Name of the rule.
        subject: What it is about.
        level: How it is.
        text: For a person, when an alarm begins or ends here; holds the value.
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


def bad_if(
    alarm: str, subject: str, is_bad: bool | None, text: str, **options: Any
) -> list[Reading]:
    """Return a reading that is bad or good; none for an unknown one."""
    if is_bad is None:
        return []
    return [Reading(alarm, subject, "bad" if is_bad else "good", text, **options)]


def bad_above(
    alarm: str, subject: str, value: float | None, limits: tuple[float, float], **options: Any
) -> list[Reading]:
    """Return the reading of a value, bad from the first limit on, good up to the lower second."""
    if value is None:
        return []
    bad, good = limits
    level: Level = "bad" if value >= bad else "good" if value <= good else "between"
    return [Reading(alarm, subject, level, **options)]


def bad_below(
    alarm: str, subject: str, value: float | None, limits: tuple[float, float], **options: Any
) -> list[Reading]:
    """Return the reading of a value, bad down from the first limit, good from the higher second."""
    bad, good = limits
    negative = None if value is None else -value
    return bad_above(alarm, subject, negative, (-bad, -good), **options)


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """State of an alarm.

    Attributes:
        raised: Whether it has begun.
        turned: Since when readings say the opposite, in seconds; None: they do not.
    """

    raised: bool = False
    turned: float | None = None


def judge(
    standings: Mapping[Key, Standing], readings: Iterable[Reading], *, now: float, host: str
) -> tuple[dict[Key, Standing], list[AlarmEvent]]:
    """Return the state of every alarm after these readings, and those that begin or end.

    An alarm without a reading stays: a lost GPU has no temperature any more.

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
        raised = after[key].raised
        if raised != before.raised:
            text = reading.text if raised else f"over: {reading.text}"
            events.append(AlarmEvent(*key, raised, reading.severity, text, host))
    return after, events


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


def still_raised(records: Iterable[Mapping[str, object]], *, host: str) -> list[AlarmEvent]:
    """Return the ends of all alarms that lines of `events.jsonl` have begun and not ended.

    A new sampler, maybe on another machine, ends them before it looks for itself: an alarm of
    something that is not read any more would never end.

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
