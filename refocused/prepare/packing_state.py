"""The journal of packing: what is finished, line by line, so that a kill loses no shard."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from refocused.bucket.partial_files import disk_errors
from refocused.prepare.shard_packer import Cursor, ShardRow
from refocused.system.atomic_files import replace_file
from refocused.system.strict_json import parse_json_object


@dataclasses.dataclass(frozen=True, slots=True)
class JournalLine:
    """One step of a stream: the cursor after it, and the shard that it finished, if any."""

    stream: str
    cursor: Cursor
    row: ShardRow | None


class Journal:
    """Appends lines to a file, and reads those of earlier starts; a torn last line is dropped.

    Args:
        path: The file; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._finished: dict[str, list[JournalLine]] = {}  # those with a shard
        self._last: dict[str, JournalLine] = {}
        with disk_errors(path):
            path.touch()
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            for line in whole.splitlines():
                self._keep(_parsed(line))
            self._rewrite()
            self._file = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def cursor(self, stream: str) -> Cursor:
        """Return where a stream is: its last cursor, or the start."""
        return self._last[stream].cursor if stream in self._last else Cursor()

    def rows(self, stream: str) -> list[ShardRow]:
        """Return a stream's finished shards, in order."""
        return [line.row for line in self._finished.get(stream, []) if line.row]

    def note(self, stream: str, cursor: Cursor, row: ShardRow | None) -> None:
        """Append a line; it is durable on return when it names a shard."""
        line = JournalLine(stream, cursor, row)
        with disk_errors(self._path):
            self._file.write(_text(line))
            self._file.flush()
            if row is not None:
                os.fsync(self._file.fileno())
        self._keep(line)

    def rewind(self, stream: str, *, shards: int) -> None:
        """Forget all of a stream that came after its first `shards` shards."""
        kept = self._finished.get(stream, [])[:shards]
        self._finished[stream] = kept
        self._last.pop(stream, None)
        if kept:
            self._last[stream] = kept[-1]
        with disk_errors(self._path):
            self._file.close()
            self._rewrite()
            self._file = self._path.open("ab")

    def _keep(self, line: JournalLine) -> None:
        self._last[line.stream] = line
        if line.row is not None:
            self._finished.setdefault(line.stream, []).append(line)

    def _rewrite(self) -> None:
        """Write the file anew with the lines that still say something."""
        finished = [line for lines in self._finished.values() for line in lines]
        lines = [*finished, *(line for line in self._last.values() if line.row is None)]
        replace_file(self._path, b"".join(map(_text, lines)), durable=True)


def _text(line: JournalLine) -> bytes:
    return json.dumps(dataclasses.asdict(line)).encode() + b"\n"


def _parsed(line: bytes) -> JournalLine:
    content = parse_json_object(line)
    row = content["row"]
    return JournalLine(
        content["stream"], Cursor(**content["cursor"]), None if row is None else ShardRow(**row)
    )
