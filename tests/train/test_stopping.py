"""Reasons to stop: precedence, agreement of the ranks, limits of time and money."""

import signal
from pathlib import Path

import pytest
from thread_ranks import on_two_ranks, results

from refocused.system.errors import ExitCode
from refocused.system.world import World
from refocused.train.lifecycle.launch_session import Signals
from refocused.train.step.stopping import StopReason, StopRequest, budget_limit, time_limit

NONE = StopReason.NONE


def request(
    folder: Path,
    world: World | None = None,
    signals: Signals | None = None,
    gone: list[bool] | None = None,
) -> StopRequest:
    return StopRequest(
        world or World(),
        stop_file=folder / "STOP",
        signalled=lambda: signals is not None and signals.asked,
        orphaned=lambda: bool(gone),
    )


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
    signals, given = Signals(speaks=False), [NONE]
    stop = request(tmp_path, signals=signals)
    now = 1899.0
    half_an_hour = time_limit(0.5, began_seconds=100.0, clock=lambda: now)
    stop.limits += [half_an_hour, lambda: given[0]]
    assert stop.agreed() is NONE
    now = 1900.0
    assert half_an_hour() is StopReason.TIME_LIMIT
    now = 0.0
    given[0] = StopReason.BUDGET
    assert stop.agreed() is StopReason.BUDGET
    assert stop.agreed().exit_code == ExitCode.LIMIT_REACHED
    given[0] = NONE
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
        stop = request(tmp_path / str(world.rank), world)
        stop.limits.append(lambda: StopReason.BUDGET if world.rank == 1 else NONE)
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


def test_the_budget_warns_twice_and_then_stops() -> None:
    spent, said = [0.0], list[str]()
    budget = budget_limit(200.0, spent_usd=lambda: spent[0], warn=said.append)
    for dollars in (0.0, 159.0, 160.0, 170.0, 189.9):
        spent[0] = dollars
        assert budget() is NONE
    assert [text.partition(".00,")[0] for text in said] == ["The run has cost $160"]
    assert "$160.00, 80% of cost.budget_usd=200.00" in said[0]
    spent[0] = 190.0
    assert budget() is NONE
    assert len(said) == 2 and "95%" in said[1]
    for dollars in (200.0, 201.0):
        spent[0] = dollars
        assert budget() is StopReason.BUDGET
    assert len(said) == 2
    resumed = budget_limit(200.0, spent_usd=lambda: 192.0, warn=said.append)  # near its end
    assert [resumed(), resumed()] == [NONE] * 2
    assert len(said) == 3
