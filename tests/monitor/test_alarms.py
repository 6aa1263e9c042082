"""Alarms: when they begin and end, and those of a run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from monitor.watched_run import GPU, SYSTEM, by_alarm

from refocused.config.outputs import CostConfig
from refocused.metrics.history import StepMetrics
from refocused.metrics.rank_times import SlowestRank
from refocused.monitor.readings import GpuSample
from refocused.monitor.run_reader import Mirror, RunView
from refocused.monitor.sampler.alarms import (
    Key,
    Level,
    Reading,
    Rule,
    Standing,
    alarm_rules,
    judge,
    rank_readings,
    run_readings,
    still_raised,
)

VALUES: dict[Level, float] = {"good": 0, "between": 0.5, "bad": 1}


def texts(levels: list[Level]) -> list[str]:
    """The events of one alarm whose readings come a second apart."""
    standings: dict[Key, Standing] = {}
    found = []
    for second, level in enumerate(levels):
        readings = [Reading("heat", "GPU 5", VALUES[level], f"text {second}")]
        standings, events = judge(standings, readings, now=float(second), host="here")
        found += [event.text for event in events]
    return found


@pytest.mark.parametrize(
    ("levels", "delays", "expected"),
    [
        ("good bad bad bad good good", {}, ["text 1", "over: text 4"]),
        # A value that wavers around a limit changes nothing.
        ("bad between bad between bad", {}, ["text 0"]),
        # A reading must last.
        ("bad bad good bad bad", {"begins_after": 2}, []),
        ("bad between bad bad", {"begins_after": 2}, []),
        ("bad bad bad bad", {"begins_after": 2}, ["text 2"]),
        ("bad good good bad good good good", {"ends_after": 2}, ["text 0", "over: text 6"]),
    ],
)
def test_when_an_alarm_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch, levels: str, delays: dict[str, float], expected: list[str]
) -> None:
    monkeypatch.setitem(alarm_rules(), "heat", Rule(**delays))  # type: ignore[arg-type]
    assert texts(levels.split()) == expected  # type: ignore[arg-type]


def test_subjects_are_kept_apart_and_without_a_reading_an_alarm_stays() -> None:
    bad = [Reading("gpu_lost", gpu, True, gpu) for gpu in ("GPU 1", "GPU 2")]
    standings, events = judge({}, bad, now=0, host="here")
    assert [(event.subject, event.raised, event.severity) for event in events] == [
        ("GPU 1", True, "critical"),
        ("GPU 2", True, "critical"),
    ]
    standings, events = judge(standings, [], now=1, host="here")
    assert events == []
    good = Reading("gpu_lost", "GPU 2", False, "answers")
    standings, events = judge(standings, [good], now=2, host="here")
    assert [(event.subject, event.raised) for event in events] == [("GPU 2", False)]
    assert [key for key, standing in standings.items() if standing.raised] == [
        ("gpu_lost", "GPU 1")
    ]


@pytest.mark.parametrize(
    ("rule", "value", "level"),
    [
        (Rule(85, 80), 80, "good"),
        (Rule(85, 80), 83, "between"),
        (Rule(85, 80), 85, "bad"),
        (Rule(80, 85), 80, "bad"),
        (Rule(80, 80), 80, "bad"),
        (Rule(80, 80), 79, "good"),
        (Rule(), True, "bad"),
        (Rule(), False, "good"),
        (Rule(), None, None),
    ],
)
def test_levels(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, value: float | None, level: Level | None
) -> None:
    monkeypatch.setitem(alarm_rules(), "heat", rule)
    assert Reading("heat", "x", value, "").level == level


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


BEGAN = 1_000_000.0
MIRROR = Mirror("gs://b", None, 0, None, 0, None, heartbeat=BEGAN + 600, drained=False)
LAST = BEGAN + 105  # when ten steps are looked at
FINISHED = {"status": "finished", "step": 100_000, "alive": False}


def logged(
    count: int, *, gap: float = 10.0, last: float | None = 2.9, left: float | None = None
) -> list[StepMetrics]:
    """Steps that were logged evenly; their losses waver by 0.05 around 2.9."""
    steps = [
        StepMetrics(10 * n, time=BEGAN + gap * n, loss=2.9 + 0.05 * (-1) ** n)
        for n in range(1, count + 1)
    ]
    return [*steps[:-1], dataclasses.replace(steps[-1], loss=last, cost_left_usd=left)]


def readings(
    steps: Sequence[StepMetrics],
    *,
    after: float = 5.0,
    alive: bool = True,
    mirror: Mirror | None = None,
    cost: CostConfig | None = None,
    **state: Any,
) -> dict[str, Reading]:
    """What the rules find of a run so many seconds after its last step."""
    step = steps[-1].step if steps else 0
    known = {"status": "training", "step": step, "total_steps": 100_000, **state}
    now = (steps[-1].time or BEGAN) + after if steps else BEGAN + after
    run = RunView("one", now, state=known, steps=steps, mirror=mirror)
    return by_alarm(run_readings(run, cost or CostConfig(), began=BEGAN, alive=alive))


def test_nothing_is_wrong_with_a_run_that_goes_on() -> None:
    cost = CostConfig(per_hour_usd=8.0, budget_usd=50.0, credit_usd=50.0)
    found = readings(logged(60, left=5.0), mirror=MIRROR, cost=cost, cost_usd=10.0)
    assert {reading.level for reading in found.values()} == {"good"}
    assert len(found) == 10


NOISY = [StepMetrics(n, time=BEGAN + n, loss=3.0 + (-1) ** n) for n in range(50)]
EARLIER = [dataclasses.replace(one, time=(one.time or 0) - 1e6) for one in logged(30)]


@pytest.mark.parametrize(
    ("steps", "facts", "alarm", "level", "words"),
    [
        (logged(30), {"after": 1e4}, "no_step", None, ""),  # the watchdog alone judges hangs
        (logged(3), {"alive": False}, "run_died", "bad", "(step 30)"),
        (logged(3), {"alive": False, "status": "failed"}, "run_died", "good", ""),
        (logged(51, last=3.5), {}, "loss_spike", "bad", "3.5000; the median of the 50 logged befo"),
        (logged(51, last=3.41), {}, "loss_spike", "bad", ""),  # half a nat above the median
        (logged(51, last=3.39), {}, "loss_spike", "between", ""),
        (logged(51, last=3.14), {}, "loss_spike", "good", ""),
        (logged(51, last=1.0), {}, "loss_spike", "good", ""),
        (logged(20, last=9.0), {}, "loss_spike", None, ""),
        (logged(21, last=9.0), {}, "loss_spike", "bad", "of the 20 logged before"),
        # 6 deviations are 8.9 nats.
        ([*NOISY, StepMetrics(50, time=BEGAN + 50, loss=11.8)], {}, "loss_spike", "between", ""),
        ([*NOISY, StepMetrics(50, time=BEGAN + 50, loss=12.0)], {}, "loss_spike", "bad", ""),
        (logged(51, last=None), {}, "loss_spike", None, ""),
        (logged(51, last=None), {}, "non_finite", "bad", "not finite"),
        ([dataclasses.replace(EARLIER[-1], loss=None)], {}, "non_finite", None, ""),
        # What was wrong with a run is over when it has ended well.
        (logged(30), FINISHED | {"mirror": MIRROR}, "mirror_silent", "good", ""),
        # Of a new session that has written nothing yet, the mirror's words are of the one before.
        ([], {"status": "finished", "mirror": MIRROR, "after": 1e5}, "mirror_silent", None, ""),
    ],
)
def test_a_run(
    steps: list[StepMetrics], facts: dict[str, Any], alarm: str, level: str | None, words: str
) -> None:
    found = readings(steps, **facts).get(alarm)
    assert (None if found is None else found.level) == level
    assert words in (found.text if found else "")


@pytest.mark.parametrize(
    ("changes", "alarm", "level"),
    [
        ({"waiting": 3}, "mirror_behind", "bad"),
        ({"waiting": 2}, "mirror_behind", "between"),
        ({"waiting": 1}, "mirror_behind", "good"),
        ({"last_error": "503"}, "mirror_failing", "bad"),
        ({"heartbeat": LAST - 300}, "mirror_silent", "bad"),
        ({"heartbeat": LAST - 299}, "mirror_silent", "between"),
        ({"heartbeat": LAST - 150}, "mirror_silent", "good"),
        ({"heartbeat": LAST + 150}, "mirror_silent", "good"),  # its clock is ahead
        # One that has finished says nothing while the model is exported.
        ({"heartbeat": BEGAN - 1000, "drained": True}, "mirror_silent", "good"),
        ({"heartbeat": None}, "mirror_silent", None),
    ],
)
def test_the_mirror(changes: dict[str, Any], alarm: str, level: str | None) -> None:
    found = readings(logged(10), mirror=dataclasses.replace(MIRROR, **changes)).get(alarm)
    assert (None if found is None else found.level) == level
    assert alarm not in readings(logged(10))


@pytest.mark.parametrize(
    ("spent", "left", "levels"),
    [
        (10.0, 85.0, ("good", "good", "good", "good")),
        (10.0, 90.0, ("good", "good", "bad", "good")),
        (79.9, 0.0, ("good", "good", "good", "good")),
        (80.0, 20.0, ("bad", "good", "bad", "good")),
        (80.0, 19.5, ("bad", "good", "between", "good")),
        (80.1, 18.9, ("bad", "good", "good", "between")),
        (83.9, 0.0, ("bad", "good", "good", "between")),
        (84.0, 0.0, ("bad", "good", "good", "bad")),
        (94.9, 0.0, ("bad", "good", "good", "bad")),
        (95.0, 0.0, ("bad", "bad", "good", "bad")),
        (85.0, 10.0, ("bad", "good", "good", "bad")),
        (101.0, 5.0, ("bad", "bad", "bad", "bad")),
    ],
)
def test_budget_and_credit(spent: float, left: float, levels: tuple[str, ...]) -> None:
    names = ("budget_80", "budget_95", "credit_short", "credit_ending")
    cost = CostConfig(per_hour_usd=8.0, budget_usd=100.0, credit_usd=100.0)
    found = readings(logged(1, left=left), cost=cost, cost_usd=spent)
    assert tuple(found[name].level for name in names) == levels
    assert not set(names) & set(readings(logged(1, left=left), cost_usd=spent))  # without prices


SLOW = SlowestRank(9, 0.12, 0.05, "backward", host="node1", local_rank=1)
GPUS = [dataclasses.replace(GPU, index=index, local_rank=index) for index in range(4)]
HOT = {"throttle_reasons": ("hw_thermal",), "sm_clock_mhz": 1305, "temperature_celsius": 88}


@pytest.mark.parametrize(
    ("slow", "gpu", "system", "words"),
    [
        ({"phase": "data"}, HOT, {}, "look at the disk, the network and the CPU of its machine."),
        ({}, HOT, {}, "node1 GPU 1 is throttled (hw thermal): 1305 of 1980 MHz, 88 C."),
        ({}, {"sm_clock_mhz": 1700}, {}, "runs at 1700 MHz; others of its kind at 1905 MHz."),
        (
            {},
            {"sm_clock_mhz": 1880},
            {"cpu_fraction": 0.97},
            "The CPU of node1 is busy: 97%, load 0.",
        ),
        ({}, {}, {"load_1m": 70.0, "cpu_cores": 64}, "The CPU of node1 is busy: 12%, load 70."),
        ({}, {}, {}, "The readings of its machine show no cause."),
        ({"host": "node2"}, HOT, {}, "There are no readings of its machine here."),
    ],
)
def test_the_cause_of_a_slow_rank(
    slow: dict[str, Any], gpu: dict[str, Any], system: dict[str, Any], words: str
) -> None:
    gpus = [*GPUS[:1], dataclasses.replace(GPUS[1], **gpu), *GPUS[2:]]
    found = by_alarm(ranks(dataclasses.replace(SLOW, **slow), gpus, system))["slow_rank"]
    place = "rank 9 on " + slow.get("host", "node1")
    assert found.text.startswith(f"In each step {place} takes 12% longer than the others (mostly ")
    assert (found.level, found.text.endswith(words)) == ("bad", True)


@pytest.mark.parametrize(
    ("changes", "level"),
    [({"excess_fraction": 0.04}, "between"), ({"excess_fraction": 0.02}, "good")],
)
def test_a_rank_that_is_hardly_slower(changes: dict[str, Any], level: str) -> None:
    found = by_alarm(ranks(dataclasses.replace(SLOW, **changes), GPUS, {}))["slow_rank"]
    assert (found.level, "wait" in found.text) == (level, False)
    assert list(ranks(SLOW, GPUS, {}, after=1000.0)) == []  # of an earlier session


def ranks(
    slow: SlowestRank, gpus: Sequence[GpuSample], system: dict[str, Any], *, after: float = 0.0
) -> list[Reading]:
    """What the rules find of a run whose slowest rank is this one."""
    run = RunView("one", steps=[dataclasses.replace(one, slowest=slow) for one in logged(3)])
    systems = [dataclasses.replace(SYSTEM, **system)]
    return list(rank_readings(run, gpus, systems, began=BEGAN + after))
