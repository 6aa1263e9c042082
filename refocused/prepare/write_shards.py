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

from refocused.bucket.bucket import Bucket, crc32c_of, is_stored
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
            manifest = pack(Journal(work / JOURNAL_NAME, dtype=dtype))
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
            old, new = ([item for item in a if item not in b] for a, b in ((old, new), (new, old)))
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
    rows = [line["row"] for line in _whole_lines(work / JOURNAL_NAME) if difference]
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


Cursor = tuple[int, int]  # number of a task or file, and how many of its ids are packed


class Journal:
    """A file of finished shards, one line each; a torn end is dropped.

    A line has the `row` of a shard of a `stream`, and the `cursor` of the stream after it.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any]) -> None:
        self._path = path
        self.dtype = dtype
        with disk_errors(path):
            self._lines = list(_whole_lines(path))
            self._rewrite()

    def cursor(self, stream: str) -> Cursor:
        """Return where a stream goes on after its last finished shard."""
        source, offset = self._of(stream)[-1]["cursor"] if self._of(stream) else (0, 0)
        return source, offset

    def shards(self, stream: str) -> list[Shard]:
        """Return a stream's finished shards, in order."""
        return [Shard(**line["row"], dtype=self.dtype.name) for line in self._of(stream)]

    def note(self, stream: str, cursor: Cursor, shard: Shard) -> None:
        """Append a shard, durably."""
        row = {name: getattr(shard, name) for name in _ROW_KEYS}
        self._lines.append({"stream": stream, "cursor": cursor, "row": row})
        with disk_errors(self._path), self._path.open("ab") as file:
            file.write(_text(self._lines[-1]))
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, stream: str, *, shards: int) -> None:
        """Remove a stream's shards after its first `shards` ones."""
        others = [line for line in self._lines if line["stream"] != stream]
        self._lines = others + self._of(stream)[:shards]
        with disk_errors(self._path):
            self._rewrite()

    def _of(self, stream: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["stream"] == stream]

    def _rewrite(self) -> None:
        replace_file(self._path, b"".join(map(_text, self._lines)), durable=True)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a journal's lines up to the first that is not JSON: a power cut may leave zeros.

    What the dropped lines describe is packed again, to the same bytes.
    """
    with contextlib.suppress(MalformedError, FileNotFoundError):
        for text in path.read_bytes().split(b"\n")[:-1]:
            yield parse_json_object(text)


def packed_sources(work: Path, streams: Sequence[str]) -> int:
    """Return how many sources are in finished shards of all streams, by another's journal."""
    last = dict.fromkeys(streams, 0)
    for line in _whole_lines(work / JOURNAL_NAME):
        last[line["stream"]] = line["cursor"][0]
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
        marks = {
            "documents": ends > firsts,
            "cut": ends - firsts > room,
            "cut_in_stream": places[:-1] // length != (places[1:] - 1) // length,
        }
        self.counts.update({name: int(each.sum()) for name, each in marks.items()})
        self.counts.update(stream=end, ids=packed.size)
        return packed.ravel()


def best_fit_decreasing(sizes: list[int], *, room: int) -> list[list[int]]:
    """Return the numbers of the parts in each sequence; sizes are at most `room`."""
    sequences: list[list[int]] = []
    spaces: list[
        tuple[int, int]
    ] = []  # of sequences that are not full, and their numbers; ascending
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        fullest = bisect.bisect_left(spaces, (sizes[number],))
        is_new = fullest == len(spaces)
        space, sequence = (room, len(sequences)) if is_new else spaces.pop(fullest)
        if is_new:
            sequences.append([])
        sequences[sequence].append(number)
        if space := space - sizes[number]:
            bisect.insort(spaces, (space, sequence))
    return sequences


class ShardPacker:
    """Packs one stream of ids into shards, and stores each when it is full.

    The open shard is a local file, which the next start makes anew from the cursor of the last
    finished one. A shard that was stored but not journaled is made and stored again, which the
    bucket accepts.

    Attributes:
        kept: Shards of earlier calls that remain.
        cursor: Where the open shard begins; what lies before is in finished shards.
        source: Number of the source to add to.
        shards: Finished shards.
        counts: How documents were packed; see `BestFit`.
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

        The first bad shard and all later ones are made again.

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
        self._file: BinaryIO  # of the open shard, with figures of its ids
        self._filled = self._max_id = self._documents = 0
        self._fit: BestFit | None = None
        self.counts = Counter[str]()
        if best_fit is not None and begin_id is not None:
            self._fit = BestFit(best_fit, begin_id, dtype=journal.dtype)
            self.counts = self._fit.counts
        for number, shard in enumerate(journal.shards(stream)):
            assert shard.crc32c is not None  # it was packed here
            if not is_stored(bucket, shard.name, size=shard.size, crc32c=shard.crc32c):
                _log.warning("%s is missing or damaged; making it again", shard.name)
                bucket.delete(shard.name)
                journal.rewind(stream, shards=number)
                break
        self.kept = self.shards = len(journal.shards(stream))
        self.source, self._offset = journal.cursor(stream)
        self._skipped = self._offset - self.start  # ids of sequences that are already packed
        self._begin_shard()

    @property
    def start(self) -> int:
        """The first id of the next source to add."""
        return self._offset if self._fit is None else 0

    def add(self, ids: Ids) -> None:
        """Append ids of the next source; raise `BucketError` if they cannot be stored."""
        for some in (ids,) if self._fit is None else self._fit.add(ids):
            self._place(some)

    def _place(self, ids: Ids) -> None:
        start = min(self._skipped, len(ids))
        self._skipped -= start
        while start < len(ids):
            some = ids[start : start + self._shard_tokens - self._filled]
            begins = np.zeros(0, bool) if self._begin_id is None else some == self._begin_id
            if self._best_fit is not None:  # these are whole sequences; padding begins no document
                begins = begins[:-1] & ~begins[1:]
            self._documents += int(np.count_nonzero(begins))
            self._write(some)
            self._offset += len(some)
            start += len(some)
            if self._filled == self._shard_tokens:
                self.end_shard()

    def end_source(self) -> None:
        """Go on with the next source."""
        for some in () if self._fit is None else self._fit.rest():
            self._place(some)
        self.source, self._offset = self.source + 1, 0

    def end_shard(self) -> None:
        """Store the open shard as it is, unless it is empty."""
        if not self._filled:
            return
        if self._best_fit is not None:
            self._write(np.array([self._begin_id]))
        header = io.BytesIO()
        form = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._filled,)}
        np.lib.format.write_array_header_1_0(header, form)
        with disk_errors(self._path):
            self._file.seek(0)
            self._file.write(header.getvalue())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            size, checksum = self._path.stat().st_size, crc32c_of(self._path)
        shard = Shard(
            name=self._shard_name(self.shards),
            tokens=self._filled,
            dtype=self._dtype.name,
            size=size,
            crc32c=checksum,
            max_id=self._max_id,
            documents=None if self._begin_id is None else self._documents,
            packed_for=self._best_fit,
            document_id=None if self._best_fit is None else self._begin_id,
        )
        self._bucket.upload(self._path, shard.name, crc32c=checksum)
        self._journal.note(self._stream, (self.source, self._offset), shard)
        self.shards += 1
        self._begin_shard()

    def close(self) -> None:
        """Close the open shard's file."""
        self._file.close()

    def _write(self, ids: Ids) -> None:
        content = ids.astype(self._dtype, copy=False).tobytes()
        with disk_errors(self._path, needed_bytes=len(content)):
            self._file.write(content)
        self._filled += len(ids)
        self._max_id = max(self._max_id, int(ids.max()))

    def _begin_shard(self) -> None:
        self.cursor = self.source, self._offset
        self._filled = self._max_id = self._documents = 0
        with disk_errors(self._path):
            self._file = self._path.open("wb+")
            self._file.write(bytes(HEADER_BYTES))
