"""A folder made equal to a bucket: verified whole, and continued after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from refocused.bucket.bucket import BlobInfo, Bucket, crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.object_files import object_files
from refocused.bucket.partial_files import disk_errors, part_path
from refocused.bucket.stored import stored_crc32c, with_checksum
from refocused.bucket.transfer import Progress, download_many, map_in_threads
from refocused.data.formats.object_names import (
    MANIFEST_NAME,
    METADATA_NAME,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    matches,
)
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder
from refocused.system.strict_json import MalformedError, parse_json_object

INDEX_FOLDER = ".sync"
TICK_SECONDS = 0.5

Shown = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class SyncResult:
    """What was done.

    Attributes:
        objects: Objects that are equal on both sides now.
        bytes: Of them.
        moved_objects: Those that this start moved.
        moved_bytes: Of them.
        size_only: Those that were moved and compared by size only: their source keeps no checksums.
    """

    objects: int
    bytes: int
    moved_objects: int
    moved_bytes: int
    size_only: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which objects are meant.

    Attributes:
        include: Glob patterns; empty: all.
        exclude: Glob patterns of those left out.
        max_files: The first so many token and text files in name order; None: all. What else there
            is comes with them.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_files: int | None = None

    def chosen(self, blobs: Iterable[BlobInfo]) -> list[BlobInfo]:
        """Return the objects that are meant, in name order."""
        wanted = [
            blob
            for blob in sorted(blobs, key=lambda blob: blob.name)
            if (not self.include or matches(blob.name, self.include))
            and not matches(blob.name, self.exclude)
        ]
        data = [blob for blob in wanted if _is_data(blob.name)][: self.max_files]
        others = [blob for blob in wanted if not _is_data(blob.name)]
        return sorted(data + others, key=lambda blob: blob.name)


def sync_folder(
    bucket: Bucket, folder: Path, *, selection: Selection, threads: int, show: Shown
) -> SyncResult:
    """Fetch what a folder lacks; what it has is compared by checksum, never by its name alone.

    A manifest comes last. When only some of its shards are fetched, the folder gets one of these.

    Args:
        bucket: The source.
        folder: The target; made when missing.
        selection: Which objects.
        threads: Objects at once.
        show: Called now and then with bytes done, bytes in all, and a note.

    Raises:
        BucketError: The source cannot be read, two objects would be one file, or the disk is full;
            what has arrived stays.
        ShardError: Nothing is meant, or another process syncs to the folder.
    """
    ours = f"{INDEX_FOLDER}/"  # objects of that name are the records of a sync to elsewhere
    listing = {blob.name: blob for blob in bucket.list() if not blob.name.startswith(ours)}
    chosen = selection.chosen(listing.values())
    if not chosen:
        raise ShardError(
            f"{bucket.url}: none of its {len(listing):,} objects is meant. Correct the address, or "
            "--include and --exclude."
        )
    chosen = _without_incomplete_chunks(chosen, listing)
    object_files((blob.name for blob in chosen), folder, where=bucket.url)
    data = [blob for blob in chosen if blob.name != MANIFEST_NAME]
    with exclusive_folder(folder / INDEX_FOLDER):
        data = map_in_threads(functools.partial(with_checksum, bucket), data, threads=threads)
        index = _Index(folder, bucket)
        there = map_in_threads(index.has, data, threads=threads)
        missing = [blob for blob, has in zip(data, there, strict=True) if not has]
        lacking = {blob.name for blob in missing}
        index.write([blob for blob in data if blob.name not in lacking])
        has_manifest = MANIFEST_NAME in {blob.name for blob in chosen}
        if has_manifest:  # its module takes 0.3 s to import: while bytes arrive
            module = ("refocused.data.manifest.shard_manifest",)
            threading.Thread(target=importlib.import_module, args=module, daemon=True).start()
        _fetch(bucket, missing, folder, data=data, threads=threads, show=show)
        index.write(data)
        if has_manifest:
            _fetch_manifest(bucket, folder, {blob.name for blob in data})
    size_only = sum(blob.crc32c is None for blob in missing)
    return dataclasses.replace(sync_result(data, missing), size_only=size_only)


class _Index:
    """What the folder is known to hold: a row for each file, believed while its times stand.

    A file without a row, or that changed since, is read and compared by checksum: a kill between a
    file and its row costs a look, and no second download.
    """

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self._folder = folder
        self._bucket = bucket
        self._path = folder / INDEX_FOLDER / "index.json"
        self._rows: dict[str, list[int]] = {}  # size, modification time in ns, CRC-32C
        with contextlib.suppress(FileNotFoundError, MalformedError):
            self._rows = parse_json_object(self._path.read_bytes())

    def has(self, blob: BlobInfo) -> bool:
        """Whether the folder has an object's bytes."""
        path = self._folder / blob.name
        with disk_errors(path):
            if not path.is_file() or path.stat().st_size != blob.size:
                return False
        return self._checksum(path, blob.name) == stored_crc32c(self._bucket, blob)

    def write(self, blobs: Iterable[BlobInfo]) -> None:
        """Keep rows of objects that the folder has, verified."""
        rows = {}
        for blob in blobs:
            path = self._folder / blob.name
            known = blob.crc32c
            checksum = self._checksum(path, blob.name) if known is None else known
            rows[blob.name] = [blob.size, path.stat().st_mtime_ns, checksum]
        with disk_errors(self._path):
            replace_file(self._path, json.dumps(rows).encode())

    def _checksum(self, path: Path, name: str) -> int:
        status = path.stat()
        row = self._rows.get(name)
        if row is not None and row[:2] == [status.st_size, status.st_mtime_ns]:
            return row[2]
        return crc32c_of(path)


def _fetch(
    bucket: Bucket,
    missing: Sequence[BlobInfo],
    folder: Path,
    *,
    data: Sequence[BlobInfo],
    threads: int,
    show: Shown,
) -> None:
    total = sum(blob.size for blob in data)
    kept = total - sum(blob.size for blob in missing)
    count = len(data) - len(missing)
    done = Progress(0, 0, 0, 0)

    def progress(now: Progress) -> None:
        nonlocal done
        done = now

    def tick() -> None:
        parts = sum(_size(part_path(folder / blob.name)) for blob in missing)
        objects = f"{count + done.done_objects} of {len(data)} objects"
        show(min(kept + done.done_bytes + parts, total), total, objects)

    with _ticking(tick):
        download_many(bucket, missing, folder, threads=threads, progress=progress)


@contextlib.contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call something at the start, now and then meanwhile, and at the end."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(TICK_SECONDS):
            tick()

    tick()
    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    tick()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _without_incomplete_chunks(
    chosen: Sequence[BlobInfo], listing: Mapping[str, BlobInfo]
) -> list[BlobInfo]:
    """Leave out metadata that promise chunks which are not meant: they would be missed."""
    names = {blob.name for blob in chosen}
    left_out = {
        PurePosixPath(name).parent for name in listing if _is_data(name) and name not in names
    }
    return [
        blob
        for blob in chosen
        if PurePosixPath(blob.name).name != METADATA_NAME
        or PurePosixPath(blob.name).parent not in left_out
    ]


def _fetch_manifest(bucket: Bucket, folder: Path, names: set[str]) -> None:
    """Write the manifest of what the folder has of the source's shards."""
    from refocused.data.manifest.shard_manifest import manifest_to_json, read_manifest

    manifest = read_manifest(bucket)
    here = tuple(shard for shard in manifest.shards if shard.name in names)
    text = manifest_to_json(dataclasses.replace(manifest, shards=here))
    DirectoryBucket(folder).write(MANIFEST_NAME, text.encode(), overwrite=True)


def _is_data(name: str) -> bool:
    return name.endswith((*TOKEN_SUFFIXES, ".idx", *TEXT_SUFFIXES))


def sync_result(blobs: Sequence[BlobInfo], moved: Sequence[BlobInfo]) -> SyncResult:
    """Count objects, and those of them that were moved."""
    return SyncResult(
        objects=len(blobs),
        bytes=sum(blob.size for blob in blobs),
        moved_objects=len(moved),
        moved_bytes=sum(blob.size for blob in moved),
    )
