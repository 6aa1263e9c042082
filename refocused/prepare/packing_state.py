"""What packing has finished: its recipe, its journal, and the shards that are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.stored import is_stored
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest, write_manifest
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder
from refocused.system.strict_json import MalformedError, parse_json_object

RECIPE_NAME = "recipe.json"
_NOTED = ("name", "tokens", "size", "crc32c", "max_id", "documents")  # of a shard, in the journal


def pack_once(
    bucket: Bucket,
    work: Path,
    recipe: Mapping[str, object],
    pack: Callable[[Journal], Manifest],
    *,
    dtype: np.dtype[Any],
) -> Manifest:
    """Pack a set and write its manifest, last; return that of a set that is finished already.

    `bucket` is empty, or holds what an earlier call with the same recipe made; `work` is a local
    folder for what is unfinished. `pack` makes the shards, from the journal of a killed call on.
    Raises `ShardError` if the bucket holds something else, or a finished shard is missing or
    damaged.
    """
    with exclusive_folder(work):
        # What killed processes were writing: only the holder of the lock writes there.
        leftovers = list(work.glob("*.part"))
        if Path(bucket.url) == work.parent:
            leftovers += work.parent.rglob(".*.part")
        for path in leftovers:
            path.unlink(missing_ok=True)
        _check_recipe(bucket, recipe)
        manifest = _finished_manifest(bucket)
        if manifest is None:
            with contextlib.closing(Journal(work / "journal.jsonl", dtype=dtype)) as journal:
                manifest = pack(journal)
            write_manifest(bucket, manifest)
        shutil.rmtree(work)
    return manifest


def _check_recipe(bucket: Bucket, recipe: Mapping[str, object]) -> None:
    """Write the recipe into an empty bucket, or find the same one there."""
    text = json.dumps(recipe, indent=1)
    if bucket.info(RECIPE_NAME) is None:
        first = next(iter(bucket.list()), None)
        if first is not None:
            raise ShardError(
                f"{bucket.url}: it is not empty; it holds {first.name}. Name an empty place: "
                "shards of two data sets must not mix."
            )
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
            then, now = (
                f"{len(value):,} {key}" if isinstance(value, list) else f"{key} = {value!r}"
                for value in (there.get(key), wanted.get(key))
            )
            raise ShardError(
                f"{bucket.url}: it holds data that were made otherwise: {then} there, {now} now. "
                "Name an empty place, or the same command as then."
            )


def _finished_manifest(bucket: Bucket) -> Manifest | None:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """How far a stream is packed."""

    source: int = 0  # number of the task, or the file, that is being packed
    offset: int = 0  # ids of it that are packed
    shard: int = 0  # number of the open shard
    filled: int = 0  # ids in the open shard
    crc32c: int = 0  # of these ids
    max_id: int = 0  # the largest of them
    documents: int = 0  # that begin among them


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """The cursor of a stream after a step, and the shard that the step finished, if any."""

    stream: str
    cursor: Cursor
    shard: Shard | None


class Journal:
    """Appends what each stream has packed to a file, and reads it again; a torn line is dropped."""

    def __init__(self, path: Path, *, dtype: np.dtype[Any]) -> None:
        self._path = path
        self.dtype = dtype
        with disk_errors(path):
            path.touch()
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1].splitlines()
            self._lines = [self._parsed(line) for line in whole]
            self._file = self._rewritten()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def cursor(self, stream: str) -> Cursor:
        """Return where a stream is: its last cursor, or the start."""
        cursors = (line.cursor for line in reversed(self._lines) if line.stream == stream)
        return next(cursors, Cursor())

    def shards(self, stream: str) -> list[Shard]:
        """Return a stream's finished shards, in order."""
        return [line.shard for line in self._lines if line.stream == stream and line.shard]

    def note(self, stream: str, cursor: Cursor, shard: Shard | None) -> None:
        """Append a line; it is durable on return when it has a shard."""
        line = _Line(stream, cursor, shard)
        with disk_errors(self._path):
            self._file.write(_text(line))
            self._file.flush()
            if shard is not None:
                os.fsync(self._file.fileno())
        self._lines.append(line)

    def rewind(self, stream: str, *, shards: int) -> None:
        """Forget all of a stream that came after its first `shards` shards."""
        others = [line for line in self._lines if line.stream != stream]
        own = [line for line in self._lines if line.stream == stream and line.shard]
        self._lines = others + own[:shards]
        with disk_errors(self._path):
            self._file.close()
            self._file = self._rewritten()

    def _rewritten(self) -> BinaryIO:
        """Replace the file by the lines that still matter, and open it."""
        last = {line.stream: line for line in self._lines}
        self._lines = [line for line in self._lines if line.shard or last[line.stream] is line]
        replace_file(self._path, b"".join(map(_text, self._lines)), durable=True)
        return self._path.open("ab")

    def _parsed(self, text: bytes) -> _Line:
        content = parse_json_object(text)
        row, shard = content["row"], None
        if row is not None:
            shard = Shard(**row, dtype=self.dtype.name, generation=None)
        return _Line(content["stream"], Cursor(**content["cursor"]), shard)


def _text(line: _Line) -> bytes:
    row = None if line.shard is None else {name: getattr(line.shard, name) for name in _NOTED}
    content = {"stream": line.stream, "cursor": dataclasses.asdict(line.cursor), "row": row}
    return json.dumps(content).encode() + b"\n"


def manifest_of(
    shards: Sequence[Shard], *, tokenizer: str, vocabulary: int | None = None
) -> Manifest:
    """Return the manifest of shards that were packed."""
    ordered = sorted(shards, key=lambda shard: shard.name)
    return Manifest(tuple(ordered), tokenizer, vocabulary=vocabulary)
