"""Find the text files to tokenize, and divide them into tasks."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import extended_crc32c
from refocused.bucket.open_bucket import BY_ENVIRONMENT, Access
from refocused.prepare.texts.remote_texts import RemoteText, find_remote
from refocused.system.errors import ShardError, local_path

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
TASK_BYTES = 32 * 1024 * 1024  # about five seconds of one process
EDGE_BYTES = 64 * 1024
ROWS_AT_ONCE = 256
# gzip and parquet's codecs compress real text by a factor of about ten at most.
UNPACKED_RATIO = 32
UNPACKED_BYTES = 16 * 1024 * 1024  # in addition, for small files
BATCH_RATIO = 8  # of a batch's bytes to the file's limit


TextPath = Path | RemoteText


@dataclasses.dataclass(frozen=True, slots=True)
class TextFile:
    """One input."""

    path: TextPath
    size: int  # bytes
    edges: int  # CRC-32C of both ends, or a version: detects a changed file of the same size


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, in bytes or in row groups of a `.parquet`.

    A line belongs to the span in which it starts.
    """

    path: TextPath
    start: int = 0
    end: int | None = None  # exclusive; None: the file's end


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The unit of work of a process."""

    spans: tuple[Span, ...]
    bytes: int  # of text, approximately


def find_inputs(arguments: Sequence[str], access: Access = BY_ENVIRONMENT) -> list[TextFile]:
    """Return the text files at the given paths and addresses, and below the given folders.

    Files keep the order of the arguments; those of a folder are sorted by name, without hidden
    files and files that are not text. Raises `ShardError` if a path is missing, is not text, or
    occurs twice, and `BucketError` if a store cannot be listed.
    """
    found: list[TextPath] = []
    for argument in arguments:
        remote = find_remote(argument, access)
        if remote is None:
            found += _local_files(argument)
        elif texts := [one for one in remote if one.name.endswith(SUFFIXES)]:
            found += texts
        else:
            formats = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
            raise ShardError(
                f"{argument}: no text files ({formats}) are there. Correct the address."
            )
    known: set[TextPath] = set()
    for path in found:
        real = path.resolve() if isinstance(path, Path) else path
        if real in known:
            raise ShardError(f"{path}: this file is given twice. Give it once.")
        known.add(real)
    return [_text_file(path) for path in found]


def _local_files(argument: str) -> list[Path]:
    if "://" in argument:
        raise ShardError(f"{argument}: give a path, gs://bucket/NAME, or hub:DATASET.")
    path, formats = local_path(argument), ", ".join(f"*{suffix}" for suffix in SUFFIXES)
    if path.is_dir():
        files = [
            one
            for one in sorted(path.rglob("*"))
            if one.name.endswith(SUFFIXES)
            and one.is_file()
            and not any(part.startswith(".") for part in one.relative_to(path).parts)
        ]
        if not files:
            raise ShardError(
                f"{path}: this folder has no text files ({formats}). Correct the path."
            )
        return files
    if not path.is_file():
        raise ShardError(f"{path}: there is no such file or folder. Correct the path.")
    if not path.name.endswith(SUFFIXES):
        raise ShardError(
            f"{path}: this format is not supported; {formats} are. Unpack or convert the file."
        )
    return [path]


def _text_file(path: TextPath) -> TextFile:
    if isinstance(path, RemoteText):
        return TextFile(path, path.size, path.version)
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            edges = extended_crc32c(0, file.read(EDGE_BYTES))
            file.seek(max(size - EDGE_BYTES, 0))
            edges = extended_crc32c(edges, file.read(EDGE_BYTES))
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}. Check its permissions.") from None
    return TextFile(path, size, edges)


def plan_tasks(files: Iterable[TextFile]) -> list[Task]:
    """Group spans into tasks of about 32 MiB of text, in order.

    Long `.jsonl` and `.parquet` files are split. The plan depends only on the files.
    """
    tasks: list[Task] = []
    spans: list[Span] = []
    size = 0
    for file in files:
        for span, span_bytes in _spans(file):
            spans.append(span)
            size += span_bytes
            if size >= TASK_BYTES:
                tasks.append(Task(tuple(spans), size))
                spans, size = [], 0
    return [*tasks, Task(tuple(spans), size)] if spans else tasks


def _spans(file: TextFile) -> Iterator[tuple[Span, int]]:
    """Yield a file's spans with their approximate bytes of text."""
    if file.size <= TASK_BYTES or file.path.name.endswith((".txt", ".gz")):
        yield Span(file.path), file.size
    elif file.path.name.endswith(".parquet"):
        with _opened(file.path) as parquet:
            metadata = parquet.metadata
            for number in range(metadata.num_row_groups):
                size = metadata.row_group(number).total_byte_size
                yield Span(file.path, number, number + 1), size
    else:
        for start in range(0, file.size, TASK_BYTES):
            end = min(start + TASK_BYTES, file.size)
            yield Span(file.path, start, end), end - start


def column_texts(span: Span, *, field: str) -> Iterator[str | None]:
    """Yield a column's texts in the row groups of a `.parquet` span; None for null.

    Raises `ShardError` if the file is damaged, or the column is missing or not text.
    """
    path = span.path
    with _opened(path) as file:
        _check_column(file.schema_arrow, field, path=path)
        most = most_unpacked(size_of(path))
        columns = range(len(file.schema))
        column = next(n for n in columns if file.schema.column(n).path == field)
        end = file.metadata.num_row_groups if span.end is None else span.end
        for group in range(span.start, end):
            unpacked = file.metadata.row_group(group).column(column).total_uncompressed_size
            if unpacked > most:
                raise unpacks_too_far(path)
            # Dictionary encoding stores a text once that may occur in every row.
            rows = max(min(ROWS_AT_ONCE, BATCH_RATIO * most // max(unpacked, 1)), 1)
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=[field], use_threads=False
            ):
                for text in batch.column(0):
                    yield text.as_py()


def size_of(path: TextPath) -> int:
    """Return a file's bytes."""
    return path.size if isinstance(path, RemoteText) else path.stat().st_size


def most_unpacked(size: int) -> int:
    """Return the maximum bytes of text of a compressed file; real text has fewer."""
    return UNPACKED_BYTES + UNPACKED_RATIO * size


def unpacks_too_far(path: TextPath) -> ShardError:
    """Return the error for a compressed file that holds more than `most_unpacked`."""
    return ShardError(
        f"{path}: its {size_of(path):,} bytes unpack to far more than text does. If that is "
        "intended, write it unpacked (gunzip, or parquet without compression and dictionary)."
    )


@contextlib.contextmanager
def _opened(path: TextPath) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        fix = 'pip install "refocused[parquet]"'
        raise ShardError(f"{path}: parquet files need pyarrow. Install it: {fix}") from None
    try:
        # Without pre_buffer, a row group's pages are read on demand.
        source = path.open("rb") if isinstance(path, RemoteText) else path
        with parquet.ParquetFile(source, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardError(
            f"{path}: the parquet file cannot be read ({error}). Download it again, or leave it "
            "out."
        ) from None


def _check_column(schema: Any, field: str, *, path: TextPath) -> None:
    from pyarrow import types

    count = schema.names.count(field)
    kind = schema.field(field).type if count == 1 else None
    if not count:
        problem = f"it has no column {field!r}; it has {', '.join(schema.names):.200}"
    elif count > 1:
        problem = f"it has {count} columns {field!r}"
    elif not (types.is_string(kind) or types.is_large_string(kind)):
        problem = f"the column {field!r} holds {kind}, which is not text"
    else:
        return
    raise ShardError(f"{path}: {problem}. Give the text's column with --field.")
