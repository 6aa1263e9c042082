from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from refocused.train.lifecycle import launch_session as signals_module
from refocused.train.lifecycle.launch_session import (
    ENDING,
    STARTING,
    STOP_SIGNALS,
    Notices,
    Signals,
)


class Clock:
    """Seconds that a test sets."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


class EndedError(Exception):
    """Instead of the end of the process."""


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the process's own signal handlers back, and let nothing end it."""

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(signals_module.os, "_exit", end)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_answered(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    signals = Signals(speaks=True)
    signals.install()
    assert not signals.asked
    os.kill(os.getpid(), number)
    assert signals.asked
    assert capfd.readouterr().err == f"\n{STARTING.first}\n"


def test_only_a_speaker_answers(capfd: pytest.CaptureFixture[str]) -> None:
    signals = Signals(speaks=False)
    signals.receive(signal.SIGTERM)
    assert signals.asked
    assert capfd.readouterr().err == ""


def test_nohup_keeps_the_end_of_the_terminal_away() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals(speaks=True)
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.asked


def test_signals_in_a_burst_are_one_and_the_third_ends_the_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    signals = Signals(speaks=True, clock=clock)
    signals.notices = Notices("first", "again", "at once")
    for _ in range(30):  # over 30 s, as the launcher and the terminal may repeat them
        signals.receive(signal.SIGTERM)
        clock.now += 1.0
    clock.now += 5.0
    signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == "\nfirst\n\nagain\n"
    clock.now += 5.0
    with pytest.raises(EndedError, match="1"):
        signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == "\nat once\n"


def test_what_is_said_fits_what_is_done_when_the_signal_comes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    signals = Signals(speaks=True, clock=clock)
    signals.notices = Notices("stopping after this step and saving")
    signals.receive(signal.SIGTERM)
    signals.notices = ENDING
    clock.now += 5.0
    signals.receive(signal.SIGTERM)
    said = capfd.readouterr().err
    assert said == f"\nstopping after this step and saving\n\n{ENDING.again}\n"
    assert "lost" not in ENDING.again and "sav" not in ENDING.first


def test_a_terminal_that_is_gone_does_not_stop_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(descriptor: int, content: bytes) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(signals_module.os, "write", gone)
    signals = Signals(speaks=True)
    signals.receive(signal.SIGHUP)
    assert signals.asked
