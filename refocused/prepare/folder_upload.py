"""A bucket made equal to a folder: compared by checksum, the manifest last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, Bucket, crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.stored import stored_crc32c
from refocused.bucket.transfer import Progress, map_in_threads, upload_many
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import read_manifest
from refocused.prepare.sync import Shown, SyncResult, sync_result
from refocused.system.errors import BucketError, ShardError

_NAMED = 5


def upload_folder(folder: Path, bucket: Bucket, *, threads: int, show: Shown) -> SyncResult:
    """Store a folder's files, its manifest last; what is there already is compared by checksum.

    Args:
        folder: The source; hidden and unfinished files are left out.
        bucket: The target.
        threads: Files at once.
        show: Called after each file with bytes done, bytes in all, and a note.

    Raises:
        ShardError: A file is not what the folder's manifest says, or the bucket has other bytes
            under a name; nothing is sent then.
        BucketError: The folder or the bucket cannot be used; what has arrived stays.
    """
    source = DirectoryBucket(folder)
    files = {blob.name: blob for blob in source.list()}
    if not files:
        raise ShardError(f"{folder}: it holds no files to upload. Correct the name.")
    paths = [folder / name for name in files]
    sums = dict(zip(files, map_in_threads(_crc32c_of, paths, threads=threads), strict=True))
    if MANIFEST_NAME in files:
        _check_manifest(source, files, sums)
    missing = _missing(bucket, files, sums, threads=threads)
    total = sum(blob.size for blob in files.values())
    kept = total - sum(files[name].size for name in missing)

    def progress(now: Progress) -> None:
        done = len(files) - len(missing) + now.done_objects
        show(kept + now.done_bytes, total, f"{done} of {len(files)} objects")

    progress(Progress(0, 0, 0, 0))
    sources = {name: folder / name for name in missing if name != MANIFEST_NAME}
    upload_many(bucket, sources, threads=threads, progress=progress)
    if MANIFEST_NAME in missing:
        bucket.upload(folder / MANIFEST_NAME, MANIFEST_NAME)
    return sync_result(list(files.values()), [files[name] for name in missing])


def _check_manifest(source: Bucket, files: Mapping[str, BlobInfo], sums: Mapping[str, int]) -> None:
    wrong = [
        shard.name
        for shard in read_manifest(source).shards
        if shard.name not in files
        or files[shard.name].size != shard.size
        or shard.crc32c not in (None, sums[shard.name])
    ]
    if wrong:
        raise ShardError(
            f"{source.url}: {len(wrong)} files are missing or not what {MANIFEST_NAME} says: "
            f"{_some(wrong)}. Make or fetch them again; `prepare_data verify` says more."
        )


def _crc32c_of(path: Path) -> int:
    with disk_errors(path):
        return crc32c_of(path)


def _missing(
    bucket: Bucket, files: Mapping[str, BlobInfo], sums: Mapping[str, int], *, threads: int
) -> list[str]:
    """Return the files that the bucket lacks; refuse when it has others under their names."""
    there = {blob.name: blob for blob in _listed(bucket)}

    def is_other(name: str) -> bool:
        if there[name].size != files[name].size:
            return True
        return stored_crc32c(bucket, there[name]) != sums[name]

    both = [name for name in files if name in there]
    differs = map_in_threads(is_other, both, threads=threads)
    other = [name for name, differ in zip(both, differs, strict=True) if differ]
    if other:
        raise BucketError(
            f"{bucket.url}: {len(other)} objects have other bytes than the files of their names: "
            f"{_some(other)}. Objects are not overwritten: delete them, or name another place."
        )
    return [name for name in files if name not in there]


def _listed(bucket: Bucket) -> Sequence[BlobInfo]:
    if isinstance(bucket, DirectoryBucket) and not Path(bucket.url).is_dir():
        return []
    return list(bucket.list())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
