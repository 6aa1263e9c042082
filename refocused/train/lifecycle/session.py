"""This process's session: its signals, the processes that launched it, and its start."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from refocused.metrics.meter import Meter
from refocused.system.errors import TrainingError
from refocused.system.launchers import (
    RANK_VARIABLES,
    SESSIONS,
    SHELLS,
    is_typed_into,
    outlive_parent,
    program,
)
from refocused.system.logs import erasure
from refocused.system.processes import ProcessIdentity, identify, this_process
from refocused.system.progress import Progress
from refocused.train.lifecycle.launch_session import (
    STOP_SIGNALS,
    Launch,
    Notices,
    RankNote,
    Signals,
    launch_of,
)
from refocused.train.lifecycle.run_folder import StartNotice
from refocused.train.step.stopping import StopReason

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
_exiting = threading.Lock()

UNSUPERVISED = Notices(
    "^C    stopping after this step and saving; the launcher allows 30 s. A STOP file in the run's "
    "folder stops without a limit."
)

# Set by a launcher for its ranks alone: the process above a rank must then be that launcher.
LAUNCHERS_OWN = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")  # DeepSpeed's, torchrun's
_STATE, _PARENT = 0, 1  # positions after the command's name in /proc/PID/stat


class Session:
    """A rank's state before it joins the others.

    Attributes:
        began_seconds: When the launcher's command began, on this machine's monotonic clock.
        launch: The supervisor's; None without one.
        meter: Of this rank's time; the phases before this process began are over.
        progress: What the machine's watchdog sees of this rank.
        joined: Set once all ranks are there: from then on they stop together.
        notice: Of the start, in the run's folder.
    """

    def __init__(self, signals: Signals, rank: int, run: Path | None = None) -> None:
        """Report to the supervisor that the rank runs.

        Without a supervisor rank 0 shows the start in the folder of the run; None: a dry run.

        Raises:
            TrainingError: It cannot report. The supervisor would end training like a start,
                unsaved.
        """
        self.signals = signals
        self.launch = launch = launch_of(os.environ)
        self.ancestors = Ancestors(launch)
        self.progress = Progress.shared()
        self.joined = threading.Event()
        self.notice = StartNotice(run if rank == 0 and launch is None else None)
        self._note = RankNote(rank=rank, process=this_process())
        self._notes_file: int | None = None
        process_began = monotonic_start(self._note.process)
        self.meter = Meter(began_seconds=process_began)
        self.began_seconds = self.ancestors.began_seconds
        if launch is not None:
            self.began_seconds, crashed = launch.began_seconds, launch.crashed_seconds
            self.meter = Meter(began_seconds=self.began_seconds if crashed is None else crashed)
            if crashed is not None:
                self.meter.end_phase("exit", at_seconds=launch.launched_seconds)
            self.meter.end_phase("launch", at_seconds=process_began)
            try:
                self._notes_file = launch.open_notes() if launch.supervisor.alive else None
            except OSError as error:
                if launch.supervisor.alive:
                    raise TrainingError(
                        f"Rank {rank} cannot report to its supervisor, process "
                        f"{launch.supervisor.pid} ({error}), so that a signal would lose work. Run "
                        "both as one user, with one /proc."
                    ) from error
        self.report()

    def report(self, **facts: object) -> None:
        """Update this rank's note to its supervisor; without one it is not written."""
        self._note = self._note.model_copy(update=facts)
        if self._notes_file is not None:
            os.write(self._notes_file, self._note.model_dump_json().encode() + b"\n")

    def exit_as_ordered(self, code: int, text: str) -> None:
        """Exit from any thread, the first that comes: the main one may wait in C."""
        _exiting.acquire()
        if text:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"{erasure(sys.stderr)}{text}\n".encode())
        self.report(exit_code=code)
        os._exit(code)

    @property
    def training_notices(self) -> Notices:
        """Answers to signals while there is something to save."""
        if self.launch is None:
            return UNSUPERVISED
        return Notices(
            "^C    stopping after this step and saving; "
            f"{self.launch.grace_seconds:.0f} s are allowed for it. A second signal leaves less "
            "time, a third ends it without saving."
        )


def begin_session(rank: int, run: Path | None = None) -> Session:
    """Begin a session, install the signal handlers and watch what launched this rank."""
    signals = Signals(speaks=rank == 0)
    signals.install()
    session = Session(signals, rank, run)
    outlive_parent()  # from here on `ancestors` notice its end, and the run is saved
    # A pipe, because Python runs a handler only when the main thread returns from C, which does
    # not happen while it waits for another rank.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    session.notice.show("waits for all ranks")
    threading.Thread(target=_attend, args=(reader, session), daemon=True).start()
    return session


def monotonic_start(process: ProcessIdentity) -> float:
    """Return when a process began, in monotonic seconds."""
    # The kernel counts from the boot, the monotonic clock without the time of a suspended machine.
    now, ticks = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (now - process.started / ticks)


def _attend(signals: int, session: Session) -> None:
    """Show the watchdog that Python runs, and carry out its order to exit.

    Once the run should stop, continue this machine's stopped ranks: all ranks save together. Exit
    if this rank still waits for others to join, in torch.
    """
    stopping = False
    while True:
        if (order := session.progress.beat(_flight_record)) is not None:
            session.exit_as_ordered(*order)
        if select.select([signals], [], [], CHECK_SECONDS)[0]:
            stopping = stopping or any(n in STOP_SIGNALS for n in os.read(signals, 64))
        is_orphan = session.ancestors.gone
        stopping = stopping or is_orphan
        for rank, pid in stopped_ranks() if stopping else ():
            logger.warning(
                "Rank %d (process %d) is stopped (SIGSTOP). Continuing it (SIGCONT), because all "
                "ranks must save and stop together.",
                rank,
                pid,
            )
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        if stopping and not session.joined.is_set():
            reason = StopReason.PARENT_GONE if is_orphan else StopReason.SIGNAL
            session.report(reason=reason.name)
            text = reason.before_training if os.environ.get("LOCAL_RANK", "0") == "0" else ""
            session.notice.withdraw()
            session.exit_as_ordered(reason.exit_code, text)


def _flight_record() -> bytes:
    """Return torch's record of recent collectives, of NCCL or of gloo."""
    import torch._C._distributed_c10d as c10d

    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    records: list[bytes] = [getattr(c10d, name)() for name in names if hasattr(c10d, name)]
    return next((record for record in records if b"entries" in record), b"{}")


class Ancestors:
    """The chain of processes that launched this rank, from its parent up.

    When a launcher is killed (torchrun, slurmstepd, DeepSpeed's launcher or the `deepspeed` command
    above it, our supervisor), its ranks keep running, and cost money. A process whose parent ends
    gets another parent, which is how a rank notices. A rank that a person started has no launcher:
    it keeps running when their shell ends.

    `processes` is the kernel's table of processes.
    """

    def __init__(
        self,
        launch: Launch | None,
        *,
        environment: Mapping[str, str] = os.environ,
        processes: Path = Path("/proc"),
    ) -> None:
        self._launch = launch
        self._processes = processes
        is_launched = any(name in environment for name in RANK_VARIABLES)
        self._chain = tuple(_launchers(processes)) if is_launched else ()
        self._under_deepspeed = len(self._chain) > 1 and _is_deepspeed(processes, self._chain[0])
        self._is_launchers = any(name in environment for name in LAUNCHERS_OWN)
        above = self._chain[1] if self._under_deepspeed else 0
        while not self._under_deepspeed and (fields := _stat(processes, above or "self")):
            above = int(fields[_PARENT])
            words = _words(processes, above, "cmdline")
            if above == 1 or program(words) not in SHELLS or is_typed_into(words):
                break
        words = _words(processes, above, "cmdline")
        takes_orphans = above == 1 or program(words) in ("systemd", "init")
        launches = any(name in " ".join(words) for name in ("python", "torchrun", "deepspeed"))
        is_judged = self._is_launchers or self._under_deepspeed
        self._was_orphan = is_judged and takes_orphans and not launches

    @property
    def gone(self) -> bool:
        """Whether one of them has ended."""
        if self._was_orphan:
            return True
        if self._launch is not None and not self._launch.supervisor.alive:
            return True
        parents: list[int] = []
        while len(parents) < len(self._chain):
            fields = _stat(self._processes, parents[-1] if parents else "self")
            if not fields:
                break
            parents.append(int(fields[_PARENT]))
        return tuple(parents) != self._chain

    @property
    def began_seconds(self) -> float:
        """When DeepSpeed or torchrun began, or else this process; in monotonic seconds."""
        above = [pid for pid in self._chain if self._is_launchers and pid > 1]
        known = [this_process(), *filter(None, map(identify, above))]
        return min(map(monotonic_start, known))

    @property
    def command_line(self) -> list[str]:
        """The words of the `deepspeed` command; none if it is not above this rank."""
        return _words(self._processes, self._chain[1], "cmdline") if self._under_deepspeed else []

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the `deepspeed` command."""
        return _environment(self._processes, self._chain[1]) if self._under_deepspeed else {}


def stopped_ranks(
    environment: Mapping[str, str] = os.environ, processes: Path = Path("/proc")
) -> Iterator[tuple[int, int]]:
    """Yield rank and pid of this run's processes on this machine that SIGSTOP has stopped.

    `MASTER_ADDR` and `MASTER_PORT` in this process's `environment` identify the run.
    """
    if "MASTER_PORT" not in environment:
        return
    run = [(name, environment.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")]
    for folder in processes.glob("[0-9]*"):
        fields = _stat(processes, folder.name)
        if fields and fields[_STATE] == "T":
            variables = _environment(processes, folder.name)
            if "RANK" in variables and all(variables.get(name) == value for name, value in run):
                yield int(variables["RANK"]), int(folder.name)


def _launchers(processes: Path) -> Iterator[int]:
    """Yield the pids above this process that launched it, nearest first."""
    above: str | int = "self"
    while fields := _stat(processes, above):
        above = int(fields[_PARENT])
        words = _words(processes, above, "cmdline")
        if program(words) in SESSIONS or is_typed_into(words):
            return
        yield above
        if _is_deepspeed(processes, above):
            if fields := _stat(processes, above):
                yield int(fields[_PARENT])
            return
        if program(words) not in SHELLS:  # else one that runs a script
            return


def _is_deepspeed(processes: Path, pid: int) -> bool:
    """Whether a process is DeepSpeed's launcher, which has a command above it."""
    return "deepspeed.launcher.launch" in " ".join(_words(processes, pid, "cmdline"))


def _stat(processes: Path, pid: int | str) -> list[str]:
    """Return the fields after a process's name; nothing for one that is gone."""
    with contextlib.suppress(OSError):
        return (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _words(processes: Path, pid: int | str, file: str) -> list[str]:
    with contextlib.suppress(OSError):
        content = (processes / str(pid) / file).read_bytes().decode(errors="replace")
        return content.rstrip("\0").split("\0") if content else []
    return []


def _environment(processes: Path, pid: int | str) -> dict[str, str]:
    pairs = (word.partition("=") for word in _words(processes, pid, "environ"))
    return {name: value for name, _, value in pairs}
