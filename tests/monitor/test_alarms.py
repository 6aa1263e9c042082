from __future__ import annotations

import pytest

from refocused.monitor.sampler.alarms import (
    Key,
    Level,
    Reading,
    Standing,
    judge,
    level_above,
    level_below,
    still_raised,
)


def told(levels: list[Level], *, raised_after: float = 0, cleared_after: float = 0) -> list[str]:
    """What is told of one alarm whose readings come a second apart."""
    standings: dict[Key, Standing] = {}
    lines = []
    for second, level in enumerate(levels):
        reading = Reading(
            "heat",
            "GPU 5",
            level,
            f"text {second}",
            raised_after_seconds=raised_after,
            cleared_after_seconds=cleared_after,
        )
        standings, events = judge(standings, [reading], now=float(second), host="here")
        lines += [event.text for event in events]
    return lines


def test_an_alarm_begins_and_ends_once() -> None:
    assert told(["good", "bad", "bad", "bad", "good", "good"]) == ["text 1", "over: text 4"]


def test_a_value_that_wavers_around_a_limit_tells_nothing_new() -> None:
    assert told(["bad", "between", "bad", "between", "bad"]) == ["text 0"]
    assert told(["good", "between", "good", "between"]) == []


def test_a_reading_must_last() -> None:
    assert told(["bad", "bad", "good", "bad", "bad"], raised_after=2) == []
    assert told(["bad", "between", "bad", "bad"], raised_after=2) == []
    assert told(["bad", "bad", "bad", "bad"], raised_after=2) == ["text 2"]
    assert told(["bad", "good", "good", "bad", "good", "good", "good"], cleared_after=2) == [
        "text 0",
        "over: text 6",
    ]


def test_subjects_are_told_apart_and_without_a_reading_an_alarm_stays() -> None:
    bad = [Reading("heat", gpu, "bad", gpu, "critical") for gpu in ("GPU 1", "GPU 2")]
    standings, events = judge({}, bad, now=0, host="here")
    assert [(event.subject, event.raised, event.severity) for event in events] == [
        ("GPU 1", True, "critical"),
        ("GPU 2", True, "critical"),
    ]
    standings, events = judge(standings, [], now=1, host="here")
    assert events == []
    good = Reading("heat", "GPU 2", "good", "cool")
    standings, events = judge(standings, [good], now=2, host="here")
    assert [(event.subject, event.raised) for event in events] == [("GPU 2", False)]
    assert [key for key, standing in standings.items() if standing.raised] == [("heat", "GPU 1")]


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [(79, "good", "bad"), (80, "good", "bad"), (83, "between", "between"), (85, "bad", "good")],
)
def test_levels(value: float, above: Level, below: Level) -> None:
    assert level_above(value, bad=85, good=80) == above
    assert level_below(value, bad=80, good=85) == below


def test_what_an_earlier_start_has_left_raised() -> None:
    def line(alarm: str, raised: bool) -> dict[str, object]:
        return {"kind": "alarm", "alarm": alarm, "subject": "run", "raised": raised}

    ended = [line("a", True), line("a", False)]
    left = [line("b", True), line("c", True), line("c", False), line("c", True)]
    others = [{"kind": "save_failed", "raised": True}, {}]
    found = still_raised([*ended, *left, *others], host="node2")
    assert [(event.alarm, event.raised, event.host) for event in found] == [
        ("b", False, "node2"),
        ("c", False, "node2"),
    ]
