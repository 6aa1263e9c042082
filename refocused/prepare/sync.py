"""Copy a bucket to a folder or a folder to a bucket, by checksum and with the manifest last."""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from refocused.bucket.bucket import (
    BlobInfo,
    Bucket,
    crc32c_of,
    is_same_file,
    stored_crc32c,
    with_checksum,
)
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.transfer import download_many, map_in_threads, object_files, upload_many
from refocused.data.formats.object_names import MANIFEST_NAME, METADATA_NAME, fits, is_data, matches
from refocused.system.atomic_files import replace_file
from refocused.system.errors import BucketError, ShardError
from refocused.system.locks import exclusive_folder
from refocused.system.strict_json import MalformedError, parse_json_object

# The modules of manifests take 0.3 s to import, so they are imported on use.

INDEX_FOLDER = ".sync"
_SHOWN_NAMES = 5

Show = Callable[[int, int, str], None]  # bytes done, bytes in all, and a note


@dataclasses.dataclass(frozen=True, slots=True)
class SyncResult:
    """Objects that are equal on both sides, and those moved by this call."""

    objects: int
    bytes: int
    moved_objects: int
    moved_bytes: int
    size_only: int = 0  # moved, but compared by size only: their source keeps no checksums


def sync_folder(
    bucket: Bucket,
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_files: int | None = None,
    threads: int,
    show: Show,
) -> SyncResult:
    """Download the objects that a folder lacks; existing files are compared by checksum.

    The manifest comes last. If only some of its shards are selected, it is limited to these; it is
    an error if the source lacks a selected one or has another. `show` is called after each object.
    `include` (all, if empty) and `exclude` are glob patterns; `max_files` limits token and text
    files, in name order.

    Raises:
        BucketError: The source cannot be read, two objects would be one file, or the disk is full.
            Completed files stay.
        ShardError: Nothing is selected, objects differ from the source's manifest, or another
            process syncs to the folder.
    """
    index_prefix = f"{INDEX_FOLDER}/"  # the index of another sync may have been uploaded
    listing = {blob.name: blob for blob in bucket.list() if not blob.name.startswith(index_prefix)}
    manifest = None
    if MANIFEST_NAME in listing and not matches(MANIFEST_NAME, exclude):
        from refocused.data.manifest import shard_manifest

        manifest = shard_manifest.read_manifest(bucket)
    rows = {shard.name: shard for shard in manifest.shards} if manifest else {}
    names = sorted({*listing, *rows})
    names = [name for name in names if fits(name, include=include, exclude=exclude)]
    left_out = set([name for name in names if is_data(name)][max_files:] if max_files else ())
    names = [name for name in names if name not in left_out]
    chosen = [listing[name] for name in names if name in listing]
    if not chosen:
        raise ShardError(
            f"{bucket.url}: none of its {len(listing):,} objects is selected. Correct the address, "
            "--include or --exclude."
        )
    # Leave out metadata of chunks that are not all selected: the others would count as missing.
    others = listing.keys() - {blob.name for blob in chosen}
    incomplete = {PurePosixPath(name).parent / METADATA_NAME for name in others if is_data(name)}
    chosen = [blob for blob in chosen if PurePosixPath(blob.name) not in incomplete]
    reserved = f"{INDEX_FOLDER}/index.json"  # this folder's own
    object_files([*(blob.name for blob in chosen), reserved], folder, where=bucket.url)
    data = [blob for blob in chosen if blob.name != MANIFEST_NAME]
    has_manifest = len(data) < len(chosen)
    index = _Index(folder, bucket)
    data = map_in_threads(index.described, data, threads=threads)
    shards = tuple(rows[name] for name in names if name in rows)
    if manifest is not None:
        remote, way_out = {blob.name: blob for blob in data}, shard_manifest.EXCLUDE
        shard_manifest.check_listing(shards, remote, url=bucket.url, way_out=way_out)
        for number, blob in enumerate(data):
            if blob.name in rows and blob.crc32c is None:  # the store may keep none
                data[number] = dataclasses.replace(blob, crc32c=rows[blob.name].crc32c)
    with exclusive_folder(folder / INDEX_FOLDER):
        is_local = map_in_threads(index.has, data, threads=threads)
        missing = [blob for blob, has in zip(data, is_local, strict=True) if not has]
        index.write([blob for blob, has in zip(data, is_local, strict=True) if has], {})
        progress = _reporter(data, missing, show)
        sums = download_many(bucket, missing, folder, threads=threads, progress=progress)
        index.write(data, sums)
        if has_manifest and manifest is not None:
            selected = dataclasses.replace(manifest, shards=shards)
            shard_manifest.write_manifest(DirectoryBucket(folder), selected)
    return _result(data, missing)


class _Index:
    """Checksums of the folder's files, each valid while size and modification time are unchanged.

    Other files are read and compared by checksum, so that a kill between a file and its row costs
    a read but no second download. A row is also the checksum of the generation that was downloaded,
    so that an unchanged object is neither described nor read again.
    """

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self._folder = folder
        self._bucket = bucket
        self._path = folder / INDEX_FOLDER / "index.json"
        # Size, modification time in ns, CRC-32C, and the object's generation as text.
        self._rows: dict[str, list[Any]] = {}
        with contextlib.suppress(FileNotFoundError, MalformedError):
            self._rows = parse_json_object(self._path.read_bytes())

    def described(self, blob: BlobInfo) -> BlobInfo:
        """Return an object with its checksum, as far as the store or this index has it."""
        row, known = self._rows.get(blob.name, []), [blob.size, str(blob.generation)]
        if blob.crc32c is None and blob.generation is not None and row[:1] + row[3:] == known:
            return dataclasses.replace(blob, crc32c=row[2])
        return with_checksum(self._bucket, blob)

    def has(self, blob: BlobInfo) -> bool:
        path = self._folder / blob.name
        with disk_errors(path):
            if not path.is_file() or path.stat().st_size != blob.size:
                return False
            checksum = self._checksum(path, blob.name)
        return is_same_file(self._bucket, blob, path, crc32c=checksum)

    def write(self, blobs: Iterable[BlobInfo], sums: Mapping[str, int]) -> None:
        """Replace the rows by those of verified objects; `sums` has those just downloaded."""
        rows = {}
        for blob in blobs:
            path = self._folder / blob.name
            known = sums.get(blob.name, blob.crc32c)
            checksum = self._checksum(path, blob.name) if known is None else known
            rows[blob.name] = [blob.size, path.stat().st_mtime_ns, checksum, str(blob.generation)]
        with disk_errors(self._path):
            replace_file(self._path, json.dumps(rows).encode())

    def _checksum(self, path: Path, name: str) -> int:
        status = path.stat()
        row = self._rows.get(name)
        if row is not None and row[:2] == [status.st_size, status.st_mtime_ns]:
            return int(row[2])
        return crc32c_of(path)


def upload_folder(folder: Path, bucket: Bucket, *, threads: int, show: Show) -> SyncResult:
    """Upload a folder's files, its manifest last; existing objects are compared by checksum.

    Hidden and unfinished files are left out. `show` is called after each file.

    Raises:
        ShardError: A file differs from the folder's manifest; nothing was uploaded.
        BucketError: The bucket has other bytes under a name; nothing was uploaded. Or the folder
            or the bucket cannot be used; completed objects stay.
    """
    source = DirectoryBucket(folder)
    files = {blob.name: blob for blob in source.list()}
    if not files:
        raise ShardError(f"{folder}: it holds no files to upload. Correct the path.")
    checksum = functools.partial(stored_crc32c, source)
    checksums = map_in_threads(checksum, list(files.values()), threads=threads)
    sums = dict(zip(files, checksums, strict=True))
    if MANIFEST_NAME in files:
        from refocused.data.manifest.shard_manifest import check_listing, read_manifest

        local = {name: dataclasses.replace(blob, crc32c=sums[name]) for name, blob in files.items()}
        shards, way_out = read_manifest(source).shards, "download them again"
        check_listing(shards, local, url=source.url, way_out=way_out)
    is_new = isinstance(bucket, DirectoryBucket) and not Path(bucket.url).is_dir()
    stored = {} if is_new else {blob.name: blob for blob in bucket.list()}

    def is_same(name: str) -> bool:
        return is_same_file(bucket, stored[name], folder / name, crc32c=sums[name])

    both = [name for name in sums if name in stored]
    same = map_in_threads(is_same, both, threads=threads)
    if other := [name for name, is_equal in zip(both, same, strict=True) if not is_equal]:
        more = f" and {len(other) - _SHOWN_NAMES:,} more" if len(other) > _SHOWN_NAMES else ""
        raise BucketError(
            f"{bucket.url}: {len(other)} objects have other bytes than the files of their names: "
            f"{', '.join(other[:_SHOWN_NAMES])}{more}. Objects are not overwritten: delete them, "
            "or choose another target."
        )
    missing = [name for name in sums if name not in stored]
    blobs, moved = list(files.values()), [files[name] for name in missing]
    sources = {name: folder / name for name in missing if name != MANIFEST_NAME}
    upload_many(bucket, sources, threads=threads, progress=_reporter(blobs, moved, show))
    if MANIFEST_NAME in missing:
        bucket.upload(folder / MANIFEST_NAME, MANIFEST_NAME)
    return dataclasses.replace(_result(blobs, moved), size_only=0)


def _reporter(
    blobs: Sequence[BlobInfo], missing: Sequence[BlobInfo], show: Show
) -> Callable[[int, int], None]:
    """Return a progress callback that counts objects already present as done."""
    total, counted = sum(blob.size for blob in blobs), itertools.count(len(blobs) - len(missing))
    kept = total - sum(blob.size for blob in missing)

    def progress(done_bytes: int, _moved_bytes: int) -> None:
        show(kept + done_bytes, total, f"{next(counted)} of {len(blobs)} objects")

    progress(0, 0)
    return progress


def _result(blobs: Sequence[BlobInfo], moved: Sequence[BlobInfo]) -> SyncResult:
    sizes, moved_sizes = ([blob.size for blob in some] for some in (blobs, moved))
    size_only = sum(blob.crc32c is None and not blob.checksum for blob in moved)
    return SyncResult(len(sizes), sum(sizes), len(moved_sizes), sum(moved_sizes), size_only)
