"""Notes, environment, signals and summary shared by ranks and launcher."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fakes import Clock

from refocused.system.errors import TrainingError
from refocused.system.processes import ProcessIdentity, this_process
from refocused.train.lifecycle.launch_session import (
    ENDING,
    STARTING,
    STOP_SIGNALS,
    Launch,
    Notices,
    Presence,
    Signals,
    launch_of,
    write_summary,
)


@pytest.fixture
def launch() -> Iterator[Launch]:
    created = Launch.create(began_seconds=12.5, grace_seconds=30.0, command="again")
    yield created
    created.end()


def test_ranks_know_their_supervisor_and_it_reads_their_last_notes(launch: Launch) -> None:
    assert launch_of(launch.environment) == launch
    assert launch.supervisor == this_process()
    assert launch_of({}) is None
    elsewhere = launch.model_copy(update={"host": "node-7"})
    assert launch_of(elsewhere.environment) is None
    Presence(launch, 1).report(exit_code=1)
    first = Presence(launch, 0)
    first.report(run="runs/a")
    first.report(training=True)
    os.write(launch.open_notes(), b'{"rank": 0, "proc')  # one that is being written
    assert [(note.rank, note.exit_code, note.run, note.training) for note in launch.notes()] == [
        (0, None, "runs/a", True),
        (1, 1, None, False),
    ]


def test_a_rank_that_cannot_report_does_not_train(launch: Launch) -> None:
    Presence(None, 0).report(exit_code=0)
    unreachable = launch.model_copy(update={"notes_file": 99_999})
    with pytest.raises(
        TrainingError, match=f"cannot report to its supervisor, process {os.getpid()}"
    ):
        Presence(unreachable, 0)
    # Without its supervisor a rank ends by itself, and nobody reads notes.
    dead = ProcessIdentity(pid=1, started=999)
    Presence(unreachable.model_copy(update={"supervisor": dead}), 0).report(exit_code=130)


class EndedError(Exception):
    """Raised instead of exiting."""


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers, and prevent an exit."""

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_recorded_and_answered_on_the_terminal(
    number: int, handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    silent, signals = Signals(speaks=False), Signals(speaks=True)
    silent.receive(number)
    signals.install()
    assert (silent.asked, signals.asked) == (True, False)
    os.kill(os.getpid(), number)
    assert signals.asked
    assert capfd.readouterr().err == f"\n{STARTING.first}\n"


def test_nohup_ignores_the_end_of_the_terminal(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals(speaks=True)
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.asked


def test_a_burst_of_signals_counts_once_and_the_third_ends_the_process(
    handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    signals = Signals(speaks=True, clock=clock)
    signals.notices = Notices("first")
    for _ in range(30):  # over 30 s, as the launcher and the terminal may repeat them
        signals.receive(signal.SIGTERM)
        clock.now += 1.0
    signals.notices = ENDING  # the message depends on the phase
    clock.now += 5.0
    signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == f"\nfirst\n\n{ENDING.again}\n"
    assert "lost" not in ENDING.again and "sav" not in ENDING.first
    clock.now += 5.0
    with pytest.raises(EndedError, match="1"):
        signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == f"\n{ENDING.at_once}\n"


def test_a_closed_terminal_does_not_prevent_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(descriptor: int, content: bytes) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    signals = Signals(speaks=True)
    signals.receive(signal.SIGHUP)
    assert signals.asked


def test_a_finished_run_has_a_summary(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"run": "one", "status": "stopped"}))
    assert write_summary(tmp_path) == ""
    assert (tmp_path / "SUMMARY.md").read_text().startswith("# one: stopped\n")
    assert (tmp_path / "summary.html").is_file()
    (tmp_path / ".SUMMARY.md.part").mkdir()
    trouble = write_summary(tmp_path)
    assert "SUMMARY.md was not written" in trouble and "Is a directory" in trouble
    assert f"launch/monitor.py {tmp_path} --summary" in trouble
