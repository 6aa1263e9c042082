"""The processes around this rank: those that launched it, and the other ranks of its machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from refocused.train.lifecycle.launch_session import Launch

# A launcher sets the first. srun and mpirun set the others, from which a script derives the first.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "csh", "tcsh", "fish"}
SESSIONS = {"sshd", "login", "su", "sudo", "tmux", "screen"}  # what a person's command runs in
INTERACTIVE_OPTIONS = {"--init-file", "--rcfile"}  # of a shell that reads a file and then a person
_STATE, _PARENT = 0, 1  # positions after the command's name in /proc/PID/stat


class Ancestors:
    """The chain of processes that launched this rank, from its parent up.

    When a launcher is killed (torchrun, slurmstepd, DeepSpeed's launcher or the `deepspeed` command
    above it, our supervisor), its ranks keep running, and cost money. A process whose parent ends
    gets another parent, which is how a rank notices. A rank that a person started has no launcher:
    it keeps running when their shell ends.
    """

    def __init__(
        self,
        launch: Launch | None,
        *,
        environment: Mapping[str, str] = os.environ,
        processes: Path = Path("/proc"),
    ) -> None:
        """Find the processes as they are now.

        Args:
            launch: The supervisor's; None without one.
            environment: Of this process.
            processes: Where the kernel lists them.
        """
        self._launch = launch
        self._processes = processes
        is_launched = any(name in environment for name in RANK_VARIABLES)
        self._chain = tuple(_launchers(processes)) if is_launched else ()
        self._under_deepspeed = len(self._chain) > 1 and _is_deepspeed(processes, self._chain[0])

    @property
    def gone(self) -> bool:
        """Whether one of them has ended."""
        if self._launch is not None and not self._launch.supervisor.alive:
            return True
        return self._orphaned or _parents(self._processes, len(self._chain)) != self._chain

    @property
    def command_line(self) -> list[str]:
        """The words of the `deepspeed` command; none where it is not above this rank."""
        return _words(self._processes, self._chain[1], "cmdline") if self._under_deepspeed else []

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the `deepspeed` command."""
        if not self._under_deepspeed:
            return {}
        return _environment(self._processes, self._chain[1])

    @property
    def _orphaned(self) -> bool:
        """Whether the `deepspeed` command had ended before this rank looked for the first time.

        Its launcher then belongs to process 1, unless that is the command itself, in a container.
        """
        if not self._under_deepspeed or self._chain[1] != 1:
            return False
        return "deepspeed" not in " ".join(_words(self._processes, 1, "cmdline"))


def stopped_ranks(
    environment: Mapping[str, str] = os.environ, processes: Path = Path("/proc")
) -> Iterator[tuple[int, int]]:
    """Yield rank and pid of the processes of this run, on this machine, that SIGSTOP has stopped.

    Args:
        environment: Of this process; its `MASTER_ADDR` and `MASTER_PORT` name the run.
        processes: Where the kernel lists them.
    """
    if "MASTER_PORT" not in environment:
        return
    run = [(name, environment.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")]
    for folder in processes.glob("[0-9]*"):
        fields = _stat(processes, folder.name)
        if not fields or fields[_STATE] != "T":
            continue
        theirs = _environment(processes, folder.name)
        if "RANK" in theirs and all(theirs.get(name) == value for name, value in run):
            yield int(theirs["RANK"]), int(folder.name)


def _launchers(processes: Path) -> Iterator[int]:
    """Yield the pids above this process that launched it, nearest first."""
    above: str | int = "self"
    while fields := _stat(processes, above):
        above = int(fields[_PARENT])
        words = _words(processes, above, "cmdline")
        name = Path(words[0].split(":")[0].lstrip("-")).name if words else ""
        is_script = name in SHELLS and _runs_a_script(words)
        if name in SESSIONS or (name in SHELLS and not is_script):
            return
        yield above
        if _is_deepspeed(processes, above):
            yield from (int(one[_PARENT]) for one in [_stat(processes, above)] if one)
            return
        if not is_script:
            return


def _runs_a_script(shell: list[str]) -> bool:
    """Whether a shell executes a file or a command line, not what a person types."""
    arguments = set(shell[1:])
    return not arguments & INTERACTIVE_OPTIONS and any(not a.startswith("-") for a in arguments)


def _is_deepspeed(processes: Path, pid: int) -> bool:
    """Whether a process is DeepSpeed's launcher, which has a command above it."""
    return "deepspeed.launcher.launch" in " ".join(_words(processes, pid, "cmdline"))


def _parents(processes: Path, count: int) -> tuple[int, ...]:
    """Return the pids of the `count` nearest processes above this one."""
    found: list[int] = []
    while len(found) < count and (fields := _stat(processes, found[-1] if found else "self")):
        found.append(int(fields[_PARENT]))
    return tuple(found)


def _stat(processes: Path, pid: int | str) -> list[str]:
    """Return what the kernel says of a process after its name; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _words(processes: Path, pid: int | str, file: str) -> list[str]:
    """Return the NUL-ended words of a file of /proc."""
    with contextlib.suppress(OSError):
        content = (processes / str(pid) / file).read_bytes().decode(errors="replace")
        return content.rstrip("\0").split("\0") if content else []
    return []


def _environment(processes: Path, pid: int | str) -> dict[str, str]:
    pairs = (word.partition("=") for word in _words(processes, pid, "environ"))
    return {name: value for name, _, value in pairs}
