from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_ranks import on_two_ranks, results

from refocused.errors import ExitCode
from refocused.training import stopping
from refocused.training.stopping import StopReason, StopRequest
from refocused.world import World

NOTICE = "^C stopping after this step"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the process's own signal handlers back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def request(tmp_path: Path, world: World | None = None) -> StopRequest:
    return StopRequest(world or World(), stop_file=tmp_path / "STOP", interruption_notice=NOTICE)


def test_without_a_reason_training_goes_on(tmp_path: Path) -> None:
    stop = request(tmp_path)
    assert stop.agreed() is StopReason.NONE
    assert not stop.agreed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_to_stop_and_says_so_once(
    tmp_path: Path, handlers: None, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = request(tmp_path)
    stop.install()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert stop.agreed() is StopReason.SIGNAL
    assert stop.agreed() is StopReason.SIGNAL
    assert capfd.readouterr().err.count(NOTICE) == 1


def test_only_the_first_rank_speaks_at_a_signal(
    tmp_path: Path, handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = request(tmp_path, World(rank=1, world_size=2))
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_a_stop_file_is_enough(tmp_path: Path) -> None:
    stop = request(tmp_path)
    (tmp_path / "STOP").touch()
    assert stop.agreed() is StopReason.STOP_FILE


def test_the_launchers_end_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = (41, 40)
    monkeypatch.setattr(stopping, "_launcher_chain", lambda: chain)
    stop = request(tmp_path)
    assert stop.agreed() is StopReason.NONE
    chain = (41, 1)  # the command behind the launcher was killed: init adopted the launcher
    assert stop.agreed() is StopReason.PARENT_GONE


def test_without_a_launcher_a_parents_end_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert stopping._launcher_chain() == ()


def test_two_ranks_agree_on_the_largest_reason(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()

    def action(world: World) -> list[StopReason]:
        stop = request(tmp_path, world)
        before = stop.agreed()  # rank 0 sees the file, rank 1 does not look
        if world.rank == 1:
            stop._on_signal(signal.SIGTERM, None)
        return [before, stop.agreed()]

    expected = [StopReason.STOP_FILE, StopReason.SIGNAL]
    assert results(on_two_ranks(action)) == [expected, expected]


def test_a_file_that_only_another_rank_sees_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "STOP").touch()

    def action(world: World) -> StopReason:
        return request(tmp_path / str(world.rank), world).agreed()

    assert results(on_two_ranks(action)) == [StopReason.NONE, StopReason.NONE]


def test_every_reason_has_a_text_and_the_code_of_an_interruption() -> None:
    for reason in StopReason:
        assert bool(reason.text) is bool(reason)
        assert reason.exit_code == (ExitCode.INTERRUPTED if reason else ExitCode.OK)
