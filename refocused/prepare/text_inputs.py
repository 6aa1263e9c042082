"""The text files to tokenise, and the spans of them that make one task each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from refocused.bucket.bucket import extended_crc32c
from refocused.prepare.parquet_rows import group_bytes
from refocused.system.errors import ShardError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
TASK_BYTES = 32 * 1024 * 1024  # about five seconds of one process
_EDGE_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class TextFile:
    """One input.

    Attributes:
        path: The file.
        size: Bytes.
        edges: CRC-32C of its first and last 64 KiB, by which another file of the same name and
            size is told from it.
    """

    path: Path
    size: int
    edges: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A part of a file that is read by itself.

    Attributes:
        path: The file.
        start: First byte, or first row group of a `.parquet`. A line that begins before it belongs
            to the span before.
        end: Byte or row group after the last; None: all that follow.
    """

    path: Path
    start: int = 0
    end: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What one process does at a time.

    Attributes:
        spans: In order.
        bytes: Of text, roughly.
    """

    spans: tuple[Span, ...]
    bytes: int


def find_inputs(arguments: Sequence[str]) -> list[TextFile]:
    """Return the text files that are meant: those named, and those below the folders named.

    Files keep the order of the arguments; those of a folder are in name order, and what is no text
    in it, or hidden, is passed over.

    Raises:
        ShardError: A name is missing, is no text, is named twice, or is of a bucket.
    """
    found = [path for argument in arguments for path in _files_of(argument)]
    known: set[Path] = set()
    for path in found:
        real = path.resolve()
        if real in known:
            raise ShardError(f"{path}: it is named twice, and would be tokenised twice. Name once.")
        known.add(real)
    return [_described(path) for path in found]


def plan_tasks(files: Iterable[TextFile]) -> list[Task]:
    """Group spans into tasks of about 32 MiB of text, in order.

    Long `.jsonl` and `.parquet` files are cut; other files are one span each. The plan depends on
    the files alone.

    Raises:
        ShardError: A `.parquet` file is damaged.
    """
    tasks: list[Task] = []
    gathered: list[Span] = []
    size = 0
    for file in files:
        for span, span_bytes in _spans(file):
            gathered.append(span)
            size += span_bytes
            if size >= TASK_BYTES:
                tasks.append(Task(tuple(gathered), size))
                gathered, size = [], 0
    return [*tasks, Task(tuple(gathered), size)] if gathered else tasks


def _files_of(argument: str) -> list[Path]:
    if "://" in argument:
        raise ShardError(
            f"{argument}: text is read from local files only. Fetch it first: "
            f"refocused prepare_data sync {argument} FOLDER"
        )
    path = Path(argument).expanduser()
    if path.is_dir():
        below = [one for one in sorted(path.rglob("*")) if one.name.endswith(SUFFIXES)]
        files = [one for one in below if one.is_file() and not _is_hidden(one.relative_to(path))]
        if not files:
            raise ShardError(f"{path}: no text is below it. Looked for {_forms()}.")
        return files
    if not path.is_file():
        raise ShardError(f"{path}: there is no such file or folder. Correct the name.")
    if not path.name.endswith(SUFFIXES):
        raise ShardError(
            f"{path}: it is of no known form of text. There are {_forms()}. Unpack or convert it."
        )
    return [path]


def _forms() -> str:
    return ", ".join(f"*{suffix}" for suffix in SUFFIXES)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _described(path: Path) -> TextFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            edges = extended_crc32c(0, file.read(_EDGE_BYTES))
            file.seek(max(size - _EDGE_BYTES, 0))
            edges = extended_crc32c(edges, file.read(_EDGE_BYTES))
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}. Check its permissions.") from None
    return TextFile(path, size, edges)


def _spans(file: TextFile) -> Iterator[tuple[Span, int]]:
    """Yield a file's spans, each with its bytes of text, roughly."""
    if file.size <= TASK_BYTES or file.path.name.endswith((".txt", ".gz")):
        yield Span(file.path), file.size
    elif file.path.name.endswith(".parquet"):
        for number, size in enumerate(group_bytes(file.path)):
            yield Span(file.path, number, number + 1), size
    else:
        for start in range(0, file.size, TASK_BYTES):
            end = min(start + TASK_BYTES, file.size)
            yield Span(file.path, start, end), end - start
