"""Text out of `.parquet` files, a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
