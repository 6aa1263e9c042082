"""The text files to tokenize, in spans that make one task each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import extended_crc32c
from refocused.system.errors import ShardError

_ROWS_AT_ONCE = 256
# gzip and the codecs of parquet take real text to a tenth at most.
UNPACKED_RATIO = 32
UNPACKED_BYTES = 16 * 1024 * 1024  # more, for small files
BATCH_RATIO = 8  # bytes of the rows of a batch, to those that the file may unpack to


def group_bytes(path: Path) -> list[int]:
    """Return the bytes of each row group, unpacked, by the file's own account.

    Raises:
        ShardError: The file is no parquet, or damaged.
    """
    with _opened(path) as file:
        groups = range(file.metadata.num_row_groups)
        return [file.metadata.row_group(number).total_byte_size for number in groups]


def column_texts(path: Path, *, field: str, start: int, end: int | None) -> Iterator[str | None]:
    """Yield a column's texts, None where there is none.

    Args:
        path: The file.
        field: Name of the column.
        start: First row group.
        end: Row group after the last; None: all that follow.

    Raises:
        ShardError: The file is damaged, or the column is missing or is no text.
    """
    with _opened(path) as file:
        _check_column(file.schema_arrow, field, path=path)
        most, column = most_unpacked(path.stat().st_size), _column_number(file.schema, field)
        for group in range(start, file.metadata.num_row_groups if end is None else end):
            unpacked = file.metadata.row_group(group).column(column).total_uncompressed_size
            if unpacked > most:
                raise unpacks_too_far(path)
            # A text that is stored once may stand in every row.
            rows = max(min(_ROWS_AT_ONCE, BATCH_RATIO * most // max(unpacked, 1)), 1)
            batches = file.iter_batches(
                rows, row_groups=[group], columns=[field], use_threads=False
            )
            for batch in batches:
                for text in batch.column(0):
                    yield text.as_py()


def most_unpacked(size: int) -> int:
    """Return the bytes of text that a packed file of a size may hold: real text is far below."""
    return UNPACKED_BYTES + UNPACKED_RATIO * size


def unpacks_too_far(path: Path) -> ShardError:
    """Return the error for a packed file that holds more than `most_unpacked`."""
    return ShardError(
        f"{path}: its {path.stat().st_size:,} bytes unpack to far more than text does. If it is "
        "right, write it unpacked (gunzip, or parquet without compression and dictionary)."
    )


def _column_number(schema: Any, field: str) -> int:
    return next(n for n in range(len(schema)) if schema.column(n).path == field)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        # Without pre_buffer one row group's pages are read as they are needed.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardError(
            f"{path}: the parquet file cannot be read ({error}). Fetch it again, or leave it out."
        ) from None


def _check_column(schema: Any, field: str, *, path: Path) -> None:
    import pyarrow

    if field not in schema.names:
        raise ShardError(
            f"{path}: it has no column {field!r}; it has {', '.join(schema.names):.200}. Name the "
            "text's column by --field."
        )
    if schema.names.count(field) > 1:
        raise ShardError(
            f"{path}: it has {schema.names.count(field)} columns {field!r}. Write it again with "
            "one of them, or name another by --field."
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ShardError(
            f"{path}: the column {field!r} holds {kind}, which is no text. Name the text's column "
            "by --field."
        )


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
