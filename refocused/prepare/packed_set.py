"""A set of packed shards as a whole: what is kept of an earlier start, and its manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.stored import is_stored
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest
from refocused.prepare.packing_state import Journal
from refocused.prepare.shard_packer import ShardRow
from refocused.system.errors import ShardError

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
