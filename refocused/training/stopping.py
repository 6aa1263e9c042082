"""Why training should end early, agreed by all ranks so that they save together."""

from __future__ import annotations

import enum
import os
import signal
from pathlib import Path
from types import FrameType

from refocused.errors import ExitCode
from refocused.world import World


class StopReason(enum.IntEnum):
    """Reasons to stop; where ranks differ, the largest one counts."""

    NONE = 0
    STOP_FILE = 1
    PARENT_GONE = 2
    SIGNAL = 3

    @property
    def text(self) -> str:
        """What a person is told."""
        return {
            StopReason.NONE: "",
            StopReason.STOP_FILE: "the STOP file",
            StopReason.PARENT_GONE: "the launcher is gone",
            StopReason.SIGNAL: "a signal",
        }[self]

    @property
    def exit_code(self) -> ExitCode:
        """What the command's exit status says of it."""
        return ExitCode.INTERRUPTED if self else ExitCode.OK


class StopRequest:
    """Collects reasons to stop on this rank and agrees on them with the others.

    The launcher signals ranks one after another and kills them 30 s later, so a handler that
    saved by itself would wait for ranks that do not come. Ours only notes the signal.
    """

    def __init__(self, world: World, *, stop_file: Path, interruption_notice: str) -> None:
        """Watch for a file, signals and the launcher's end.

        Args:
            world: The ranks.
            stop_file: Its existence asks to stop; rank 0 looks for it.
            interruption_notice: Printed at the first signal by rank 0.
        """
        self._world = world
        self._stop_file = stop_file
        self._notice = interruption_notice
        self._reason = StopReason.NONE
        self._ancestors = _launcher_chain()

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and SIGUSR1."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def agreed(self) -> StopReason:
        """Return why to stop, the same on every rank; every rank must call at the same place."""
        self._look_around()
        return StopReason(int(self._world.largest([self._reason])[0]))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self._reason = self._reason is not StopReason.SIGNAL, StopReason.SIGNAL
        if first and self._world.is_first:
            os.write(2, f"\n{self._notice}\n".encode())

    def _look_around(self) -> None:
        if self._reason is StopReason.NONE and _launcher_chain() != self._ancestors:
            self._reason = StopReason.PARENT_GONE
        if self._reason is StopReason.NONE and self._world.is_first and self._stop_file.exists():
            self._reason = StopReason.STOP_FILE


def _launcher_chain() -> tuple[int, ...]:
    """Return the processes that started this rank: DeepSpeed's launcher and the command behind it.

    When the `deepspeed` command is killed, its launcher and the ranks go on unseen; the change of
    the launcher's parent is how a rank learns of it. Without a launcher there is nothing to watch.
    """
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
