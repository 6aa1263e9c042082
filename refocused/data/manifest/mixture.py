"""Several sources as one: a bucket whose object names begin with a source's name, its manifest."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.config.data import DataConfig
from refocused.data.manifest.run_manifest import build_run_manifest
from refocused.data.manifest.shard_manifest import Manifest
from refocused.system.errors import ShardError


def name_in_mixture(source: str, name: str) -> str:
    """Return what an object of a source is called in the mixture."""
    return f"{source}/{name}"


def source_of(name: str) -> str:
    """Return the source that an object of a mixture belongs to."""
    return name.partition("/")[0]


class MixedBucket:
    """The buckets of a mixture as one `Bucket`, each below the name of its source.

    Attributes:
        sources: The buckets by source.
        url: All their addresses, for messages.
    """

    def __init__(self, sources: Mapping[str, Bucket]) -> None:
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.url = " + ".join(f"{name} ({bucket.url})" for name, bucket in self.sources.items())

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield the objects of all sources whose names start with `prefix`."""
        names = (
            _renamed(blob, name_in_mixture(source, blob.name))
            for source, bucket in self.sources.items()
            for blob in bucket.list()
        )
        return (blob for blob in names if blob.name.startswith(prefix))

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object."""
        bucket, own = self._own(name)
        blob = bucket.info(own)
        return None if blob is None else _renamed(blob, name)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of an object."""
        bucket, own = self._own(name)
        return bucket.read(own, start=start, length=length)

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        """Store a small object in its source."""
        bucket, own = self._own(name)
        return _renamed(bucket.write(own, content, overwrite=overwrite), name)

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Fetch a whole object."""
        bucket, own = self._own(blob.name)
        return bucket.download(_renamed(blob, own), target)

    def local_file(self, blob: BlobInfo) -> Path | None:
        """Return an object's file where its source lets it be read in place."""
        bucket, own = self._own(blob.name)
        return bucket.local_file(_renamed(blob, own))

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file in its source."""
        bucket, own = self._own(name)
        return _renamed(bucket.upload(source, own, crc32c=crc32c), name)

    def delete(self, name: str) -> None:
        """Remove an object from its source."""
        bucket, own = self._own(name)
        bucket.delete(own)

    def _own(self, name: str) -> tuple[Bucket, str]:
        """Return the bucket of an object and its name there."""
        source, _, own = name.partition("/")
        return self.sources[source], own


def build_mixed_manifest(
    bucket: MixedBucket, data: DataConfig, *, cache_file: Path | None
) -> Manifest:
    """Describe the shards of a run over all sources, those of one source together.

    Raises:
        ShardError: As for a single source; or the tokens are those of different tokenizers.
        BucketError: A source cannot be listed or read.
    """
    manifests = {
        name: build_run_manifest(source, data.of_source(name), cache_file=cache_file)
        for name, source in bucket.sources.items()
    }
    return Manifest(
        tuple(
            shard.renamed(functools.partial(name_in_mixture, name))
            for name, manifest in manifests.items()
            for shard in manifest.shards
        ),
        _one_tokenizer({name: manifest.tokenizer for name, manifest in manifests.items()}),
    )


def split_by_source(manifest: Manifest) -> dict[str, tuple[int, Manifest]]:
    """Return each source's first index in a mixture's manifest, and its shards by their own names.

    The shards of one source stand together.
    """
    parts = {}
    indexed = itertools.groupby(
        enumerate(manifest.shards), lambda numbered: source_of(numbered[1].name)
    )
    for source, group in indexed:
        numbered = list(group)
        shards = (shard.renamed(lambda name: name.partition("/")[2]) for _, shard in numbered)
        parts[source] = numbered[0][0], Manifest(tuple(shards), manifest.tokenizer)
    return parts


def _one_tokenizer(tokenizers: Mapping[str, str]) -> str:
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer != "unknown"}
    if len(set(known.values())) > 1:
        found = ", ".join(f"{name}: {tokenizer}" for name, tokenizer in known.items())
        raise ShardError(
            f"data.mixture: the sources were made by different tokenizers ({found}), so that one "
            "id means different things. Use sources of one tokenizer."
        )
    return next(iter(known.values()), "unknown")


def _renamed(blob: BlobInfo, name: str) -> BlobInfo:
    return dataclasses.replace(blob, name=name)
