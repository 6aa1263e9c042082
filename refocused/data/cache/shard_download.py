"""One shard's way from the bucket to a finished local file; each failure says if it may pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from pathlib import Path

from refocused.bucket.bucket import Bucket, crc32c_of
from refocused.data.cache.local_form import write_local_form
from refocused.data.cache.local_shards import LocalShards
from refocused.data.cache.shared_jobs import Job
from refocused.data.manifest.shard_manifest import Shard
from refocused.system.atomic_files import begin_write_back
from refocused.system.errors import BucketError, ShardError

SMALLEST_RANGE_BYTES = 1 << 20  # below this, the latency of a request costs most of its time
LARGEST_RANGE_BYTES = 1 << 23


class PassingError(BucketError):
    """The bucket cannot be reached now; the same request may work later."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A shard on its way.

    Attributes:
        bucket: Where it comes from.
        local: Where it goes.
        index: Which one.
        folder: Existing folder for unfinished files, on the same disk.
    """

    bucket: Bucket
    local: LocalShards
    index: int
    folder: Path

    @property
    def shard(self) -> Shard:
        """What the manifest says of it."""
        return self.local.manifest.shards[self.index]

    def jobs(self, *, ways: int) -> list[Job]:
        """Return what brings its files, in any order and at once.

        A file that an earlier attempt brought is not brought again.

        Args:
            ways: Ranges that a large lone file is divided into, so that as many threads can
                bring it; 1: it comes whole.
        """
        files = self.shard.files
        divisible = len(files) == 1 and self.shard.crc32c is not None
        if divisible and ways > 1 and self.shard.size >= 2 * SMALLEST_RANGE_BYTES:
            return self._ranges(ways)
        return [
            functools.partial(_download, self.bucket, file, path)
            for file, path in zip(files, self._paths(), strict=True)
            if not path.exists() and self._in_place(file) is None
        ]

    def finish(self) -> None:
        """Turn what was brought into the local form, and publish it.

        Raises:
            PassingError: The bucket cannot be reached now.
            ShardError: The object is gone, has changed, is corrupt, or does not fit the run.
        """
        shard, paths = self.shard, self._paths()
        finished = self.folder / f"{self.index}.npy"
        if self._ranged.exists():
            self._join(paths[0])
        sources = self._sources()
        try:
            max_id = write_local_form(
                sources,
                finished,
                shard=shard,
                data=self.local.data(self.index),
                vocabulary=self.local.vocabulary,
            )
            if self._sources() != sources:
                _explain(self.bucket, shard, BucketError("it changed while it was read."))
            for path in paths:  # nothing that may wait for the disk comes after the publishing
                path.unlink(missing_ok=True)
            self.local.publish(self.index, finished, max_id=max_id)
        except OSError as error:
            raise ShardError(
                f"{shard.name}: {error} while it was written below {self.local.folder}. Free "
                "space there, or set data.cache to another disk."
            ) from None
        finally:
            for path in (finished, *paths):
                path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        count = len(self.shard.files)
        return [self.folder / f"{self.index}.{part}.object" for part in range(count)]

    def _sources(self) -> list[Path]:
        """Return the shard's files: what was brought, else what is read in place."""
        return [
            path if path.exists() else self._in_place(file) or path
            for file, path in zip(self.shard.files, self._paths(), strict=True)
        ]

    def _in_place(self, file: Shard) -> Path | None:
        """Return a file of this machine that is converted from where it lies, if it is one.

        A `.npy` may have the local form already: its copy is then all that is made, and is moved.
        """
        return None if file.name.endswith(".npy") else self.bucket.local_file(file.blob)

    @property
    def _ranged(self) -> Path:
        return self.folder / f"{self.index}.ranges"

    def _ranges(self, ways: int) -> list[Job]:
        size = self.shard.size
        length = min(max(-(-size // ways), SMALLEST_RANGE_BYTES), LARGEST_RANGE_BYTES)
        with self._ranged.open("wb") as file:
            file.truncate(size)
        return [
            functools.partial(self._read_range, start, min(length, size - start))
            for start in range(0, size, length)
        ]

    def _read_range(self, start: int, length: int) -> None:
        try:
            content = self.bucket.read(self.shard.name, start=start, length=length)
        except BucketError as error:
            _explain(self.bucket, self.shard, error)
        with self._ranged.open("r+b") as file:
            file.seek(start)
            file.write(content)
            file.flush()
            begin_write_back(file.fileno(), start, len(content))

    def _join(self, path: Path) -> None:
        """Take the ranges for the object when they have its checksum; otherwise fetch it whole.

        No range is checked by itself, and each may be of another version of the object.
        """
        if crc32c_of(self._ranged) == self.shard.crc32c:
            self._ranged.replace(path)
            return
        self._ranged.unlink()
        _download(self.bucket, self.shard, path)


def require_space(local: LocalShards, index: int, *, free_bytes: int) -> None:
    """Refuse a fetch that the disk has no room for.

    Raises:
        ShardError: The download and the local form do not fit into `free_bytes`.
    """
    shard = local.manifest.shards[index]
    needed = shard.size + local.bytes(index)
    if needed > free_bytes:
        raise ShardError(
            f"{shard.name}: {needed:,} bytes are needed below {local.folder} for the download and "
            f"the local form, and {max(free_bytes, 0):,} are free. Free space there, set "
            "data.cache to another disk, or lower data.disk_limit_gb."
        )


def free_bytes(folder: Path) -> int:
    """Return what may still be written on a folder's disk: what is free but 5 % of the disk."""
    usage = shutil.disk_usage(folder)
    return usage.free - usage.total // 20


def progress_in(folder: Path) -> int:
    """Return a number that changes when bytes arrive, into holes of a file too."""
    found = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # finished since it was listed
            status = path.stat()
            found += status.st_size + status.st_blocks
    return found


def _download(bucket: Bucket, shard: Shard, target: Path) -> None:
    try:
        bucket.download(shard.blob, target)
    except BucketError as error:
        _explain(bucket, shard, error)
    size = target.stat().st_size
    if size != shard.size:
        raise ShardError(
            f"{shard.name}: {size:,} bytes arrived where the listing promised {shard.size:,}. "
            "Start again to list the bucket anew, or put its name in data.skip."
        )


def _explain(bucket: Bucket, shard: Shard, error: BucketError) -> None:
    """Tell an object that is gone, changed or corrupt from a bucket that is out of reach."""
    try:
        now = bucket.info(shard.name)
    except BucketError:
        raise PassingError(str(error)) from None
    if now is None:
        raise ShardError(
            f"{shard.name}: the object is gone from {bucket.url}. Upload it again, or put its name "
            "in data.skip."
        ) from None
    known = now.crc32c is not None and shard.crc32c is not None
    if now.size != shard.size or (known and now.crc32c != shard.crc32c):
        raise ShardError(
            f"{shard.name}: the object in {bucket.url} changed since it was listed: {now.size:,} "
            f"bytes, not {shard.size:,}, or other content. Start again to list the bucket anew."
        ) from None
    raise ShardError(
        f"{shard.name}: it cannot be read whole from {bucket.url}: {error} "
        "If the object itself is corrupt, upload it again or put its name in data.skip."
    ) from None
