"""Exit codes, and the errors shown to users: what is wrong, where, and what to do."""

import contextlib
import difflib
import enum
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

MOST_LINES, MOST_CHARACTERS = 200, 2000  # of an error, and of one of its lines


class ExitCode(enum.IntEnum):
    """Exit status of a command."""

    OK = 0
    FAILED = 1
    WRONG_USE = 2
    CHECK_FAILED = 3
    LIMIT_REACHED = 4  # budget or time limit; a checkpoint is saved
    NOT_MIRRORED = 5  # training finished, but the bucket lacks checkpoints
    HUNG = 6  # no rank made progress; the last checkpoint is good
    INTERRUPTED = 130  # a signal or a STOP file; a checkpoint is saved


def printable(text: str) -> str:
    """Show control characters, by which a foreign file could steer a terminal, as escapes."""
    kept = (sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)
    return "".join(kept)


class RefocusedError(Exception):
    """An expected failure; commands print its text without a traceback.

    Texts quote files of others, which may hold anything: lines and their number are limited here.
    """

    def __init__(self, text: object = "") -> None:
        lines = str(text).split("\n")
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES:,} more lines"]
        half = MOST_CHARACTERS // 2
        for number, line in enumerate(lines):
            if (left_out := len(line) - 2 * half) > 0:  # of its middle: it ends with what to do
                lines[number] = f"{line[:half]} [{left_out:,} characters left out] {line[-half:]}"
        super().__init__("\n".join(lines))

    exit_code: ExitCode = ExitCode.FAILED
    on_every_rank: bool = False  # all ranks raise it, so the first of each machine prints it
    host: str = ""  # on which it was raised, once other ranks know of it

    def __str__(self) -> str:
        """Return the text, which may quote a foreign file, for a terminal or a log."""
        return printable(super().__str__())

    def agreed(self) -> Self:
        """Mark the error as raised on every rank, and return it."""
        self.on_every_rank = True
        return self


class ConfigError(RefocusedError):
    """A run file, an override or a command line is invalid."""

    exit_code = ExitCode.WRONG_USE


class StoppedEarlyError(RefocusedError):
    """A stop was requested before training began; not a failure. All ranks raise it."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.INTERRUPTED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.on_every_rank = True


class BucketError(RefocusedError):
    """The object store, or an object in it, cannot be listed, read or written.

    It proves no damage. A subclass says otherwise.
    """

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later: not without a right, or to a wrong path."""
        cause = self.__cause__
        while cause is not None:
            if isinstance(cause, BucketError):
                return cause.transient
            if isinstance(cause, PermissionError | NotADirectoryError | FileExistsError):
                return False
            cause = cause.__cause__
        return True


class CorruptObjectError(BucketError):
    """An object is damaged: it arrived again and again with the same wrong checksum."""


class ShardError(RefocusedError):
    """A token file is missing, corrupt, of an unsupported format, or does not fit the run."""


class CheckpointError(RefocusedError):
    """A checkpoint cannot be saved, found, verified or loaded."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is certainly damaged. Only this error makes a resume skip it."""


class CheckpointUnavailableError(CheckpointError):
    """A checkpoint cannot be read at present, which is no evidence of damage."""


class TrainingError(RefocusedError):
    """Training cannot continue: a non-finite loss, an invalid start, a lost rank."""


class EvaluationError(RefocusedError):
    """A task file or a text cannot be evaluated."""


def as_typed(command: str) -> str:
    """Return how to type a command such as `checkpoints list`, for messages.

    A checkout has scripts for it, unless the present command was `refocused` itself.
    """
    started, scripts = Path(sys.argv[0]), Path(__file__).resolve().parents[2] / "launch"
    is_console = started.name == "refocused" or started.parts[-2:] == ("refocused", "__main__.py")
    if is_console or not (scripts / "train.sh").is_file():
        return f"refocused {command}"
    name, space, rest = command.partition(" ")
    script = {"launch": "train.sh", "speedrun": "speedrun.sh"}.get(name, f"{name}.py")
    return from_here(scripts / script) + space + rest


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the nearest choice, or an empty text if none is near."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""


def counted(number: int, one: str, several: str = "") -> str:
    """Return `1 shard` or `2 shards`; `several` where that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def from_here(program: Path) -> str:
    """Return how to type a program's path in the current folder."""
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or elsewhere
        return shlex.quote(f"./{program.relative_to(Path.cwd())}")
    return shlex.quote(str(program))


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package for this Python."""
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def local_path(text: str | Path) -> Path:
    """Return a path as a user wrote it, with the home folder for `~`; raise `ConfigError`."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{str(text)!r}: there is no such user. Write the folder's path."
        ) from None


def short_reason(error: BaseException) -> str:
    """Return an error's type and text on one line, of bounded length."""
    text = f"{' '.join(str(error).split()):.200}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def tokenizer_errors(where: object) -> Iterator[None]:
    """Turn errors of the `tokenizers` library, also Rust panics, into a `ShardError`."""
    try:
        yield
    except BaseException as error:  # a panic derives from it; its class cannot be imported
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ShardError(
            f"{where}: the tokenizers library cannot use this tokenizer "
            f"({' '.join(str(error).split()):.200}). Use a file written by Tokenizer.save."
        ) from None
