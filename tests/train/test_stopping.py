from __future__ import annotations

import signal
from pathlib import Path

from thread_ranks import on_two_ranks, results

from refocused.system.errors import ExitCode, StoppedEarlyError
from refocused.system.world import World
from refocused.train.lifecycle.launch_session import Signals
from refocused.train.step.stopping import StopReason, StopRequest


class Family:
    """Ancestors that a test lets go."""

    gone = False


def request(
    tmp_path: Path,
    world: World | None = None,
    signals: Signals | None = None,
    family: Family | None = None,
) -> StopRequest:
    return StopRequest(
        world or World(),
        stop_file=tmp_path / "STOP",
        signalled=lambda: signals is not None and signals.asked,
        orphaned=lambda: family is not None and family.gone,
    )


def test_without_a_reason_training_goes_on(tmp_path: Path) -> None:
    stop = request(tmp_path)
    assert stop.agreed() is StopReason.NONE
    assert not stop.agreed()
    stop.leave_if_asked()


def test_a_signal_asks_to_stop(tmp_path: Path) -> None:
    signals = Signals(speaks=False)
    stop = request(tmp_path, signals=signals)
    assert stop.agreed() is StopReason.NONE
    signals.receive(signal.SIGTERM)
    assert stop.agreed() is StopReason.SIGNAL
    assert stop.agreed() is StopReason.SIGNAL


def test_a_stop_file_is_enough(tmp_path: Path) -> None:
    stop = request(tmp_path)
    (tmp_path / "STOP").touch()
    assert stop.agreed() is StopReason.STOP_FILE


def test_the_launchers_end_is_noticed(tmp_path: Path) -> None:
    family = Family()
    stop = request(tmp_path, family=family)
    assert stop.agreed() is StopReason.NONE
    family.gone = True
    assert stop.agreed() is StopReason.PARENT_GONE


def test_a_limit_is_obeyed_and_a_person_counts_more(tmp_path: Path) -> None:
    signals = Signals(speaks=False)
    stop = request(tmp_path, signals=signals)
    given = [StopReason.NONE]
    stop.limits.append(lambda: StopReason.NONE)
    stop.limits.append(lambda: given[0])
    assert stop.agreed() is StopReason.NONE
    given[0] = StopReason.BUDGET
    assert stop.agreed() is StopReason.BUDGET
    given[0] = StopReason.NONE
    assert stop.agreed() is StopReason.BUDGET  # what was said stands
    signals.receive(signal.SIGTERM)
    assert stop.agreed() is StopReason.SIGNAL


def test_limits_are_asked_on_rank_0_alone(tmp_path: Path) -> None:
    asked = []

    def action(world: World) -> StopReason:
        stop = request(tmp_path, world)
        stop.limits.append(lambda: asked.append(world.rank) or StopReason.TIME_LIMIT)  # type: ignore[func-returns-value]
        return stop.agreed()

    assert results(on_two_ranks(action)) == [StopReason.TIME_LIMIT] * 2
    assert asked == [0]


def test_two_ranks_agree_on_the_largest_reason(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()

    def action(world: World) -> list[StopReason]:
        signals = Signals(speaks=False)
        stop = request(tmp_path, world, signals)
        before = stop.agreed()  # rank 0 sees the file, rank 1 does not look
        if world.rank == 1:
            signals.receive(signal.SIGTERM)
        return [before, stop.agreed()]

    expected = [StopReason.STOP_FILE, StopReason.SIGNAL]
    assert results(on_two_ranks(action)) == [expected, expected]


def test_a_file_that_only_another_rank_sees_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "STOP").touch()

    def action(world: World) -> StopReason:
        return request(tmp_path / str(world.rank), world).agreed()

    assert results(on_two_ranks(action)) == [StopReason.NONE, StopReason.NONE]


def test_before_training_both_ranks_leave_when_one_was_asked(tmp_path: Path) -> None:
    def action(world: World) -> None:
        signals = Signals(speaks=False)
        if world.rank == 1:
            signals.receive(signal.SIGTERM)
        request(tmp_path, world, signals).leave_if_asked()

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, StoppedEarlyError)
        assert ended.error.on_every_rank
        assert ended.error.exit_code is ExitCode.INTERRUPTED
        assert str(ended.error).startswith("Stopped by a signal before training began")


def test_every_reason_has_a_text_and_a_code() -> None:
    limits = {StopReason.TIME_LIMIT, StopReason.BUDGET}
    for reason in StopReason:
        assert bool(reason.text) is bool(reason)
        code = ExitCode.LIMIT_REACHED if reason in limits else ExitCode.INTERRUPTED
        assert reason.exit_code == (code if reason else ExitCode.OK)
