"""Write streams of ids as shards of one size, resumable after a kill: recipe, journal, packing."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import io
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from refocused.bucket.bucket import BLOCK_BYTES, Bucket, crc32c_of, extended_crc32c, is_stored
from refocused.bucket.partial_files import disk_errors
from refocused.data.cache.local_shards import HEADER_BYTES
from refocused.data.formats.object_names import MANIFEST_NAME, RECIPE_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest, write_manifest
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder
from refocused.system.strict_json import MalformedError, parse_json_object
from refocused.tokenizers.encoders import Ids

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
        if bucket.info(MANIFEST_NAME) is not None:
            manifest = read_manifest(bucket)
            for shard in manifest.shards:
                size, checksum = shard.size, shard.crc32c
                if checksum is None or not is_stored(
                    bucket, shard.name, size=size, crc32c=checksum
                ):
                    raise ShardError(
                        f"{bucket.url}: this data set was finished, but {shard.name} is missing or "
                        f"damaged. Remove its {MANIFEST_NAME} and run the same command again."
                    )
        else:
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
        stored = parse_json_object(bucket.read(RECIPE_NAME))
    except MalformedError as error:
        raise ShardError(
            f"{bucket.url}: its {RECIPE_NAME} is not a JSON object ({error}). Choose an empty "
            "target."
        ) from None
    given = json.loads(json.dumps(recipe))
    for key in {**stored, **given}:
        old, new = stored.get(key), given.get(key)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = ([one for one in a if one not in b] for a, b in ((old, new), (new, old)))
        difference = f"{key} = {old!r:.300} there, {new!r:.300} now"
        if "made by" in stored and bucket.info(MANIFEST_NAME) is None:
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


class Journal:
    """A file of cursors and finished shards, one line each; a torn end is dropped.

    A line has the `cursor` of a `stream` after a step, and the `row` of the shard that the step
    has finished, or null.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any]) -> None:
        self._path = path
        self.dtype = dtype
        with disk_errors(path):
            path.touch()
            self._lines = list(_whole_lines(path))
            self._file = self._rewritten()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def cursor(self, stream: str) -> Cursor:
        """Return a stream's last cursor, or that of its start."""
        cursors = (line["cursor"] for line in reversed(self._lines) if line["stream"] == stream)
        return Cursor(**next(cursors, {}))

    def shards(self, stream: str) -> list[Shard]:
        """Return a stream's finished shards, in order."""
        rows = [line["row"] for line in self._lines if line["stream"] == stream and line["row"]]
        return [Shard(**row, dtype=self.dtype.name) for row in rows]

    def note(self, stream: str, cursor: Cursor, shard: Shard | None) -> None:
        """Append a line, durably if it has a shard."""
        row = shard and {name: getattr(shard, name) for name in _ROW_KEYS}
        line = {"stream": stream, "cursor": dataclasses.asdict(cursor), "row": row}
        with disk_errors(self._path):
            self._file.write(_text(line))
            self._file.flush()
            if shard is not None:
                os.fsync(self._file.fileno())
        self._lines.append(line)

    def rewind(self, stream: str, *, shards: int) -> None:
        """Remove all lines of a stream after its first `shards` shards."""
        others = [line for line in self._lines if line["stream"] != stream]
        kept = [line for line in self._lines if line["stream"] == stream and line["row"]]
        self._lines = others + kept[:shards]
        with disk_errors(self._path):
            self._file.close()
            self._file = self._rewritten()

    def _rewritten(self) -> BinaryIO:
        """Replace the file by the shards and last cursors, and open it."""
        last = {line["stream"]: line for line in self._lines}
        self._lines = [line for line in self._lines if line["row"] or last[line["stream"]] is line]
        replace_file(self._path, b"".join(map(_text, self._lines)), durable=True)
        return self._path.open("ab")


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


def _text(line: Mapping[str, object]) -> bytes:
    return json.dumps(line).encode() + b"\n"


BUFFERED_IDS = 1 << 22  # placed together: 2,048 sequences of 2,048


class BestFit:
    """Packs a stream of documents into sequences of `length` ids, in bounded memory.

    Best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): the longest document first, each in
    the fullest sequence with room for it. Only documents longer than a sequence are cut; every part
    of them begins with `begin_id`, as documents do, so that `document_mask` separates what shares a
    sequence. The same id fills sequences up: each of these attends to itself alone, and where
    documents are masked it is no label.

    Attributes:
        counts: `documents`; those `cut` here, and `cut_in_stream` by the sequences of a plain
            stream;
            ids of the `stream`; `ids` of all sequences, and `padding` among them.
    """

    def __init__(self, length: int, begin_id: int, *, dtype: np.dtype[Any]) -> None:
        self._length = length
        self._begin_id = begin_id
        self._dtype = dtype
        self._stream: list[Ids] = []
        self._buffered = 0
        self.counts = Counter[str]()

    def add(self, ids: Ids) -> Iterator[Ids]:
        """Add ids of the stream; yield a full buffer's sequences, `(sequences * length,)`."""
        self._stream.append(ids)
        self._buffered += len(ids)
        if self._buffered >= BUFFERED_IDS:
            yield self._packed(is_end=False)

    def rest(self) -> Iterator[Ids]:
        """Yield the sequences of what is left at the end of the stream."""
        yield self._packed(is_end=True)

    def _packed(self, *, is_end: bool) -> Ids:
        """Pack the buffer, but keep its last document if that may go on and is not all of it."""
        empty = np.empty(0, self._dtype)
        stream = np.concatenate([empty, *self._stream], dtype=self._dtype, casting="unsafe")
        borders = np.flatnonzero(stream == self._begin_id)
        end = len(stream) if is_end or not borders[-1:].any() else int(borders[-1])
        self._stream, self._buffered = [stream[end:]], len(stream) - end
        borders = np.unique([0, *borders[borders < end], end])
        starts, ends = borders[:-1], borders[1:]
        firsts = starts + (stream[starts] == self._begin_id)
        length, room = self._length, self._length - 1
        parts = [
            (start, min(start + room, stop))
            for first, stop in zip(firsts.tolist(), ends.tolist(), strict=True)
            for start in range(first, stop, room)
        ]
        sequences = best_fit_decreasing([stop - start + 1 for start, stop in parts], room=length)
        packed = np.full((len(sequences), length), self._begin_id, self._dtype)
        for row, numbers in zip(packed, sorted(map(sorted, sequences)), strict=True):
            at = 0
            for start, stop in (parts[number] for number in numbers):
                row[at + 1 : at + 1 + stop - start] = stream[start:stop]
                at += 1 + stop - start
            self.counts["padding"] += length - at
        places = borders + self.counts["stream"]
        found = {
            "documents": ends > firsts,
            "cut": ends - firsts > room,
            "cut_in_stream": places[:-1] // length != (places[1:] - 1) // length,
        }
        self.counts.update({name: int(each.sum()) for name, each in found.items()})
        self.counts.update(stream=end, ids=packed.size)
        return packed.ravel()


def best_fit_decreasing(sizes: list[int], *, room: int) -> list[list[int]]:
    """Return the numbers of the parts in each sequence; sizes are at most `room`."""
    sequences: list[list[int]] = []
    spaces: list[
        tuple[int, int]
    ] = []  # of sequences that are not full, and their numbers; ascending
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, (sizes[number],))
        is_new = place == len(spaces)
        space, sequence = (room, len(sequences)) if is_new else spaces.pop(place)
        if is_new:
            sequences.append([])
        sequences[sequence].append(number)
        if space := space - sizes[number]:
            bisect.insort(spaces, (space, sequence))
    return sequences


class ShardPacker:
    """Packs one stream of ids into shards, and stores each when it is full.

    The open shard is a local file. If it is ahead of the journal's last cursor, the next start
    truncates it. A shard that was stored but not journaled is made and stored again, which the
    bucket accepts.
    """

    def __init__(
        self,
        bucket: Bucket,
        journal: Journal,
        stream: str,
        *,
        folder: Path,
        name: str,
        shard_name: Callable[[int], str],
        shard_tokens: int,
        begin_id: int | None,
        best_fit: int | None = None,
    ) -> None:
        """Verify the shards in the journal, and continue after them.

        The first bad shard and all later ones are made again, as is a damaged open shard. `kept`
        is the number of finished shards that remain.

        Args:
            bucket: Receives the shards.
            journal: May be shared with other streams, by the name of the `stream`.
            folder: Local folder of the open shard, whose file is called `name`.
            shard_name: Returns the object name of a shard by its number.
            shard_tokens: Ids of a full shard.
            begin_id: Id that starts a document; None: documents are unknown.
            best_fit: Sequence length to pack each source's documents for; needs `begin_id`. A shard
                then has whole sequences, and one more id: the last one's last label.
        """
        self._bucket = bucket
        self._journal = journal
        self._stream = stream
        self._path = folder / f"{name}.open"
        self._shard_name = shard_name
        self._best_fit = best_fit
        self._shard_tokens = shard_tokens // (best_fit or 1) * (best_fit or 1)
        self._dtype = journal.dtype
        self._begin_id = begin_id
        self.kept = self._verified()
        self.cursor = journal.cursor(stream)
        self._fit: BestFit | None = None
        self.counts = Counter[str]()  # how documents were packed; see `BestFit`
        if best_fit is not None and begin_id is not None:
            self._fit = BestFit(best_fit, begin_id, dtype=journal.dtype)
            self.counts = self._fit.counts
        self._skipped = self.cursor.offset - self.start  # ids of sequences that are already packed
        with disk_errors(self._path):
            self._file = self._reopened()

    def _verified(self) -> int:
        shards = self._journal.shards(self._stream)
        kept = len(shards)
        for number, shard in enumerate(shards):
            assert shard.crc32c is not None  # it was packed here
            if not is_stored(self._bucket, shard.name, size=shard.size, crc32c=shard.crc32c):
                _log.warning("%s is missing or damaged; making it again", shard.name)
                self._bucket.delete(shard.name)
                self._journal.rewind(self._stream, shards=number)
                kept = number
                break
        cursor = self._journal.cursor(self._stream)
        left, checksum = cursor.filled * self._dtype.itemsize, 0
        if left and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(HEADER_BYTES)
                while left and (block := file.read(min(left, BLOCK_BYTES))):
                    checksum = extended_crc32c(checksum, block)
                    left -= len(block)
        if left or checksum != cursor.crc32c:
            _log.warning("The unfinished shard of %s is damaged; making it again", self._path.stem)
            self._journal.rewind(self._stream, shards=kept)
        return kept

    @property
    def start(self) -> int:
        """The first id of the source at the cursor to add."""
        return self.cursor.offset if self._fit is None else 0

    def add(self, ids: Ids) -> None:
        """Append ids of the source at the cursor; raise `BucketError` if they cannot be stored."""
        for some in (ids,) if self._fit is None else self._fit.add(ids):
            self._place(some)

    def _place(self, ids: Ids) -> None:
        start = min(self._skipped, len(ids))
        self._skipped -= start
        while start < len(ids):
            room = self._shard_tokens - self.cursor.filled
            self._append(ids[start : start + room])
            start += room
            if self.cursor.filled == self._shard_tokens:
                self.end_shard()

    def end_source(self) -> None:
        """Journal that a source is packed; the cursor's checksum replaces an fsync."""
        for some in () if self._fit is None else self._fit.rest():
            self._place(some)
        with disk_errors(self._path):
            self._file.flush()
        self.cursor = dataclasses.replace(self.cursor, source=self.cursor.source + 1, offset=0)
        self._journal.note(self._stream, self.cursor, None)

    def end_shard(self) -> None:
        """Store the open shard as it is, unless it is empty."""
        if not self.cursor.filled:
            return
        if self._best_fit is not None:
            offset = self.cursor.offset
            self._append(np.array([self._begin_id]))
            self.cursor = dataclasses.replace(self.cursor, offset=offset)
        done = self.cursor
        header = io.BytesIO()
        form = {"descr": self._dtype.str, "fortran_order": False, "shape": (done.filled,)}
        np.lib.format.write_array_header_1_0(header, form)
        with disk_errors(self._path):
            self._file.seek(0)
            self._file.write(header.getvalue())
            self._file.flush()
            os.fsync(self._file.fileno())
            size, checksum = self._path.stat().st_size, crc32c_of(self._path)
        shard = Shard(
            name=self._shard_name(done.shard),
            tokens=done.filled,
            dtype=self._dtype.name,
            size=size,
            crc32c=checksum,
            max_id=done.max_id,
            documents=None if self._begin_id is None else done.documents,
            packed_for=self._best_fit,
            document_id=None if self._best_fit is None else self._begin_id,
        )
        self._bucket.upload(self._path, shard.name, crc32c=checksum)
        self.cursor = Cursor(done.source, done.offset, shard=done.shard + 1)
        self._journal.note(self._stream, self.cursor, shard)
        with disk_errors(self._path):
            self._file.close()
            self._file = self._reopened()

    def close(self) -> None:
        """Close the open shard's file; it stays for the next start."""
        self._file.close()

    def _append(self, ids: Ids) -> None:
        content = ids.astype(self._dtype, copy=False).tobytes()
        with disk_errors(self._path, needed_bytes=len(content)):
            self._file.write(content)
        before = self.cursor
        begins = np.zeros(0, bool) if self._begin_id is None else ids == self._begin_id
        if self._best_fit is not None:  # these are whole sequences; padding begins no document
            begins = begins[:-1] & ~begins[1:]
        self.cursor = dataclasses.replace(
            before,
            offset=before.offset + len(ids),
            filled=before.filled + len(ids),
            crc32c=extended_crc32c(before.crc32c, content),
            max_id=max(before.max_id, int(ids.max())),
            documents=before.documents + int(np.count_nonzero(begins)),
        )

    def _reopened(self) -> BinaryIO:
        """Open the file of the open shard, truncated to the cursor."""
        if not self.cursor.filled:
            file = self._path.open("wb+")
            file.write(bytes(HEADER_BYTES))
            return file
        file = self._path.open("rb+")
        file.truncate(HEADER_BYTES + self.cursor.filled * self._dtype.itemsize)
        file.seek(0, os.SEEK_END)
        return file
