"""Alarms: both sides of every limit, when they begin and end, and what they say."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from monitor.watched_run import GPU, SYSTEM, by_alarm

from refocused.config.outputs import CostConfig
from refocused.metrics.history import StepMetrics
from refocused.metrics.rank_times import SlowestRank
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_reader import Mirror, RunView
from refocused.monitor.sampler.alarms import (
    Key,
    Reading,
    Rule,
    Standing,
    alarm_rules,
    gpu_readings,
    hours_until_full,
    judge,
    rank_readings,
    run_readings,
    still_raised,
    system_readings,
)

Readings = dict[str, Reading]
BEGAN = 1_000_000.0
LAST = BEGAN + 105  # when ten steps are looked at
COOL = dataclasses.replace(
    GPU,
    uuid="GPU-5c0ffee0-0000-4000-8000-000000000005",
    name="NVIDIA H100 80GB HBM3",
    temperature_celsius=61,
    slowdown_celsius=87,
    memory_temperature_celsius=70,
    power_watts=540.2,
    sm_clock_mhz=1305,
    remap_pending=False,
    remap_failed=False,
    pcie_width=16,
)
MIRROR = Mirror("gs://b", None, 0, None, 0, None, heartbeat=BEGAN + 600, drained=False)
COST = CostConfig(per_hour_usd=8.0, budget_usd=100.0, credit_usd=100.0)
SLOW = SlowestRank(9, 0.12, 0.05, "backward", host="node1", local_rank=1)


def gpu(index, **changes):
    return dataclasses.replace(COOL, index=index, local_rank=index, **changes)


def of_gpu(**changes):
    """The readings of the second of three GPUs, the others of which are healthy."""
    found = list(gpu_readings([gpu(0), gpu(1, **changes), gpu(2)], is_training=True))
    for other in ("node1 GPU 0", "node1 GPU 2"):
        assert {reading.level for reading in by_alarm(found, other).values()} == {"good"}
    return by_alarm(found, "node1 GPU 1")


def of_system(free_gb=900, total_gb=1000, **changes):
    known = {"disk_free_gb": free_gb, "disk_total_gb": total_gb, "memory_total_gb": 100.0}
    return by_alarm(system_readings(SystemSample("node1", **{**known, **changes}), []))


def falling(start_gb, gb_per_hour, *, hours=1.0):
    """A disk that fills evenly, seen once a minute."""
    minutes = range(round(60 * hours) + 1)
    return [(1e5 + 60 * m, start_gb - gb_per_hour * m / 60) for m in minutes]


def of_trend(gb_per_hour):
    system = SystemSample("node1", disk_free_gb=100.0, disk_total_gb=1000.0)
    return by_alarm(system_readings(system, falling(100, gb_per_hour)))


def logged(count, *, gap=10.0, last=2.9, left=None):
    """Steps that were logged evenly; their losses waver by 0.05 around 2.9."""
    steps = [
        StepMetrics(10 * n, time=BEGAN + gap * n, loss=2.9 + 0.05 * (-1) ** n)
        for n in range(1, count + 1)
    ]
    return [*steps[:-1], dataclasses.replace(steps[-1], loss=last, cost_left_usd=left)]


def of_run(steps, *, after=5.0, alive=True, mirror=None, cost=None, **state):
    """The readings of a run so many seconds after its last step."""
    step = steps[-1].step if steps else 0
    known = {"status": "training", "step": step, "total_steps": 100_000, **state}
    now = (steps[-1].time or BEGAN) + after if steps else BEGAN + after
    run = RunView("one", now, state=known, steps=steps, mirror=mirror)
    return by_alarm(run_readings(run, cost or CostConfig(), began=BEGAN, alive=alive))


def of_mirror(**changes):
    return of_run(logged(10), mirror=dataclasses.replace(MIRROR, **changes))


def of_money(spent, left=0.0, **state):
    return of_run(logged(1, left=left), cost=COST, cost_usd=spent, **state)


def of_ranks(gpus=(), system=None, *, after=0.0, **changes):
    """The reading of a run whose slowest rank has changed so."""
    slow = dataclasses.replace(SLOW, **changes)
    run = RunView("one", steps=[dataclasses.replace(step, slowest=slow) for step in logged(3)])
    systems = [dataclasses.replace(SYSTEM, **(system or {}))]
    return by_alarm(rank_readings(run, gpus, systems, began=BEGAN + after))


# The first value raises the alarm and the last one clears it; those between are next to them.
LIMITS: list[tuple[str, Callable[[Any], Readings], Sequence[Any]]] = [
    ("gpu_lost", lambda v: of_gpu(lost=v), (True, False)),
    ("gpu_temperature", lambda v: of_gpu(temperature_celsius=v), (85, 84, 81, 80)),
    (
        "gpu_temperature",
        lambda v: of_gpu(temperature_celsius=v, slowdown_celsius=98),
        (96, 95, 92, 91),
    ),
    (
        "gpu_temperature",
        lambda v: of_gpu(temperature_celsius=v, slowdown_celsius=None),
        (85, 84, 81, 80),
    ),
    ("gpu_memory_temperature", lambda v: of_gpu(memory_temperature_celsius=v), (95, 94, 91, 90)),
    ("gpu_throttle", lambda v: of_gpu(throttle_reasons=v), (("hw_thermal",), ())),
    ("gpu_power", lambda v: of_gpu(power_watts=v), (770.5, 769.0, 715.0, 714.0)),
    ("gpu_power_limit", lambda v: of_gpu(power_limit_watts=v), (665.0, 666.0, 678.0, 679.0)),
    ("gpu_ecc", lambda v: of_gpu(ecc_uncorrected=v), (1, 0)),
    ("gpu_remap_failed", lambda v: of_gpu(remap_failed=v), (True, False)),
    ("gpu_remap_pending", lambda v: of_gpu(remap_pending=v), (True, False)),
    ("gpu_nvlink", lambda v: of_gpu(nvlinks_active=v), (17, 18)),
    ("gpu_pcie", lambda v: of_gpu(pcie_width=v), (8, 16)),
    ("gpu_idle", lambda v: of_gpu(utilization_fraction=v), (0.3, 0.31, 0.49, 0.5)),
    ("disk_full", lambda v: of_system(v, 100), (5.0, 5.1, 9.9, 10.0)),
    ("disk_full", lambda v: of_system(v, 1000), (20.0, 20.1, 39.9, 40.0)),  # 2 %
    ("disk_filling", of_trend, (25, 24, 14.4, 14)),  # 3.0, 3.2, 5.9 and 6.1 h
    ("memory", lambda v: of_system(memory_used_gb=v), (95.0, 94.9, 90.1, 90.0)),
    ("run_died", lambda v: of_run(logged(3), alive=v), (False, True)),
    ("non_finite", lambda v: of_run(logged(3, last=v)), (None, 9.0)),
    # Half a nat above the median; 6 deviations of the losses are less.
    ("loss_spike", lambda v: of_run(logged(51, last=v)), (3.41, 3.39, 3.16, 3.14)),
    ("mirror_failing", lambda v: of_mirror(last_error=v), ("503", None)),
    ("mirror_behind", lambda v: of_mirror(waiting=v), (3, 2, 1)),
    ("mirror_silent", lambda v: of_mirror(heartbeat=LAST - v), (300, 299, 151, 150)),
    ("budget_80", of_money, (80.0, 79.9)),
    ("budget_95", of_money, (95.0, 94.9)),
    ("credit_short", lambda v: of_money(10.0, v), (90.0, 89.9, 85.6, 85.5)),
    ("credit_ending", of_money, (84.0, 83.9, 80.1, 80.0)),  # 2 and 2.5 h
    ("slow_rank", lambda v: of_ranks(excess_fraction=v), (0.05, 0.049, 0.026, 0.025)),
]


@pytest.mark.parametrize(("alarm", "found", "values"), LIMITS, ids=[row[0] for row in LIMITS])
def test_both_sides_of_each_limit(alarm, found, values):
    levels = [found(value)[alarm].level for value in values]
    assert levels == ["bad", *["between"] * (len(values) - 2), "good"]


def test_every_alarm_but_those_of_the_watchdog_has_its_limits_tested():
    assert {alarm for alarm, _, _ in LIMITS} == set(alarm_rules()) - {"hang", "no_step"}


def test_nothing_is_wrong_with_a_machine_and_a_run_that_go_on():
    healthy = [of_gpu(), of_system(memory_used_gb=50.0), of_ranks(excess_fraction=0.0)]
    healthy.append(of_run(logged(60, left=5.0), mirror=MIRROR, cost=COST, cost_usd=10.0))
    found = [reading for readings in healthy for reading in readings.values()]
    assert {reading.level for reading in found} == {"good"}
    assert {reading.alarm for reading in found} == set(alarm_rules()) - {"hang", "no_step"}


NOISY = [StepMetrics(n, time=BEGAN + n, loss=3.0 + (-1) ** n) for n in range(50)]
END = StepMetrics(50, time=BEGAN + 50)
EARLIER = [dataclasses.replace(step, time=(step.time or 0) - 1e6) for step in logged(30)]
ENDED = of_run(logged(30), status="finished", step=100_000, alive=False, mirror=MIRROR)
NOT_STARTED = {"status": "finished", "mirror": MIRROR, "after": 1e5}


@pytest.mark.parametrize(
    ("readings", "alarm", "level", "words"),
    [
        (of_gpu(lost=True), "gpu_lost", "bad", "node1 GPU 1 (GPU-5c0ffee0"),
        (of_gpu(lost=True, uuid=None), "gpu_lost", "bad", "unknown UUID"),
        (of_gpu(temperature_celsius=85), "gpu_temperature", "bad", "85 C; it slows down at 87 C"),
        (of_gpu(memory_temperature_celsius=95), "gpu_memory_temperature", "bad", "at 95 C."),
        (
            of_gpu(throttle_reasons=("hw_thermal",), temperature_celsius=88),
            *("gpu_throttle", "bad"),
            "node1 GPU 1 is throttled (hw thermal): 1305 of 1980 MHz, 88 C.",
        ),
        (of_gpu(ecc_uncorrected=2), "gpu_ecc", "bad", "2 uncorrected memory errors"),
        (of_gpu(remap_failed=True), "gpu_remap_failed", "bad", "no spare rows"),
        (of_gpu(remap_pending=True), "gpu_remap_pending", "bad", "row, which a reset will replace"),
        (of_gpu(nvlinks_active=17), "gpu_nvlink", "bad", "17 active NVLinks; others of its kind h"),
        (of_gpu(pcie_width=8), "gpu_pcie", "bad", "8 PCIe lanes; others of its kind have 16"),
        (of_gpu(pcie_generation=1), "gpu_pcie", "good", ""),  # an idle link saves power
        (of_gpu(power_limit_watts=500.0), "gpu_power_limit", "bad", "500 W; others of its kind 7"),
        (of_gpu(power_watts=771.0), "gpu_power", "bad", "771 W; its limit is 700 W"),
        (of_gpu(utilization_fraction=0.3), "gpu_idle", "bad", "busy 30% of the time"),
        # A GPU of another kind is no measure.
        (of_gpu(name="NVIDIA L4", pcie_width=8), "gpu_pcie", "good", ""),
        (of_gpu(name="L4", power_limit_watts=600.0), "gpu_power_limit", "good", ""),
        (of_trend(25), "disk_filling", "bad", "full in 3.0 h"),
        (of_trend(-5), "disk_filling", "good", "free on the run's disk."),
        # The watchdog alone judges hangs.
        (of_run(logged(30), after=1e4), "no_step", None, ""),
        (of_run(logged(3), alive=False), "run_died", "bad", "(step 30)"),
        (of_run(logged(3), alive=False, status="failed"), "run_died", "good", ""),
        (of_run(logged(51, last=3.5)), "loss_spike", "bad", "the median of the 50 logged before"),
        (of_run(logged(51, last=1.0)), "loss_spike", "good", ""),
        (of_run(logged(20, last=9.0)), "loss_spike", None, ""),
        (of_run(logged(21, last=9.0)), "loss_spike", "bad", "of the 20 logged before"),
        # 6 deviations are 8.9 nats.
        (
            of_run([*NOISY, StepMetrics(50, time=BEGAN + 50, loss=11.8)]),
            "loss_spike",
            "between",
            "",
        ),
        (of_run([*NOISY, StepMetrics(50, time=BEGAN + 50, loss=12.0)]), "loss_spike", "bad", ""),
        (of_run(logged(51, last=None)), "loss_spike", None, ""),
        (of_run(logged(51, last=None)), "non_finite", "bad", "not finite"),
        (of_run([dataclasses.replace(EARLIER[-1], loss=None)]), "non_finite", None, ""),
        (of_mirror(heartbeat=LAST + 150), "mirror_silent", "good", ""),  # its clock is ahead
        # One that has finished says nothing while the model is exported.
        (of_mirror(heartbeat=BEGAN - 1000, drained=True), "mirror_silent", "good", ""),
        (of_mirror(heartbeat=None), "mirror_silent", None, ""),
        (of_run(logged(10)), "mirror_behind", None, ""),
        # What was wrong with a run is over when it has ended well.
        (ENDED, "mirror_silent", "good", ""),
        # Of a new session that has written nothing yet, the mirror's words are of the one before.
        (of_run([], **NOT_STARTED), "mirror_silent", None, ""),
        (of_money(101.0, 5.0), "credit_short", "bad", "lasts for 0.0 h"),
        (of_money(100.0, 5.0), "credit_short", "bad", "lasts for 0.0 h"),
        (of_money(101.0, 5.0, total_steps=10), "credit_short", "good", ""),  # nothing is left
        (of_money(99.0, total_steps=10), "credit_ending", "good", ""),
        (of_money(80.0, 20.0), "budget_80", "bad", "$80.00, 80% of its budget ($100.00)"),
        (of_run(logged(1, left=9.0), cost_usd=99.0), "credit_ending", None, ""),  # without prices
        (of_run(logged(1), cost_usd=99.0), "budget_95", None, ""),
        (of_ranks(after=1000.0), "slow_rank", None, ""),  # of an earlier session
        (of_ranks(excess_fraction=0.04), "slow_rank", "between", "others (mostly backward)."),
    ],
)
def test_special_cases_and_what_is_said(readings, alarm, level, words):
    reading = readings.get(alarm)
    assert (None if reading is None else reading.level) == level
    assert words in (reading.text if reading else "")


def test_what_all_gpus_lack_is_how_the_machine_is_built():
    changes = {"nvlinks_active": 0, "pcie_width": 8, "power_limit_watts": 350.0}
    gpus = [gpu(index, power_watts=300.0, **changes) for index in range(4)]
    assert {reading.level for reading in gpu_readings(gpus, is_training=True)} == {"good"}


def test_only_gpus_that_should_work_are_idle():
    idle = gpu(0, utilization_fraction=0.0)
    assert by_alarm(gpu_readings([idle], is_training=True))["gpu_idle"].level == "bad"
    assert by_alarm(gpu_readings([idle], is_training=False))["gpu_idle"].level == "good"
    nobodys = dataclasses.replace(idle, local_rank=None)
    assert "gpu_idle" not in by_alarm(gpu_readings([nobodys], is_training=True))


def test_what_is_unknown_is_no_alarm_and_no_all_clear():
    for lost in (False, True):
        unknown = GpuSample(host="node1", index=0, lost=lost)
        assert set(by_alarm(gpu_readings([unknown], is_training=True))) == {"gpu_lost"}
    assert by_alarm(system_readings(SystemSample(host="node1"), [])) == {}


@pytest.mark.parametrize(
    ("disk", "hours"),
    [
        ([], None),
        (falling(100, 20), 4.0),
        (falling(100, 20, hours=1 / 3), 14 / 3),
        (falling(100, 20, hours=0.3), None),  # too short to tell a trend from a save
        (falling(100, -5), None),
        (falling(100, 0), None),
        # Only the last hour counts.
        ([(0.0, 900.0), (3500.0, 500.0), (3600.0, 100.0), (7200.0, 50.0)], 1.0),
    ],
)
def test_hours_until_a_disk_is_full(disk, hours):
    assert hours_until_full(disk) == (None if hours is None else pytest.approx(hours))


HOT = {"throttle_reasons": ("hw_thermal",), "sm_clock_mhz": 1305, "temperature_celsius": 88}


@pytest.mark.parametrize(
    ("slow", "changes", "system", "words"),
    [
        ({"phase": "data"}, HOT, {}, "look at the disk, the network and the CPU of its machine."),
        ({}, HOT, {}, "node1 GPU 1 is throttled (hw thermal): 1305 of 1980 MHz, 88 C."),
        ({}, {"sm_clock_mhz": 1809}, {}, "runs at 1809 MHz; others of its kind at 1905 MHz."),
        (
            {},
            {"sm_clock_mhz": 1810},  # 95 % of the others' is usual
            {"cpu_fraction": 0.9},
            "The CPU of node1 is busy: 90%, load 0.",
        ),
        ({}, {}, {"load_1m": 65.0, "cpu_cores": 64}, "The CPU of node1 is busy: 12%, load 65."),
        (
            {},
            {},
            {"cpu_fraction": 0.89, "load_1m": 64.0, "cpu_cores": 64},
            "The readings of its machine show no cause.",
        ),
        ({"host": "node2"}, HOT, {}, "There are no readings of its machine here."),
    ],
)
def test_the_cause_of_a_slow_rank(slow, changes, system, words):
    gpus = [dataclasses.replace(GPU, index=index, local_rank=index) for index in range(4)]
    gpus[1] = dataclasses.replace(gpus[1], **changes)
    reading = of_ranks(gpus, system, **slow)["slow_rank"]
    place = "rank 9 on " + slow.get("host", "node1")
    assert reading.text.startswith(f"In each step {place} takes 12% longer than the others (mostly")
    assert (reading.level, reading.text.endswith(words)) == ("bad", True)


VALUES: dict[str, float] = {"good": 0, "between": 0.5, "bad": 1}


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
def test_when_an_alarm_begins_and_ends(monkeypatch, levels, delays, expected):
    monkeypatch.setitem(alarm_rules(), "heat", Rule(**delays))  # type: ignore[arg-type]
    standings: dict[Key, Standing] = {}
    texts = []
    for second, level in enumerate(levels.split()):
        readings = [Reading("heat", "GPU 5", VALUES[level], f"text {second}")]
        standings, events = judge(standings, readings, now=float(second), host="here")
        texts += [event.text for event in events]
    assert texts == expected


def test_subjects_are_kept_apart_and_without_a_reading_an_alarm_stays():
    bad = [Reading("gpu_lost", name, True, name) for name in ("GPU 1", "GPU 2")]
    standings, events = judge({}, bad, now=0, host="here")
    assert [(event.subject, event.raised, event.severity) for event in events] == [
        ("GPU 1", True, "critical"),
        ("GPU 2", True, "critical"),
    ]
    unknown = Reading("gpu_lost", "GPU 1", None, "")
    standings, events = judge(standings, [unknown], now=1, host="here")
    assert events == []
    good = Reading("gpu_lost", "GPU 2", False, "answers")
    standings, events = judge(standings, [good], now=2, host="here")
    assert [(event.subject, event.raised) for event in events] == [("GPU 2", False)]
    raised = [key for key, (is_raised, _) in standings.items() if is_raised]
    assert raised == [("gpu_lost", "GPU 1")]


def test_what_an_earlier_start_has_left_raised():
    def line(alarm, raised):
        return {"kind": "alarm", "alarm": alarm, "subject": "run", "raised": raised}

    ended = [line("a", True), line("a", False)]
    left = [line("b", True), line("c", True), line("c", False), line("c", True)]
    others = [{"kind": "save_failed", "raised": True}, {}]
    found = still_raised([*ended, *left, *others], host="node2")
    assert [(event.alarm, event.raised, event.host) for event in found] == [
        ("b", False, "node2"),
        ("c", False, "node2"),
    ]
