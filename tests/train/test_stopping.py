"""Reasons to stop: precedence, agreement of the ranks, limits of time and money."""

import dataclasses
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from run_fakes import config_of
from thread_ranks import on_two_ranks, results

from refocused.system.errors import ExitCode
from refocused.system.world import World
from refocused.train.lifecycle.launch_session import Signals
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason, StopRequest

NONE = StopReason.NONE


def request(
    folder: Path,
    world: World | None = None,
    signals: Signals | None = None,
    gone: list[bool] | None = None,
    **limits: Any,
) -> StopRequest:
    """A request of a session that began at second 100."""
    return StopRequest(
        world or World(),
        began_seconds=100.0,
        stop_file=folder / "STOP",
        signalled=lambda: signals is not None and signals.asked,
        orphaned=lambda: bool(gone),
        **{"config": config_of(), **limits},
    )


@dataclasses.dataclass
class Spending:
    """A reporter that knows the cost, and records the warnings."""

    usd: float
    said: list[str] = dataclasses.field(default_factory=list)

    def booked(self, state: TrainState) -> TrainState:
        return dataclasses.replace(state, cost_usd=self.usd)

    def event(self, kind: str, text: str) -> None:
        assert kind == "budget_warning"
        self.said.append(text)


def budget(usd: float | None, **run: Any) -> Any:
    return config_of(cost={"budget_usd": usd}, run=run)


def test_each_stop_reason_is_reported(tmp_path: Path) -> None:
    gone: list[bool] = []
    stop = request(tmp_path, gone=gone)
    assert not stop.agreed()
    stop.leave_if_asked()
    (tmp_path / "STOP").touch()
    assert stop.agreed() is StopReason.STOP_FILE
    assert stop.agreed().exit_code == ExitCode.INTERRUPTED
    (tmp_path / "STOP").unlink()
    stop = request(tmp_path, gone=gone)
    assert stop.agreed() is NONE
    gone.append(True)
    assert stop.agreed() is StopReason.PARENT_GONE


def test_a_signal_takes_precedence_over_a_limit(tmp_path: Path) -> None:
    signals, now, spending = Signals(speaks=False), 0.0, cast("Any", Spending(0.0))
    limits = {"config": budget(9.0, time_limit_hours=0.5), "clock": lambda: now}

    def begun() -> StopRequest:
        return request(tmp_path, signals=signals, reporter=spending, **limits)

    stop = begun()
    for seconds, reason in ((1899.0, NONE), (1900.0, StopReason.TIME_LIMIT)):
        now = seconds
        assert stop.agreed() is reason
    assert request(tmp_path, **limits).agreed() is NONE  # before training
    spending.usd, stop = 9.0, begun()
    assert stop.agreed() is StopReason.BUDGET
    assert stop.agreed().exit_code == ExitCode.LIMIT_REACHED
    now = spending.usd = 0.0
    assert stop.agreed() is StopReason.BUDGET  # what was said stands
    signals.receive(signal.SIGTERM)
    assert [stop.agreed(), stop.agreed()] == [StopReason.SIGNAL] * 2


def test_two_ranks_agree_on_the_largest_reason(tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    (tmp_path / "1" / "STOP").touch()

    def action(world: World) -> list[StopReason]:
        signals = Signals(speaks=False)
        # Rank 0 looks for the file and at the limits, rank 1 does not.
        spending = cast("Any", Spending(9.0 * world.rank))
        folder = tmp_path / str(world.rank)
        stop = request(folder, world, config=budget(9.0), reporter=spending)
        assert stop.agreed() is NONE
        stop = request(tmp_path / "1", world, signals)
        before = stop.agreed()
        if world.rank == 1:
            signals.receive(signal.SIGTERM)
        return [before, stop.agreed()]

    expected = [StopReason.STOP_FILE, StopReason.SIGNAL]
    assert results(on_two_ranks(action)) == [expected, expected]


def test_a_notice_to_any_machine_stops_all_and_is_announced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def action(world: World) -> list[StopReason]:
        given: list[str | None] = [None]
        stop = request(tmp_path, world)
        stop.notice = lambda: given[0]
        before = stop.agreed()
        if world.rank == 1:
            given[0] = "GCE preempts this machine"
        return [before, stop.agreed(), stop.agreed()]

    expected = [NONE, StopReason.SPOT_NOTICE, StopReason.SPOT_NOTICE]
    assert results(on_two_ranks(action)) == [expected, expected]
    assert StopReason.SPOT_NOTICE.exit_code == ExitCode.INTERRUPTED
    (said,) = caplog.messages
    assert said.startswith("Spot notice to ")
    assert said.endswith(": GCE preempts this machine. The run saves and stops.")


def test_the_budget_warns_twice_and_then_stops(tmp_path: Path) -> None:
    def at(*dollars: float) -> tuple[list[StopReason], list[str]]:
        spending = cast("Any", Spending(0.0))
        stop = request(tmp_path, config=budget(200.0), reporter=spending)
        reasons = []
        for spending.usd in dollars:
            reasons.append(stop.agreed())
        return reasons, spending.said

    reasons, said = at(0.0, 159.0, 160.0, 170.0, 189.9)
    assert reasons == [NONE] * 5
    assert [text.partition(".00,")[0] for text in said] == ["The run has cost $160"]
    assert "$160.00, 80% of cost.budget_usd=200.00" in said[0]
    reasons, said = at(170.0, 190.0, 200.0, 201.0)
    assert reasons == [NONE, NONE, StopReason.BUDGET, StopReason.BUDGET]
    assert len(said) == 2 and "95%" in said[1]
    assert len(at(192.0, 192.0)[1]) == 1  # resumed near its end
