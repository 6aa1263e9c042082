from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from monitor.watched_run import GPU

from refocused.config.outputs import CostConfig
from refocused.metrics.history import StepPoint
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_reader import Mirror, RunFiles
from refocused.monitor.sampler.alarm_rules import (
    DiskPoint,
    gpu_readings,
    hours_until_full,
    is_training,
    run_readings,
    system_readings,
)
from refocused.monitor.sampler.alarms import (
    RULES,
    Key,
    Level,
    Reading,
    Rule,
    Standing,
    judge,
    still_raised,
)


def by_alarm(readings: Iterable[Reading], subject: str | None = None) -> dict[str, Reading]:
    """Readings of a subject by the name of their alarm, of which each may have one."""
    found = [one for one in readings if subject in (None, one.subject) and one.level]
    named = {one.alarm: one for one in found}
    assert len(named) == len(found)
    return named


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
    monkeypatch.setitem(RULES, "heat", Rule(**delays))  # type: ignore[arg-type]
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
    monkeypatch.setitem(RULES, "heat", rule)
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


def gpu(index: int, **changes: Any) -> GpuSample:
    return dataclasses.replace(COOL, index=index, local_rank=index, **changes)


def test_nothing_is_wrong_with_a_busy_gpu() -> None:
    found = list(gpu_readings([gpu(0), gpu(1), gpu(2)], is_training=True))
    assert {reading.level for reading in found} == {"good"}
    assert len({reading.alarm for reading in found}) == 12


@pytest.mark.parametrize(
    ("changes", "alarm", "level", "words"),
    [
        ({"lost": True}, "gpu_lost", "bad", "node1 GPU 1 (GPU-5c0ffee0"),
        ({"lost": True, "uuid": None}, "gpu_lost", "bad", "of unknown UUID"),
        ({"temperature_celsius": 85}, "gpu_temperature", "bad", "85 C; it slows down at 87 C"),
        ({"temperature_celsius": 84}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 93, "slowdown_celsius": 98}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 85, "slowdown_celsius": None}, "gpu_temperature", "bad", "87 C"),
        ({"memory_temperature_celsius": 95}, "gpu_memory_temperature", "bad", "95 C"),
        (
            {"throttle_reasons": ("hw_thermal",), "temperature_celsius": 88},
            "gpu_throttle",
            "bad",
            "node1 GPU 1 hw thermal: 1305 of 1980 MHz, 88 C",
        ),
        ({"ecc_uncorrected": 2}, "gpu_ecc", "bad", "2 memory errors"),
        ({"remap_failed": True}, "gpu_remap_failed", "bad", "exchanged"),
        ({"remap_pending": True}, "gpu_remap_pending", "bad", "reset"),
        ({"nvlinks_active": 17}, "gpu_nvlink", "bad", "17 NVLinks that are up, others have 18"),
        ({"pcie_width": 8}, "gpu_pcie", "bad", "8 PCIe lanes, others have 16"),
        ({"pcie_generation": 1}, "gpu_pcie", "good", ""),  # an idle link saves power
        ({"power_limit_watts": 500.0}, "gpu_power_limit", "bad", "500 W, others of its kind 700"),
        ({"power_watts": 771.0}, "gpu_power", "bad", "771 W of 700 W"),
        ({"utilization_fraction": 0.3}, "gpu_idle", "bad", "busy 30% of the time"),
        # A GPU of another kind is no measure.
        ({"name": "NVIDIA L4", "pcie_width": 8}, "gpu_pcie", "good", ""),
        ({"name": "L4", "power_limit_watts": 600.0}, "gpu_power_limit", "good", ""),
    ],
)
def test_a_gpu_among_healthy_ones(
    changes: dict[str, Any], alarm: str, level: str, words: str
) -> None:
    found = list(gpu_readings([gpu(0), gpu(1, **changes), gpu(2)], is_training=True))
    one = by_alarm(found, "node1 GPU 1")[alarm]
    assert one.level == level
    assert words in one.text
    for other in ("node1 GPU 0", "node1 GPU 2"):
        assert by_alarm(found, other)[alarm].level == "good"


def test_what_all_gpus_lack_is_how_the_machine_is_built() -> None:
    changes = {"nvlinks_active": 0, "pcie_width": 8, "power_limit_watts": 350.0}
    gpus = [gpu(index, power_watts=300.0, **changes) for index in range(4)]
    assert {one.level for one in gpu_readings(gpus, is_training=True)} == {"good"}


def test_only_gpus_that_should_work_are_idle() -> None:
    idle = gpu(0, utilization_fraction=0.0)
    assert by_alarm(gpu_readings([idle], is_training=True))["gpu_idle"].level == "bad"
    assert by_alarm(gpu_readings([idle], is_training=False))["gpu_idle"].level == "good"
    nobodys = dataclasses.replace(idle, local_rank=None)
    assert "gpu_idle" not in by_alarm(gpu_readings([nobodys], is_training=True))


def test_what_is_unknown_is_no_alarm_and_no_all_clear() -> None:
    for lost in (False, True):
        unknown = GpuSample(host="node1", index=0, lost=lost)
        assert set(by_alarm(gpu_readings([unknown], is_training=True))) == {"gpu_lost"}
    assert by_alarm(system_readings(SystemSample(host="node1"), [])) == {}


def falling(start_gib: float, gib_per_hour: float, *, hours: float) -> list[DiskPoint]:
    """A disk that fills evenly, seen once a minute."""
    minutes = range(round(60 * hours) + 1)
    return [(60.0 * m, start_gib - gib_per_hour * m / 60) for m in minutes]


@pytest.mark.parametrize(
    ("disk", "hours"),
    [
        ([], None),
        (falling(100, 20, hours=1), 4.0),
        (falling(100, 20, hours=0.3), None),  # too short to tell a trend from a save
        (falling(100, -5, hours=1), None),
        ([(0.0, 900.0), (3600.0, 100.0), (7200.0, 50.0)], 1.0),  # only the last hour counts
    ],
)
def test_hours_until_a_disk_is_full(disk: list[DiskPoint], hours: float | None) -> None:
    assert hours_until_full(disk) == (None if hours is None else pytest.approx(hours))


@pytest.mark.parametrize(
    ("alarm", "free", "total", "level"),
    [
        ("disk_full", 4.9, 100, "bad"),
        ("disk_full", 8.0, 100, "between"),
        ("disk_full", 19.0, 1000, "bad"),
        ("memory", 5.0, 100.0, "bad"),
        ("memory", 8.0, 100.0, "between"),
    ],
)
def test_disk_and_memory(alarm: str, free: float, total: float, level: str) -> None:
    used = {"memory_used_gib": total - free, "memory_total_gib": total}
    system = SystemSample("node1", disk_free_gib=free, disk_total_gib=total, **used)
    found = by_alarm(system_readings(system, []))
    assert (found[alarm].level, found["disk_filling"].level) == (level, "good")
    filling = by_alarm(system_readings(system, falling(100, 30, hours=1)))["disk_filling"]
    assert (filling.level, "full in 2.3 h" in filling.text) == ("bad", True)


BEGAN = 1_000_000.0
MIRROR = Mirror("gs://b", None, 0, None, 0, None, heartbeat=BEGAN + 600, drained=False)
FINISHED = {"status": "finished", "step": 100_000, "alive": False}


def logged(
    count: int, *, gap: float = 10.0, last: float | None = 2.9, left: float | None = None
) -> list[StepPoint]:
    """Steps that were logged evenly; their losses waver by 0.05 around 2.9."""
    steps = [
        StepPoint(10 * n, BEGAN + gap * n, 2.9 + 0.05 * (-1) ** n) for n in range(1, count + 1)
    ]
    return [*steps[:-1], dataclasses.replace(steps[-1], loss=last, cost_left_usd=left)]


def readings(
    steps: Sequence[StepPoint],
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
    run = RunFiles("one", state=known, steps=steps, mirror=mirror)
    return by_alarm(run_readings(run, cost or CostConfig(), began=BEGAN, alive=alive, now=now))


def test_nothing_is_wrong_with_a_run_that_goes_on() -> None:
    cost = CostConfig(per_hour_usd=8.0, budget_usd=50.0, credit_usd=50.0)
    found = readings(logged(60, left=5.0), mirror=MIRROR, cost=cost, cost_usd=10.0)
    assert {reading.level for reading in found.values()} == {"good"}
    assert len(found) == 11


NOISY = [StepPoint(n, BEGAN + n, 3.0 + (-1) ** n) for n in range(50)]
EARLIER = [dataclasses.replace(one, time=(one.time or 0) - 1e6) for one in logged(30)]


@pytest.mark.parametrize(
    ("steps", "facts", "alarm", "level", "words"),
    [
        (logged(30, gap=60), {"after": 299}, "no_step", "good", ""),
        (logged(30, gap=60), {"after": 301}, "no_step", "bad", "step 300 was logged 5.0 min ago"),
        # A run that need not step.
        (logged(30), {"after": 1e5, "status": "finished"}, "no_step", "good", ""),
        (logged(30), {"after": 1e5, "step": 100_000}, "no_step", "good", "ago."),
        (EARLIER, {"after": 1e6}, "no_step", "good", ""),  # of an earlier session
        # A run that was killed has not taken its next step either.
        (logged(3), {"alive": False}, "run_died", "bad", "at step 30"),
        (logged(3), {"alive": False}, "no_step", None, ""),
        (logged(3), {"alive": False, "status": "failed"}, "run_died", "good", ""),
        (
            logged(51, last=3.5),
            {},
            "loss_spike",
            "bad",
            "3.5000, the median of the 50 logged before",
        ),
        (logged(51, last=3.25), {}, "loss_spike", "between", ""),
        (logged(51, last=1.0), {}, "loss_spike", "good", ""),
        (logged(10, last=9.0), {}, "loss_spike", None, ""),  # too few to compare with
        ([*NOISY, StepPoint(50, BEGAN + 50, 5.0)], {}, "loss_spike", "good", ""),
        (logged(51, last=None), {}, "loss_spike", None, ""),
        (logged(51, last=None), {}, "non_finite", "bad", "not finite"),
        # What was wrong with a run is over when it has ended well.
        (logged(30), FINISHED | {"mirror": MIRROR}, "mirror_silent", "good", ""),
        # Of a new session that has written nothing yet, the mirror's words are of the one before.
        ([], {"status": "finished", "mirror": MIRROR, "after": 1e5}, "mirror_silent", None, ""),
    ],
)
def test_a_run(
    steps: list[StepPoint], facts: dict[str, Any], alarm: str, level: str | None, words: str
) -> None:
    found = readings(steps, **facts).get(alarm)
    assert (None if found is None else found.level) == level
    assert words in (found.text if found else "")
    assert ("A rank may hang" in (found.text if found else "")) == (
        (alarm, level) == ("no_step", "bad")
    )


@pytest.mark.parametrize(
    ("steps", "alive", "state", "expected"),
    [
        (logged(3), True, {}, True),
        (logged(3), False, {}, False),
        (logged(3), True, {"status": "finished"}, False),
        (logged(3), True, {"step": 9}, False),  # the last one
        (EARLIER, True, {}, False),
    ],
)
def test_whether_a_run_takes_steps(
    steps: list[StepPoint], alive: bool, state: dict[str, Any], expected: bool
) -> None:
    known = {"status": "training", "step": 3, "total_steps": 9, **state}
    run = RunFiles("one", state=known, steps=steps)
    assert is_training(run, began=BEGAN, alive=alive) == expected
    assert not is_training(RunFiles("one"), began=BEGAN, alive=True)


@pytest.mark.parametrize(
    ("changes", "alarm", "level"),
    [
        ({"waiting": 3}, "mirror_behind", "bad"),
        ({"last_error": "503"}, "mirror_failing", "bad"),
        ({"heartbeat": BEGAN - 1000}, "mirror_silent", "bad"),
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
        (81.0, 30.0, ("bad", "good", "bad", "between")),
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
