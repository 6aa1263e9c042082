"""Supervise one launch of `deepspeed` until all of its processes have ended."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from refocused.metrics.jsonl import JsonLinesTail
from refocused.monitor.readings import AlarmEvent
from refocused.system.errors import ExitCode
from refocused.system.logs import print_message
from refocused.train.lifecycle.launch_session import Launch, RankNote

POLL_SECONDS = 0.25
RUNNER_SECONDS = 5.0  # for `deepspeed` to end its launchers on other machines
BURST_SECONDS = 0.3  # a closing terminal sends two signals at once: they count as one
HURRIED_SECONDS = 30.0  # grace period after the second signal
LAST_RANKS_SECONDS = 30.0  # for the other ranks once one has ended; they rarely need more than 2


class StopSignals:
    """The times of the signals to stop, over all launches."""

    def __init__(self) -> None:
        self.times: tuple[float, ...] = ()
        self.last_number: int = signal.SIGTERM

    def install(self) -> None:
        """Handle the signals that are not ignored already, as under `nohup`."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal."""
        now = time.monotonic()
        if not self.times or now - self.times[-1] >= BURST_SECONDS:
            self.times, self.last_number = (*self.times, now), number


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a launch ended: the run's exit code, and what the ranks could not print themselves.

    `crashed`: no stop was requested, so a restart may help.
    """

    code: ExitCode
    text: str = ""
    crashed: bool = False
    ended_seconds: float | None = None  # monotonic time when the first rank had ended


@dataclasses.dataclass
class Supervisor:
    """Starts `deepspeed`, forwards signals to all ranks at once, and kills what does not end.

    DeepSpeed's launcher signals one rank after another, 30 s each; its runner dies of a signal and
    leaves the ranks running. So both run in a session of their own, which gets no signals from the
    terminal, and the supervisor signals the ranks itself.
    """

    launch: Launch
    command: Sequence[str]
    environment: Mapping[str, str]
    signals: StopSignals
    should_stop: Callable[[], bool]  # whether a STOP file asks for it, which ranks see once open

    _sent: dict[int, int] = dataclasses.field(default_factory=dict)  # rank -> number of signals
    _abandoned: float | None = None  # monotonic time when the runner had ended
    _rank_ended: float | None = None  # the same, of the first rank
    _killed: bool = False
    _events: JsonLinesTail | None = None
    _hang: str | None = None  # why the watchdog has stopped the run

    def run(self) -> Verdict:
        """Start the launch and wait until all of its processes have ended."""
        with subprocess.Popen(
            self.command,
            env={**self.environment, **self.launch.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as runner:
            while not self._over(runner):
                notes, now = self.launch.notes(), time.monotonic()
                if self._abandoned is None and runner.poll() is not None:
                    self._abandoned = now
                if self._rank_ended is None and any(not note.alive for note in notes):
                    self._rank_ended = now
                is_open = any(note.run for note in notes)
                if not is_open and not self.signals.times and self.should_stop():
                    self.signals.receive(signal.SIGTERM)
                self._send_signals(runner, notes)
                self._print_alarms(notes)
                ends = deadline(
                    self.signals.times,
                    grace_seconds=self.launch.grace_seconds,
                    abandoned=self._abandoned,
                    rank_ended=self._rank_ended,
                )
                if now >= ends:
                    if not self._killed:
                        alive = ", ".join(str(note.rank) for note in notes if note.alive)
                        ranks = f" (ranks {alive})" if alive else ""
                        text = f"Grace period expired; killing the remaining processes{ranks}."
                        print_message("warning", text)
                    self._killed = True
                    self._kill_marked()
                time.sleep(POLL_SECONDS)
        verdict = judge(
            self.launch.notes(),
            launcher_code=runner.returncode,
            signals=len(self.signals.times),
            killed=self._killed,
            hang=self._hang,
        )
        return dataclasses.replace(verdict, ended_seconds=self._rank_ended)

    def _over(self, runner: subprocess.Popen[bytes]) -> bool:
        """Return whether the launch has ended; kill what its ranks left behind."""
        if runner.poll() is None:
            return False
        left = self.launch.marked_processes()
        launching = False
        for process in left:
            with contextlib.suppress(OSError):
                launching |= (
                    b"deepspeed.launcher" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
                )
        if not launching and not any(note.alive for note in self.launch.notes()):
            self._kill_marked()
        return not left

    def _send_signals(self, runner: subprocess.Popen[bytes], notes: Sequence[RankNote]) -> None:
        """Send each rank every signal once; SIGTERM if the runner ended before the ranks."""
        wanted, number = len(self.signals.times), self.signals.last_number
        if self._abandoned is not None and not wanted:
            wanted, number = 1, signal.SIGTERM
        if wanted and not any(note.run for note in notes):
            # No rank has opened a run. The runner ends the launchers on other machines.
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.terminate()
                runner.wait(RUNNER_SECONDS)
            self._kill_marked()
            return
        for note in notes:
            if note.exit_code is None and note.alive and self._sent.get(note.rank, 0) < wanted:
                self._sent[note.rank] = wanted
                _send(note.process.pid, number)

    def _print_alarms(self, notes: Sequence[RankNote]) -> None:
        """Print this launch's new alarms, except the budget's, which the run prints."""
        run = notes[0].run if notes else None
        if run is None:
            return
        if self._events is None:  # skip the events of earlier launches
            self._events = JsonLinesTail(Path(run) / "logs" / "events.jsonl")
            self._events.records()
        for record in self._events.records():
            is_alarm = record.get("kind") == AlarmEvent.kind and record.get("raised")
            if is_alarm and record.get("alarm") == "hang":  # printed at the end, unless a rank does
                self._hang = str(record.get("text"))
                continue
            if is_alarm and not str(record.get("alarm")).startswith("budget"):
                is_critical = record.get("severity") == "critical"
                print_message("error" if is_critical else "warning", str(record.get("text")))

    def _kill_marked(self) -> None:
        for process in self.launch.marked_processes():
            _send(process.pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def deadline(
    signals: Sequence[float],
    *,
    grace_seconds: float,
    abandoned: float | None = None,
    rank_ended: float | None = None,
) -> float:
    """Return when to kill the remaining processes; infinity while none has to end.

    All times are in seconds on one clock: of the signals to stop, of the end of the `deepspeed`
    command (`abandoned`) and of the first rank's. After the first signal, `grace_seconds` remain.
    """
    limits = (grace_seconds, HURRIED_SECONDS, 0.0)
    ends = [when + limit for when, limit in zip(signals, limits, strict=False)]
    if abandoned is not None:
        ends.append(abandoned + grace_seconds)
    if rank_ended is not None:
        ends.append(rank_ended + LAST_RANKS_SECONDS)
    return min(ends, default=math.inf)


def judge(
    notes: Sequence[RankNote], *, launcher_code: int, signals: int, killed: bool, hang: str | None
) -> Verdict:
    """Determine how a launch ended from what each rank left about its end (`notes`).

    `launcher_code` is the exit code of the `deepspeed` command, -N if signal N ended it; `signals`
    counts those to stop; `killed`: the grace period expired before everything had ended; `hang`:
    why the watchdog has stopped the run, if it did.
    """
    is_printed = any(note.exit_code == ExitCode.HUNG for note in notes)
    if is_printed or hang:
        return Verdict(ExitCode.HUNG, "" if is_printed else hang or "", crashed=not signals)
    if notes and notes[0].rank == 0 and notes[0].exit_code not in (None, ExitCode.FAILED):
        crashed = notes[0].reason == "PARENT_GONE" and not signals
        return Verdict(ExitCode(notes[0].exit_code), crashed=crashed)
    if signals and not any(note.training for note in notes):
        return Verdict(ExitCode.INTERRUPTED, "Stopped before training began; nothing was changed.")
    lost = [str(note.rank) for note in notes if note.exit_code is None]
    ranks = f"{'Rank' if len(lost) == 1 else 'Ranks'} {', '.join(lost)}" if lost else "A rank"
    if signals and (killed or lost):
        text = f"{ranks} ended without saving: everything since the last checkpoint is lost."
        return Verdict(ExitCode.FAILED, text)
    if lost:
        text = f"{ranks} {'was' if len(lost) == 1 else 'were'} {_cause(launcher_code)}"
        return Verdict(ExitCode.FAILED, text, crashed=not signals)
    if notes:
        return Verdict(ExitCode.FAILED, crashed=not signals)
    if launcher_code == ExitCode.WRONG_USE:
        return Verdict(ExitCode.WRONG_USE)
    return Verdict(
        ExitCode.FAILED,
        f"deepspeed exited with {launcher_code} before any rank started; its output is above.",
        crashed=launcher_code <= 0,  # it was killed, or returned 0 because its launcher was
    )


def _cause(launcher_code: int) -> str:
    """Describe what killed a rank; the launcher returns 256 - N for signal N."""
    try:
        name = signal.Signals(256 - launcher_code).name
    except ValueError:
        return "killed, usually because memory ran out (see dmesg)."
    if name == "SIGKILL":
        return "killed by SIGKILL, usually because memory ran out (see dmesg)."
    return f"killed by {name}; its output is above or in the run's logs/rank-N.log."
