"""Small token files and buckets for the tests of `refocused.data`."""

import io
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from refocused.bucket.bucket import BlobInfo, crc32c_of, stored_crc32c
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.formats.token_blocks import count_tokens, token_blocks
from refocused.data.formats.token_layout import read_layout
from refocused.data.manifest.run_manifest import describe_run
from refocused.data.manifest.shard_manifest import Manifest, Shard, write_manifest
from refocused.system.errors import BucketError, CorruptObjectError


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**{"source": "x", "fetch_threads": 2, "fetch_timeout_s": 10.0, **changes})


def npy_bytes(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz_bytes(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def pt_bytes(value: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def llm_c_bytes(tokens: Any, *, count: int | None = None, version: int = 1) -> bytes:
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", 20240520, version, count).ljust(1024, b"\0")
    return header + np.asarray(tokens, "<u2").tobytes()


def tokens_of(content: bytes, name: str, **changes: Any) -> list[int]:
    """Read a file's tokens, and check that counting by its headers agrees."""
    data = settings(**changes)
    layout = read_layout(io.BytesIO(content), name=name, data=data)
    blocks = list(token_blocks(io.BytesIO(content), layout, name=name))
    tokens = [int(t) for block in blocks for t in block]
    assert count_tokens(io.BytesIO(content), layout, name=name)[0] == len(tokens)
    return tokens


def cache_of(
    source: Any, folder: Path, data: DataConfig | None = None, *, vocabulary: int = 2000, **how: Any
) -> ShardCache:
    """A cache over a bucket, or over the buckets of a mixture, that fetches."""
    data = data or settings()
    buckets, how = source if isinstance(source, dict) else {"": source}, {"fetches": True, **how}
    manifest = describe_run(buckets, data)
    return ShardCache(buckets, manifest, folder, data=data, vocabulary=vocabulary, **how)


def opened(cache: ShardCache, index: int) -> np.ndarray:
    """Wait for a shard and read all of it."""
    file = cache.open(index)
    tokens = np.empty(file.count, file.dtype)
    file.read_into(tokens, first=0)
    return tokens


def prepare(bucket: Any, files: dict[str, Any], tokenizer: str = "gpt2", **known: Any) -> None:
    """Store arrays of uint16 as token files, with their manifest."""
    rows = []
    for name, ids in sorted(files.items()):
        blob = bucket.write(name, npy_bytes(ids), overwrite=True)
        facts = blob.size, stored_crc32c(bucket, blob), None, int(ids.max())
        rows.append(Shard(name, len(ids), "uint16", *facts))
    write_manifest(bucket, Manifest(tuple(rows), tokenizer, **known))


class WatchedBucket:
    """A folder as a bucket that keeps checksums, counts what is read, and can be made to fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"watched:{folder.name}"
        self.identity: str | None = None
        self.inner = DirectoryBucket(folder)
        self.reads: list[tuple[str, int]] = []
        self.downloads: list[str] = []
        self.unreachable = False
        self.fails_after: int | None = None  # downloads begun, that is
        self.corrupt: set[str] = set()
        self.blocked: threading.Event | None = None
        self.lock = threading.Lock()

    def put(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        for blob in self.inner.list(prefix):
            found = self.info(blob.name)
            assert found is not None
            yield found

    def info(self, name: str) -> BlobInfo | None:
        self._reach()
        path = self.folder / name
        if not path.is_file():
            return None
        return BlobInfo(name, path.stat().st_size, crc32c_of(path), "7")

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        self._reach()
        content = self.inner.read(name, start=start, length=length)
        with self.lock:
            self.reads.append((name, len(content)))
        return content

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        return self.inner.write(name, content, overwrite=overwrite)

    def download(self, blob: BlobInfo, target: Path) -> int:
        with self.lock:
            self.downloads.append(blob.name)
        self._reach()
        if self.blocked is not None:
            self.blocked.wait(20)
        if blob.name in self.corrupt:
            raise CorruptObjectError(f"{blob.name}: crc32c 1 read, {blob.crc32c} expected.")
        return self.inner.download(blob, target)

    def local_file(self, blob: BlobInfo) -> None:
        """Every object has to be downloaded."""

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        return self.inner.upload(source, name, crc32c=crc32c)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def _reach(self) -> None:
        is_over = self.fails_after is not None and len(self.downloads) > self.fails_after
        if self.unreachable or is_over:
            raise BucketError(f"{self.url}: no route to host.")
