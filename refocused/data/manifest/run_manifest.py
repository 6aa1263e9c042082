"""Folders of `chunk_NNNNNN.pt` as few long shards: which chunks are local as one."""

from __future__ import annotations

import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.select_files import is_validation
from refocused.data.manifest.shard_manifest import Manifest, Shard, build_manifest

# As uint16 16 MiB: at windows of 2,048 tokens, 0.012 % are left over at the ends, where a chunk of
# 32,768 leaves 6 %; and the first one arrives within a second or two.
PACKED_TOKENS = 1 << 23
_log = logging.getLogger(__name__)
_CHUNK = re.compile(r"(?P<folder>(?:.*/)?)chunk_(?P<number>[0-9]{6,})\.pt")


def build_run_manifest(bucket: Bucket, data: DataConfig, *, cache_file: Path | None) -> Manifest:
    """Describe the shards of a run: the token files of a source, with chunks packed.

    Raises:
        ShardError: As `build_manifest`.
        BucketError: As `build_manifest`.
    """
    manifest = build_manifest(bucket, data, cache_file=cache_file)
    if manifest.unlisted:
        files, unlisted = len(manifest.shards) + len(manifest.unlisted), manifest.unlisted
        _log.warning(
            "%s: %d of %d token files are not used, because %s does not list them (the first is "
            "%s). Add them, before the run begins, with: refocused prepare_data manifest %s "
            "--update; or put them in data.exclude.",
            *(bucket.url, len(unlisted), files, MANIFEST_NAME, unlisted[0], bucket.url),
        )
    return pack_chunks(manifest, data)


def pack_chunks(manifest: Manifest, data: DataConfig) -> Manifest:
    """Pack the chunks of each folder, in their order, into shards of at most 2^23 tokens.

    Chunk n of a folder belongs to pack n // k, whatever other chunks are chosen, so that leaving
    one out changes one pack. Within a pack, what is local as one are chunks whose numbers follow
    one another, because a window runs over their borders; and chunks that train and chunks that
    validate are kept apart. Padded rows are documents, not a stream, and stay as they are.

    Args:
        manifest: One shard for each file.
        data: Says which files validate.

    Returns:
        The manifest of the packed shards, in name order.
    """
    folders: dict[str, dict[int, Shard]] = defaultdict(dict)
    others = []
    for shard in manifest.shards:
        chunk = _CHUNK.fullmatch(shard.name)
        if chunk is None or shard.pad_id is not None:
            others.append(shard)
        else:
            folders[chunk["folder"]][int(chunk["number"])] = shard
    packed = itertools.chain.from_iterable(
        _packed(folder, chunks, data) for folder, chunks in folders.items()
    )
    shards = sorted([*others, *packed], key=lambda shard: shard.name)
    return Manifest(tuple(shards), manifest.tokenizer)


def _packed(folder: str, chunks: dict[int, Shard], data: DataConfig) -> Iterator[Shard]:
    most = max(1, PACKED_TOKENS // max(chunk.tokens for chunk in chunks.values()))

    def together(place_and_number: tuple[int, int]) -> tuple[int, int, bool]:
        place, number = place_and_number
        # Numbers that follow one another are equally far from their places.
        return number // most, number - place, is_validation(chunks[number].name, data)

    for _, run in itertools.groupby(enumerate(sorted(chunks)), together):
        numbers = [number for _, number in run]
        parts = tuple(chunks[number] for number in numbers)
        if len(parts) == 1:
            yield parts[0]
        else:
            yield _pack(f"{folder}chunk_{numbers[0]:06d}-{numbers[-1]:06d}.pt", parts)


def _pack(name: str, parts: tuple[Shard, ...]) -> Shard:
    largest = [part.max_id for part in parts if part.max_id is not None]
    counts = [part.documents for part in parts if part.documents is not None]
    return Shard(
        name=name,
        tokens=sum(part.tokens for part in parts),
        dtype=max(part.dtype for part in parts),  # uint32 where one part needs it
        size=sum(part.size for part in parts),
        crc32c=None,
        generation=None,
        max_id=max(largest) if len(largest) == len(parts) else None,
        documents=sum(counts) if len(counts) == len(parts) else None,
        parts=parts,
    )
