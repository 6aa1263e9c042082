"""State of packing: its recipe, its journal, and the finished shards."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from refocused.bucket.bucket import Bucket, is_stored
from refocused.bucket.partial_files import disk_errors
from refocused.data.formats.object_names import MANIFEST_NAME, RECIPE_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest, write_manifest
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder
from refocused.system.strict_json import MalformedError, parse_json_object

JOURNAL_NAME = "journal.jsonl"
# Of a shard in the journal.
_ROW_KEYS = ("name", "tokens", "size", "crc32c", "max_id", "documents", "packed_for", "document_id")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PackResult:
    """The finished data set; None: not counted."""

    manifest: Manifest
    packing: Counter[str]  # `BestFit.counts` of this call
    kept_shards: int | None = None  # finished by earlier calls
    new_tokens: int | None = None  # packed by this call, without padding


def pack_once(
    bucket: Bucket,
    work: Path,
    recipe: Mapping[str, object],
    pack: Callable[[Journal], Manifest],
    *,
    dtype: np.dtype[Any],
) -> Manifest:
    """Pack a data set and write its manifest, or return the manifest of a finished set.

    `bucket` is empty, or from an earlier call; `work` is a local folder for unfinished files.
    `pack` makes the shards, continuing from the journal of a killed call with the same recipe. A
    set of another recipe that was not finished is begun anew. Raises `ShardError` if the bucket
    holds other data, or a finished shard is missing or damaged.
    """
    with exclusive_folder(work):
        # Temporary files of killed processes: only the holder of the lock writes here.
        leftovers = list(work.glob("*.part"))
        if Path(bucket.url) == work.parent:
            leftovers += work.parent.rglob(".*.part")
        for path in leftovers:
            path.unlink(missing_ok=True)
        if (difference := recipe_difference(bucket, recipe)) is not None:
            _begin(bucket, work, recipe, difference=difference)
        manifest = _finished_manifest(bucket)
        if manifest is None:
            with contextlib.closing(Journal(work / JOURNAL_NAME, dtype=dtype)) as journal:
                manifest = pack(journal)
            write_manifest(bucket, manifest)
        _clear(work)
    return manifest


def recipe_difference(bucket: Bucket, recipe: Mapping[str, object]) -> str | None:
    """Return how the recipe of an unfinished set differs: "" if there is no set, None if not.

    Raises `ShardError` if the bucket holds a finished set of another recipe, or that of another
    program.
    """
    if bucket.info(RECIPE_NAME) is None:
        return ""
    try:
        there = parse_json_object(bucket.read(RECIPE_NAME))
    except MalformedError as error:
        raise ShardError(
            f"{bucket.url}: its {RECIPE_NAME} is not a JSON object ({error}). Choose an empty "
            "target."
        ) from None
    here = json.loads(json.dumps(recipe))
    for key in {**there, **here}:
        old, new = there.get(key), here.get(key)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = ([one for one in a if one not in b] for a, b in ((old, new), (new, old)))
        difference = f"{key} = {old!r:.300} there, {new!r:.300} now"
        if "made by" in there and bucket.info(MANIFEST_NAME) is None:
            return difference
        raise ShardError(
            f"{bucket.url}: it holds data of another recipe: {difference}. Choose an empty "
            "target, or repeat the earlier command."
        )
    return None


def _begin(bucket: Bucket, work: Path, recipe: Mapping[str, object], *, difference: str) -> None:
    """Remove what an unfinished set of another recipe has left, and write the recipe.

    Only shards that the journal lists with the bytes that the bucket has are removed. Any other
    object is an error.
    """
    rows = [line["row"] for line in _whole_lines(work / JOURNAL_NAME) if difference and line["row"]]
    keys = ("name", "size", "crc32c")
    made = [row["name"] for row in rows if is_stored(bucket, **{key: row[key] for key in keys})]
    kept = {*made, RECIPE_NAME} if difference else set()
    if other := next((blob.name for blob in bucket.list() if blob.name not in kept), None):
        before = f", and unfinished data of another recipe ({difference})" if difference else ""
        raise ShardError(
            f"{bucket.url}: it is not empty; it holds {other}{before}. Choose an empty target: "
            "shards of two data sets must not mix."
        )
    if difference:
        _log.warning(
            "%s: beginning anew, without the %d shards of an unfinished data set of another "
            "recipe (%s)",
            *(bucket.url, len(made), difference),
        )
    for name in made:
        bucket.delete(name)
    _clear(work)  # also where only the bucket was emptied: results of tasks name no recipe
    bucket.write(RECIPE_NAME, json.dumps(recipe, indent=1).encode(), overwrite=True)


def _clear(work: Path) -> None:
    for path in work.iterdir():
        if path.name != "lock":  # `exclusive_folder` removes it last, with the folder
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _finished_manifest(bucket: Bucket) -> Manifest | None:
    if bucket.info(MANIFEST_NAME) is None:
        return None
    manifest = read_manifest(bucket)
    for shard in manifest.shards:
        if shard.crc32c is None or not is_stored(
            bucket, shard.name, size=shard.size, crc32c=shard.crc32c
        ):
            raise ShardError(
                f"{bucket.url}: this data set was finished, but {shard.name} is missing or "
                f"damaged. Remove its {MANIFEST_NAME} and run the same command again."
            )
    return manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a stream's packing."""

    source: int = 0  # number of the task or file being packed
    offset: int = 0  # packed ids of it
    shard: int = 0  # number of the open shard
    filled: int = 0  # ids in the open shard
    crc32c: int = 0  # of these ids
    max_id: int = 0  # of these ids
    documents: int = 0  # that start among these ids


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """The cursor of a stream after a step, and the shard finished by the step, if any."""

    stream: str
    cursor: Cursor
    shard: Shard | None


class Journal:
    """A file of cursors and finished shards, one line each; a torn end is dropped."""

    def __init__(self, path: Path, *, dtype: np.dtype[Any]) -> None:
        self._path = path
        self.dtype = dtype
        with disk_errors(path):
            path.touch()
            self._lines = [self._line_of(content) for content in _whole_lines(path)]
            self._file = self._rewritten()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def cursor(self, stream: str) -> Cursor:
        """Return a stream's last cursor, or that of its start."""
        cursors = (line.cursor for line in reversed(self._lines) if line.stream == stream)
        return next(cursors, Cursor())

    def shards(self, stream: str) -> list[Shard]:
        """Return a stream's finished shards, in order."""
        return [line.shard for line in self._lines if line.stream == stream and line.shard]

    def note(self, stream: str, cursor: Cursor, shard: Shard | None) -> None:
        """Append a line, durably if it has a shard."""
        line = _Line(stream, cursor, shard)
        with disk_errors(self._path):
            self._file.write(_text(line))
            self._file.flush()
            if shard is not None:
                os.fsync(self._file.fileno())
        self._lines.append(line)

    def rewind(self, stream: str, *, shards: int) -> None:
        """Remove all lines of a stream after its first `shards` shards."""
        others = [line for line in self._lines if line.stream != stream]
        own = [line for line in self._lines if line.stream == stream and line.shard]
        self._lines = others + own[:shards]
        with disk_errors(self._path):
            self._file.close()
            self._file = self._rewritten()

    def _rewritten(self) -> BinaryIO:
        """Replace the file by the shards and last cursors, and open it."""
        last = {line.stream: line for line in self._lines}
        self._lines = [line for line in self._lines if line.shard or last[line.stream] is line]
        replace_file(self._path, b"".join(map(_text, self._lines)), durable=True)
        return self._path.open("ab")

    def _line_of(self, content: Mapping[str, Any]) -> _Line:
        row, shard = content["row"], None
        if row is not None:
            shard = Shard(**row, dtype=self.dtype.name)
        return _Line(content["stream"], Cursor(**content["cursor"]), shard)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a journal's lines up to the first that is not JSON: a power cut may leave zeros.

    What the dropped lines describe is packed again, to the same bytes.
    """
    with contextlib.suppress(MalformedError, FileNotFoundError):
        for text in path.read_bytes().split(b"\n")[:-1]:
            yield parse_json_object(text)


def packed_sources(work: Path, streams: Sequence[str]) -> int:
    """Return how many sources all streams have packed, by the journal of another process."""
    last = dict.fromkeys(streams, 0)
    for line in _whole_lines(work / JOURNAL_NAME):
        last[line["stream"]] = line["cursor"]["source"]
    return min(last.values())


def _text(line: _Line) -> bytes:
    row = None if line.shard is None else {name: getattr(line.shard, name) for name in _ROW_KEYS}
    content = {"stream": line.stream, "cursor": dataclasses.asdict(line.cursor), "row": row}
    return json.dumps(content).encode() + b"\n"
