"""One shard's way from the bucket to a finished local file; each failure says if it may pass."""

from __future__ import annotations

import shutil
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.errors import BucketError, ShardError
from refocused.shards.local_form import write_local_form
from refocused.shards.local_shards import LocalShards
from refocused.shards.manifest import Shard


class PassingError(BucketError):
    """The bucket cannot be reached now; the same request may work later."""


def bring(bucket: Bucket, local: LocalShards, index: int, *, folder: Path) -> None:
    """Download one shard, turn it into the local form, and publish it.

    Args:
        bucket: Where it comes from.
        local: Where it goes.
        index: Which one.
        folder: Existing folder for unfinished files, on the same disk.

    Raises:
        PassingError: The bucket cannot be reached now.
        ShardError: The object is gone, has changed, is corrupt, or does not fit the run.
    """
    shard = local.manifest.shards[index]
    downloaded, finished = folder / f"{index}.object", folder / f"{index}.npy"
    try:
        _download(bucket, shard, downloaded)
        max_id = write_local_form(
            downloaded, finished, shard=shard, data=local.data(index), vocabulary=local.vocabulary
        )
        local.publish(index, finished, max_id=max_id)
    except OSError as error:
        raise ShardError(
            f"{shard.name}: {error} while it was written below {local.folder}. Free space there, "
            "or set data.cache to another disk."
        ) from None
    finally:
        downloaded.unlink(missing_ok=True)
        finished.unlink(missing_ok=True)


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


def _download(bucket: Bucket, shard: Shard, target: Path) -> None:
    try:
        bucket.download(shard.blob, target)
    except BucketError as error:
        _explain(bucket, shard, error)
    size = target.stat().st_size
    if size != shard.size:
        raise ShardError(
            f"{shard.name}: {size:,} bytes arrived where the listing promised {shard.size:,}. "
            "Start again to list the bucket anew, or put its name in data.exclude."
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
            "in data.exclude."
        ) from None
    known = now.crc32c is not None and shard.crc32c is not None
    if now.size != shard.size or (known and now.crc32c != shard.crc32c):
        raise ShardError(
            f"{shard.name}: the object in {bucket.url} changed since it was listed: {now.size:,} "
            f"bytes, not {shard.size:,}, or other content. Start again to list the bucket anew."
        ) from None
    raise ShardError(
        f"{shard.name}: it cannot be read whole from {bucket.url}: {error} "
        "If the object itself is corrupt, upload it again or put its name in data.exclude."
    ) from None
