"""The manifest of a run: `chunk_NNNNNN.pt` files packed into few shards, sources mixed into one."""

from __future__ import annotations

import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.select_files import is_validation
from refocused.data.manifest.shard_manifest import Manifest, Shard, build_manifest
from refocused.system.errors import ShardError

# As uint16 16 MiB: at windows of 2,048 tokens, 0.012 % are left over at the ends, where a chunk of
# 32,768 leaves 6 %; and the first one arrives within a second or two.
PACKED_TOKENS = 1 << 23
_log = logging.getLogger(__name__)
_CHUNK = re.compile(r"(?P<folder>(?:.*/)?)chunk_(?P<number>[0-9]{6,})\.pt")


def build_run_manifest(bucket: Bucket, data: DataConfig, *, cache_file: Path | None) -> Manifest:
    """Describe the shards of a run, with chunks packed; raises as `build_manifest`."""
    manifest = build_manifest(bucket, data, cache_file=cache_file)
    if unlisted := manifest.unlisted:
        _log.warning(
            "%s: %d of %d token files are not used, because %s does not list them (the first is "
            "%s). Add them, before the run begins, with: refocused prepare_data manifest %s "
            "--update; or put them in data.exclude.",
            *(bucket.url, len(unlisted), len(manifest.shards) + len(unlisted), MANIFEST_NAME),
            *(unlisted[0], bucket.url),
        )
    return pack_chunks(manifest, data)


def pack_chunks(manifest: Manifest, data: DataConfig) -> Manifest:
    """Pack the chunks of each folder, in their order, into shards of at most 2^23 tokens.

    Chunk n of a folder belongs to pack n // k, whatever other chunks are chosen, so that leaving
    one out changes one pack. Within a pack, what is local as one are chunks whose numbers follow
    one another, because a window runs over their borders; and chunks that train and chunks that
    validate are kept apart. Padded rows are documents, not a stream, and stay as they are.
    """
    folders: dict[str, dict[int, Shard]] = defaultdict(dict)
    shards = []
    for shard in manifest.shards:
        chunk = _CHUNK.fullmatch(shard.name)
        if chunk is None or shard.pad_id is not None:
            shards.append(shard)
        else:
            folders[chunk["folder"]][int(chunk["number"])] = shard
    for folder, chunks in folders.items():
        shards += _packed(folder, chunks, data)
    return Manifest(tuple(sorted(shards, key=lambda shard: shard.name)), manifest.tokenizer)


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
            continue
        max_ids = [part.max_id for part in parts if part.max_id is not None]
        documents = [part.documents for part in parts if part.documents is not None]
        yield Shard(
            name=f"{folder}chunk_{numbers[0]:06d}-{numbers[-1]:06d}.pt",
            tokens=sum(part.tokens for part in parts),
            dtype=max(part.dtype for part in parts),  # uint32 where one part needs it
            size=sum(part.size for part in parts),
            crc32c=None,
            generation=None,
            max_id=max(max_ids) if len(max_ids) == len(parts) else None,
            documents=sum(documents) if len(documents) == len(parts) else None,
            parts=parts,
        )


def source_of(name: str) -> str:
    """Return the source that a shard of a mixture belongs to."""
    return name.partition("/")[0]


def build_mixed_manifest(
    buckets: Mapping[str, Bucket], data: DataConfig, *, cache_file: Path | None
) -> Manifest:
    """Describe the shards of a mixture, each below the name of its source.

    Raises as `build_manifest`, and `ShardError` if the tokens are those of different tokenizers.
    """
    shards: list[Shard] = []
    tokenizers = {}
    for name in sorted(buckets):
        manifest = build_run_manifest(buckets[name], data.of_source(name), cache_file=cache_file)
        shards += [shard.renamed(f"{name}/".__add__) for shard in manifest.shards]
        if manifest.tokenizer != "unknown":
            tokenizers[name] = manifest.tokenizer
    if len(set(tokenizers.values())) > 1:
        found = ", ".join(f"{name}: {tokenizer}" for name, tokenizer in tokenizers.items())
        raise ShardError(
            f"data.mixture: the sources were made by different tokenizers ({found}), so that one "
            "id means different things. Use sources of one tokenizer."
        )
    return Manifest(tuple(shards), next(iter(tokenizers.values()), "unknown"))


def split_by_source(manifest: Manifest) -> dict[str, tuple[int, Manifest]]:
    """Return each source's first index in a mixture's manifest, and its shards by own names."""
    parts = {}
    indexed = enumerate(manifest.shards)
    for source, group in itertools.groupby(indexed, lambda numbered: source_of(numbered[1].name)):
        numbered = list(group)
        shards = tuple(shard.renamed(lambda name: name.partition("/")[2]) for _, shard in numbered)
        parts[source] = numbered[0][0], Manifest(shards, manifest.tokenizer)
    return parts
