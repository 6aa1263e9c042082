"""The processes that started this rank: when they are gone, nobody watches it any more."""

from __future__ import annotations

import os
from pathlib import Path

from refocused.training.launch import Launch


class Ancestors:
    """The chain from this rank up: DeepSpeed's launcher, the `deepspeed` command, our supervisor.

    When the `deepspeed` command is killed, its launcher and the ranks go on unseen, and bill. The
    change of the launcher's parent is how a rank learns of it. Without a launcher there is nothing
    to watch.
    """

    def __init__(self, launch: Launch | None) -> None:
        """Remember who is there now.

        Args:
            launch: The supervisor's; None without one.
        """
        self._launch = launch
        self._chain = _launcher_chain()

    @property
    def gone(self) -> bool:
        """Whether one of them has ended."""
        if self._launch is not None and not self._launch.supervisor.alive:
            return True
        return _orphaned(self._chain) or _launcher_chain() != self._chain

    @property
    def command_line(self) -> list[str]:
        """The words of the `deepspeed` command; none where it is not above this rank."""
        return _words(self._chain, "cmdline")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the `deepspeed` command."""
        pairs = (word.partition("=") for word in _words(self._chain, "environ"))
        return {name: value for name, _, value in pairs}


def _words(chain: tuple[int, ...], file: str) -> list[str]:
    """Return the NUL-ended words of a file of the command's in /proc."""
    if len(chain) < 2:
        return []
    try:
        content = Path(f"/proc/{chain[1]}/{file}").read_bytes()
    except OSError:
        return []
    return content.decode(errors="replace").rstrip("\0").split("\0")


def _launcher_chain() -> tuple[int, ...]:
    """Return the pids of DeepSpeed's launcher and of the command behind it; none without them."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        status = Path(f"/proc/{parent}/stat").read_text()
    except OSError:
        return (parent,) if "RANK" in os.environ else ()
    if b"deepspeed.launcher.launch" in command:
        grandparent = int(status.rpartition(")")[2].split()[1])
        return (parent, grandparent)
    return ()


def _orphaned(chain: tuple[int, ...]) -> bool:
    """Whether the command had ended before this rank looked for the first time.

    Its launcher then belongs to process 1, unless that is the command itself, in a container.
    """
    if chain[1:] != (1,):
        return False
    try:
        return b"deepspeed" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return True
