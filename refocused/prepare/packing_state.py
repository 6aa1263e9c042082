"""What packing has finished: its recipe, its journal, and the shards that are whole."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.stored import is_stored
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest
from refocused.prepare.shard_packer import Cursor, ShardRow
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json_object

RECIPE_NAME = "recipe.json"


def check_recipe(bucket: Bucket, recipe: Mapping[str, object]) -> None:
    """Write the recipe into an empty bucket, or find the same one there.

    Raises:
        ShardError: The bucket holds something else, or what another recipe made.
    """
    text = json.dumps(recipe, indent=1)
    if bucket.info(RECIPE_NAME) is None:
        _check_empty(bucket)
        bucket.write(RECIPE_NAME, text.encode())
        return
    try:
        there = parse_json_object(bucket.read(RECIPE_NAME))
    except MalformedError as error:
        raise ShardError(
            f"{bucket.url}: its {RECIPE_NAME} is no JSON object ({error}). Name an empty place."
        ) from None
    wanted = json.loads(text)
    for key in {**there, **wanted}:
        if there.get(key) != wanted.get(key):
            raise ShardError(
                f"{bucket.url}: it holds data that were made otherwise: {_difference(key, there)} "
                f"there, {_difference(key, wanted)} now. Name an empty place, or the same "
                "command as then."
            )


def _check_empty(bucket: Bucket) -> None:
    first = next(iter(bucket.list()), None)
    if first is not None:
        raise ShardError(
            f"{bucket.url}: it is not empty; it holds {first.name}. Name an empty place: shards of "
            "two data sets must not mix."
        )


def _difference(key: str, recipe: Mapping[str, object]) -> str:
    value = recipe.get(key)
    if isinstance(value, list):
        return f"{len(value):,} {key}"
    return f"{key} = {value!r}"


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


_log = logging.getLogger(__name__)


def manifest_of(
    rows: Sequence[ShardRow], *, dtype: str, tokenizer: str, vocabulary: int | None = None
) -> Manifest:
    """Return the manifest of shards that were packed."""
    shards = [
        Shard(
            name=row.name,
            tokens=row.tokens,
            dtype=dtype,
            size=row.size,
            crc32c=row.crc32c,
            generation=None,
            max_id=row.max_id,
            documents=row.documents,
        )
        for row in rows
    ]
    ordered = sorted(shards, key=lambda shard: shard.name)
    return Manifest(tuple(ordered), tokenizer, vocabulary=vocabulary)


def keep_whole_shards(journal: Journal, stream: str, bucket: Bucket) -> int:
    """Verify a stream's finished shards; forget the first bad one and what follows it.

    Returns:
        Shards that are kept.
    """
    rows = journal.rows(stream)
    for number, row in enumerate(rows):
        if not is_stored(bucket, row.name, size=row.size, crc32c=row.crc32c):
            _log.warning("%s: it is missing or damaged, and made again", row.name)
            bucket.delete(row.name)
            journal.rewind(stream, shards=number)
            return number
    return len(rows)


def remove_leftovers(bucket: Bucket, work: Path) -> None:
    """Remove what killed processes were writing: only the holder of the lock writes there.

    Args:
        bucket: Where shards go.
        work: The work folder, whose lock is held.
    """
    leftovers = list(work.glob("*.part"))
    if Path(bucket.url) == work.parent:
        leftovers += work.parent.rglob(".*.part")
    for path in leftovers:
        path.unlink(missing_ok=True)


def finished_manifest(bucket: Bucket) -> Manifest | None:
    """Return the manifest of a finished set whose shards are all right; None: it is not finished.

    Raises:
        ShardError: A shard is missing or damaged.
    """
    if bucket.info(MANIFEST_NAME) is None:
        return None
    manifest = read_manifest(bucket)
    for shard in manifest.shards:
        if shard.crc32c is None or not is_stored(
            bucket, shard.name, size=shard.size, crc32c=shard.crc32c
        ):
            raise ShardError(
                f"{bucket.url}: it was finished, and now {shard.name} is missing or damaged. "
                f"Remove {MANIFEST_NAME} there and run the same command again."
            )
    return manifest
