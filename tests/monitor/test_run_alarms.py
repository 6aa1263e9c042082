from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from refocused.monitor.run_reader import LoggedStep, MirrorSight, RunSight
from refocused.monitor.sampler.alarms import Reading
from refocused.monitor.sampler.run_alarms import Money, run_readings

BEGAN = 1_000_000.0


def logged(count: int, *, gap: float = 10.0, last_loss: float | None = 2.9) -> list[LoggedStep]:
    """Steps that were logged evenly; their losses waver by 0.05 around 2.9."""
    steps = [
        LoggedStep(10 * n, 2.9 + 0.05 * (-1) ** n, BEGAN + gap * n) for n in range(1, count + 1)
    ]
    return [*steps[:-1], dataclasses.replace(steps[-1], loss=last_loss)]


def run(steps: Sequence[LoggedStep] = (), **changes: Any) -> RunSight:
    return RunSight(
        **{
            "began": BEGAN,
            "alive": True,
            "status": "training",
            "step": steps[-1].step if steps else 0,
            "total_steps": 100_000,
            "logged": tuple(steps),
            **changes,
        }
    )


def readings(
    sight: RunSight, *, after: float = 5.0, money: Money | None = None
) -> dict[str, Reading]:
    last = sight.logged[-1].at if sight.logged else sight.began
    found = list(run_readings(sight, money or Money(), now=last + after))
    assert len({reading.alarm for reading in found}) == len(found)
    return {reading.alarm: reading for reading in found}


def test_nothing_is_wrong_with_a_run_that_goes_on() -> None:
    mirror = MirrorSight(waiting=1, last_error=None, heartbeat=BEGAN + 600)
    found = readings(
        run(logged(60), mirror=mirror, cost_usd=10.0, cost_left_usd=5.0),
        money=Money(per_hour_usd=8.0, budget_usd=50.0, credit_usd=50.0),
    )
    assert {reading.level for reading in found.values()} == {"good"}
    assert len(found) == 11


def test_a_run_that_hangs() -> None:
    sight = run(logged(30, gap=60))
    assert readings(sight, after=299)["no_step"].level == "good"
    reading = readings(sight, after=301)["no_step"]
    assert (reading.level, reading.severity) == ("bad", "critical")
    assert "step 300 was logged 5.0 min ago" in reading.text


@pytest.mark.parametrize(
    "changes", [{"status": "finished"}, {"status": "stopped"}, {"step": 100_000}, {"status": None}]
)
def test_a_run_that_need_not_step(changes: dict[str, Any]) -> None:
    assert readings(run(logged(30), **changes), after=1e5)["no_step"].level == "good"


def test_the_steps_of_earlier_sessions_are_long_ago() -> None:
    earlier = [dataclasses.replace(step, at=step.at - 1e6) for step in logged(30)]
    assert readings(run(earlier), after=1e6)["no_step"].level == "good"


def test_a_run_that_was_killed() -> None:
    assert readings(run(logged(3), alive=False))["run_died"].level == "bad"
    assert "no_step" not in readings(run(logged(3), alive=False))
    for status in ("finished", "stopped", "failed"):
        assert readings(run(logged(3), alive=False, status=status))["run_died"].level == "good"


@pytest.mark.parametrize(
    ("loss", "level"), [(3.5, "bad"), (3.25, "between"), (3.0, "good"), (1.0, "good")]
)
def test_a_loss_that_jumps(loss: float, level: str) -> None:
    reading = readings(run(logged(51, last_loss=loss)))["loss_spike"]
    assert reading.level == level
    assert f"{loss:.4f}, the median of the 50 logged before it" in reading.text


def test_losses_that_waver_much_make_no_spike() -> None:
    noisy = [LoggedStep(n, 3.0 + (-1) ** n, BEGAN + n) for n in range(50)]
    assert readings(run([*noisy, LoggedStep(50, 5.0, BEGAN + 50)]))["loss_spike"].level == "good"


def test_few_losses_are_no_measure() -> None:
    assert "loss_spike" not in readings(run(logged(10, last_loss=9.0)))


def test_a_loss_that_is_not_finite() -> None:
    found = readings(run(logged(51, last_loss=None)))
    assert (found["non_finite"].level, found["non_finite"].severity) == ("bad", "critical")
    assert "loss_spike" not in found


@pytest.mark.parametrize(
    ("changes", "alarm", "level"),
    [
        ({"waiting": 3}, "mirror_behind", "bad"),
        ({"waiting": 2}, "mirror_behind", "between"),
        ({"last_error": "503"}, "mirror_failing", "bad"),
        ({"heartbeat": BEGAN - 1000}, "mirror_silent", "bad"),
    ],
)
def test_the_mirror(changes: dict[str, Any], alarm: str, level: str) -> None:
    fine = MirrorSight(waiting=0, last_error=None, heartbeat=BEGAN + 100)
    sight = run(logged(10), mirror=dataclasses.replace(fine, **changes))
    assert readings(sight)[alarm].level == level
    assert not any(name.startswith("mirror") for name in readings(run(logged(10))))


def test_what_was_wrong_with_a_run_is_over_when_it_has_ended_well() -> None:
    mirror = MirrorSight(waiting=0, last_error=None, heartbeat=BEGAN + 300)
    ended = run(logged(30), alive=False, status="finished", step=100_000, mirror=mirror)
    for alarm in ("no_step", "mirror_behind", "mirror_failing", "mirror_silent"):
        assert readings(ended)[alarm].level == "good"
    assert "A rank may hang" not in readings(ended, after=1e5)["no_step"].text
    # of a new session that has said nothing yet, the mirror's last words are of the one before
    assert "mirror_silent" not in readings(run(status="finished", mirror=mirror), after=1e5)


def test_a_mirror_that_has_finished_says_nothing_while_the_model_is_exported() -> None:
    mirror = MirrorSight(waiting=0, last_error=None, heartbeat=BEGAN)
    exporting = run(logged(30), step=100_000, mirror=mirror)
    assert readings(exporting, after=1e4)["mirror_silent"].level == "bad"
    drained = dataclasses.replace(exporting, mirror=dataclasses.replace(mirror, drained=True))
    assert readings(drained, after=1e4)["mirror_silent"].level == "good"


@pytest.mark.parametrize(
    ("cost", "levels"), [(79.0, ("good", "good")), (80.0, ("bad", "good")), (96.0, ("bad", "bad"))]
)
def test_the_budget(cost: float, levels: tuple[str, str]) -> None:
    found = readings(run(cost_usd=cost), money=Money(budget_usd=100.0))
    assert (found["budget_80"].level, found["budget_95"].level) == levels


@pytest.mark.parametrize(
    ("cost", "left", "short", "ending"),
    [
        (10.0, 85.0, "good", "good"),
        (10.0, 88.0, "between", "good"),
        (10.0, 90.0, "bad", "good"),
        (81.0, 30.0, "bad", "between"),
        (85.0, 10.0, "good", "bad"),
        (101.0, 5.0, "bad", "bad"),
    ],
)
def test_the_credit(cost: float, left: float, short: str, ending: str) -> None:
    money = Money(per_hour_usd=8.0, credit_usd=100.0)
    found = readings(run(cost_usd=cost, cost_left_usd=left), money=money)
    assert (found["credit_short"].level, found["credit_ending"].level) == (short, ending)


def test_without_prices_nothing_is_said_of_money() -> None:
    found = readings(run(cost_usd=10.0, cost_left_usd=5.0))
    assert not any(name.startswith(("budget", "credit")) for name in found)
