"""Text out of `.parquet` files, a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refocused.errors import ShardError

_ROWS_AT_ONCE = 256


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
        groups = list(range(start, file.metadata.num_row_groups if end is None else end))
        batches = file.iter_batches(
            _ROWS_AT_ONCE, row_groups=groups, columns=[field], use_threads=False
        )
        for batch in batches:
            yield from batch.column(0).to_pylist()


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
            f"{path}: it has no column {field!r}; it has {', '.join(schema.names)}. Name the "
            "text's column by --field."
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ShardError(
            f"{path}: the column {field!r} holds {kind}, which is no text. Name the text's column "
            "by --field."
        )
