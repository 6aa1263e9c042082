"""One rank of a node: opens every shard through its cache and prints a digest of the tokens."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from shard_samples import settings

from refocused.bucket.gcs import GcsBucket
from refocused.data.cache.cache import ShardCache
from refocused.data.manifest.shard_manifest import manifest_from_json

VOCABULARY = 50_000


def main(url: str, manifest_file: str, cache_folder: str, role: str, limit_bytes: str) -> None:
    """Read all shards in order; the fetcher goes on until the others have ended."""
    manifest = manifest_from_json(Path(manifest_file).read_text(), where=manifest_file)
    data = settings(disk_limit_gb=int(limit_bytes) / 1e9 if limit_bytes != "0" else None)
    digest = hashlib.sha256()
    with ShardCache(
        GcsBucket(url),
        manifest,
        Path(cache_folder),
        data=data,
        vocabulary=VOCABULARY,
        fetches=role == "fetcher",
    ) as cache:
        for index in range(len(manifest.shards)):
            cache.plan(range(index, min(index + 2, len(manifest.shards))))
            file = cache.open(index)
            tokens = np.empty(file.count, file.dtype)
            file.read_into(tokens, first=0)
            digest.update(tokens.tobytes())
        print(json.dumps({"digest": digest.hexdigest()}))
        sys.stdout.flush()
        if role == "fetcher":
            sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    main(*sys.argv[1:])
