"""Build the manifest of a run: pack `chunk_NNNNNN.pt` files into shards, combine sources."""

import dataclasses
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME, matches
from refocused.data.manifest.shard_manifest import Counts, Manifest, Shard, build_manifest
from refocused.system.errors import ShardError

# 16 MiB of uint16, which arrives within a second or two. With sequences of 2,048 tokens, 0.012 % of
# such a shard remain unused at its end, but 6 % of a chunk of 32,768.
PACKED_TOKENS = 1 << 23
_log = logging.getLogger(__name__)
_CHUNK = re.compile(r"(?P<folder>(?:.*/)?)chunk_(?P<number>[0-9]{6,})\.pt")


def pack_chunks(manifest: Manifest, data: DataConfig) -> Manifest:
    """Pack the chunks of each folder, in order, into shards of at most 2^23 tokens.

    Chunk n of a folder belongs to pack n // k, so that excluding a chunk changes only one pack. A
    pack is divided further where chunk numbers are not consecutive, because sequences cross chunk
    boundaries, and between training and validation chunks. Padded rows are not a stream: their
    files are not packed.
    """
    folders: dict[str, dict[int, Shard]] = defaultdict(dict)
    shards = []
    for shard in manifest.shards:
        chunk = _CHUNK.fullmatch(shard.name)
        if (
            chunk is None
            or shard.pad_id is not None
            or int(chunk["number"]) in folders[chunk["folder"]]  # with other leading zeros
        ):
            shards.append(shard)
        else:
            folders[chunk["folder"]][int(chunk["number"])] = shard
    for folder, chunks in folders.items():
        shards += _packed(folder, chunks, data)
    ordered = tuple(sorted(shards, key=lambda shard: shard.name))
    return dataclasses.replace(manifest, shards=ordered, unlisted=())


def _packed(folder: str, chunks: dict[int, Shard], data: DataConfig) -> Iterator[Shard]:
    most = max(1, PACKED_TOKENS // max(chunk.tokens for chunk in chunks.values()))

    def together(position_and_number: tuple[int, int]) -> tuple[int, int, bool]:
        position, number = position_and_number
        # The difference is constant within a run of consecutive numbers.
        is_validation = matches(chunks[number].name, data.validation_files)
        return number // most, number - position, is_validation

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
            max_id=max(max_ids) if len(max_ids) == len(parts) else None,
            documents=sum(documents) if len(documents) == len(parts) else None,
            parts=parts,
        )


def source_of(name: str) -> str:
    """Return the source of a mixture's shard."""
    return name.partition("/")[0]


def describe_run(
    buckets: Mapping[str, Bucket], data: DataConfig, *, cache_file: Counts = None
) -> Manifest:
    """Describe the shards of a run; those of a mixture are each below the name of its source.

    `buckets` are by source, "" without a mixture. Raises as `build_manifest`, and `ShardError` if
    the sources have different tokenizers.
    """
    manifests = {}
    for source, section in sorted(data.by_source.items()):
        bucket = buckets[source]
        manifest = build_manifest(bucket, section, cache_file=cache_file)
        if unlisted := manifest.unlisted:
            _log.warning(
                "%s: %d of %d token files are not used, because %s does not list them (the first "
                "is %s). Add them before the run starts: refocused prepare_data manifest %s "
                "--update; or put them in data.exclude.",
                *(bucket.url, len(unlisted), len(manifest.shards) + len(unlisted), MANIFEST_NAME),
                *(unlisted[0], bucket.url),
            )
        manifests[source] = pack_chunks(manifest, section)
    if not data.mixture:
        return manifests[""]
    shards = [
        shard.renamed(f"{source}/".__add__)
        for source, manifest in manifests.items()
        for shard in manifest.shards
    ]
    ends = {manifest.end_of_text_id for manifest in manifests.values()}
    named = {source: manifest.tokenizer for source, manifest in manifests.items()}
    known = {source: tokenizer for source, tokenizer in named.items() if tokenizer != "unknown"}
    if len(set(known.values())) > 1:
        names = ", ".join(f"{name}: {tokenizer}" for name, tokenizer in known.items())
        raise ShardError(
            f"data.mixture: the sources have different tokenizers ({names}), so the same id has "
            "different meanings. Use sources of one tokenizer."
        )
    tokenizer = next(iter(known.values()), "unknown")
    return Manifest(tuple(shards), tokenizer, end_of_text_id=ends.pop() if len(ends) == 1 else None)


def split_by_source(manifest: Manifest) -> dict[str, tuple[int, Manifest]]:
    """Return each source's first index in a mixture's manifest, and its own manifest."""
    parts = {}
    indexed = enumerate(manifest.shards)
    for source, group in itertools.groupby(indexed, lambda numbered: source_of(numbered[1].name)):
        numbered = list(group)
        shards = tuple(shard.renamed(lambda name: name.partition("/")[2]) for _, shard in numbered)
        parts[source] = numbered[0][0], Manifest(shards, manifest.tokenizer)
    return parts
