"""The errors a user can meet: each says what was found, where it came from, and what to do."""

from __future__ import annotations

import enum
from typing import Self


class ExitCode(enum.IntEnum):
    """What a command's exit status means."""

    OK = 0
    FAILED = 1
    WRONG_USE = 2
    CHECK_FAILED = 3
    LIMIT_REACHED = 4  # budget or time limit; the state is saved
    NOT_MIRRORED = 5  # trained, but the bucket does not hold everything yet
    INTERRUPTED = 130  # a signal or a STOP file; the state is saved


class RefocusedError(Exception):
    """An expected failure; its text is the whole message a person sees, without a traceback."""

    exit_code: ExitCode = ExitCode.FAILED
    on_every_rank: bool = False  # raised on all ranks alike, so that rank 0 alone may print it

    def agreed(self) -> Self:
        """Mark the error as raised on every rank alike; return it."""
        self.on_every_rank = True
        return self


class ConfigError(RefocusedError):
    """The run file, an override or the command line asks for something that cannot be."""

    exit_code = ExitCode.WRONG_USE


class StoppedEarlyError(RefocusedError):
    """Every rank was asked to stop before training began; not a failure."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.INTERRUPTED) -> None:
        """Raised on every rank alike; `exit_code` says for what kind of reason."""
        super().__init__(text)
        self.exit_code = exit_code
        self.on_every_rank = True


class BucketError(RefocusedError):
    """The object store, or an object in it, cannot be listed, read or written."""


class ShardError(RefocusedError):
    """A token file is missing, corrupt, of a refused format, or does not fit the run."""


class CheckpointError(RefocusedError):
    """A checkpoint cannot be saved, found, verified or loaded."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is proven to be damaged: only this lets a resume take an earlier one."""


class CheckpointUnavailableError(CheckpointError):
    """A checkpoint cannot be read now, which proves no damage: nothing durable follows."""


class TrainingError(RefocusedError):
    """Training itself cannot go on: a non-finite loss, a wrong start, a lost rank."""


class EvaluationError(RefocusedError):
    """A task file or a text cannot be put to a model."""
