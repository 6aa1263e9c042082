"""The supervisor: one launch of `deepspeed`, from its start until nothing of it is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from refocused.commands.supervision import Sight, Verdict, alarm_line, judge, patience_ends
from refocused.metrics.jsonl import JsonLinesTail
from refocused.train.lifecycle.launch_session import Launch, RankNote, marked_processes

POLL_SECONDS = 0.25
RUNNER_SECONDS = 5.0  # that `deepspeed` takes to end its launchers on other machines
BURST_SECONDS = 0.3  # a closing terminal and its service send two signals at once: they are one


class StopSignals:
    """When somebody asked the supervisor to stop, over all its launches."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Note nothing before `install`."""
        self.times: tuple[float, ...] = ()
        self.last_number: int = signal.SIGTERM
        self._clock = clock

    def install(self) -> None:
        """Take over the signals, but those that a background job or `nohup` keeps away."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal."""
        now = self._clock()
        if not self.times or now - self.times[-1] >= BURST_SECONDS:
            self.times, self.last_number = (*self.times, now), number


class Supervisor:
    """Starts `deepspeed`, hands signals to all ranks at once, and ends what does not end.

    DeepSpeed's launcher hands a signal to one rank after another, 30 s each; its command dies of
    one and leaves the ranks to themselves. So both run in a session of their own, where no
    terminal reaches them, and the ranks are told by us.
    """

    def __init__(
        self,
        launch: Launch,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        signals: StopSignals,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing runs before `run`.

        Args:
            launch: Where the ranks will meet us.
            command: That starts DeepSpeed's launcher.
            environment: Of that command.
            signals: Installed.
            say: Tells a person.
            clock: Monotonic seconds.
        """
        self._launch = launch
        self._command = command
        self._environment = {**environment, **launch.environment}
        self._signals = signals
        self._say = say
        self._clock = clock
        self._sight = Sight()
        self._told: dict[int, int] = {}  # signals that each rank was handed
        self._killed = False
        self._events: JsonLinesTail | None = None

    def run(self) -> Verdict:
        """Start the launch and see it through to its end."""
        with subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, start_new_session=True
        ) as runner:
            while not self._over(runner):
                notes = self._launch.notes()
                self._look(runner, notes)
                self._hand_on_signals(runner, notes)
                self._tell_alarms(notes)
                ends = patience_ends(self._sight, grace_seconds=self._launch.grace_seconds)
                if ends is not None and self._clock() >= ends:
                    self._kill(notes)
                time.sleep(POLL_SECONDS)
        return judge(
            self._launch.notes(),
            launcher_code=runner.returncode,
            signals=len(self._signals.times),
            killed=self._killed,
        )

    def _tell_alarms(self, notes: Sequence[RankNote]) -> None:
        """Show a person the alarms of this launch that begin; that they end is in the log."""
        run = notes[0].run if notes else None
        if run is None:
            return
        if self._events is None:  # what earlier launches wrote is passed over
            self._events = JsonLinesTail(Path(run) / "logs" / "events.jsonl")
            self._events.records()
        for record in self._events.records():
            if (line := alarm_line(record)) is not None:
                self._say(line)

    def _over(self, runner: subprocess.Popen[bytes]) -> bool:
        """Whether nothing of the launch is left; what ranks left behind is ended first."""
        if runner.poll() is None:
            return False
        left = [process.pid for process in marked_processes(self._launch.folder)]
        launching = any(b"deepspeed.launcher" in _command_line(pid) for pid in left)
        if not launching and not any(note.alive for note in self._launch.notes()):
            _kill_all(left)
        return not left

    def _look(self, runner: subprocess.Popen[bytes], notes: Sequence[RankNote]) -> None:
        """Note what ended, and when."""
        now, sight = self._clock(), self._sight
        if len(self._signals.times) != len(sight.signals):
            sight = dataclasses.replace(sight, signals=self._signals.times)
        if runner.poll() is not None and sight.abandoned is None:
            sight = dataclasses.replace(sight, abandoned=now)
        if sight.rank_ended is None and any(not note.alive for note in notes):
            sight = dataclasses.replace(sight, rank_ended=now)
        self._sight = sight

    def _hand_on_signals(self, runner: subprocess.Popen[bytes], notes: Sequence[RankNote]) -> None:
        """Tell every rank that somebody wants to stop, each signal once."""
        wanted, number = len(self._sight.signals), self._signals.last_number
        if self._sight.abandoned is not None and not wanted:
            wanted, number = 1, signal.SIGTERM
        if wanted and not any(note.run for note in notes):
            self._abandon(runner)  # no rank has opened anything: there is nothing to wait for
            return
        for note in notes:
            if note.exit_code is None and note.alive and self._told.get(note.rank, 0) < wanted:
                self._told[note.rank] = wanted
                _send(note.process.pid, number)

    def _abandon(self, runner: subprocess.Popen[bytes]) -> None:
        """End a launch that has not begun.

        The command goes first: over several machines it ends the launchers there.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            runner.terminate()
            runner.wait(RUNNER_SECONDS)
        _kill_all([process.pid for process in marked_processes(self._launch.folder)])

    def _kill(self, notes: Sequence[RankNote]) -> None:
        if not self._killed:
            alive = ", ".join(str(note.rank) for note in notes if note.alive)
            self._say(
                f"Patience has ended: killing what is left{f' (ranks {alive})' * bool(alive)}."
            )
        self._killed = True
        _kill_all([process.pid for process in marked_processes(self._launch.folder)])


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
