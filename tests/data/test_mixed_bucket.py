from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shard_samples import npy_bytes, settings

from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.manifest.run_manifest import MixedBucket, build_mixed_manifest, split_by_source
from refocused.data.manifest.shard_manifest import Manifest, Shard, build_manifest, write_manifest
from refocused.system.errors import ShardError


@pytest.fixture
def mixed(tmp_path: Path) -> MixedBucket:
    """Two sources with a file of the same name; one holds padded rows."""
    web, code = DirectoryBucket(tmp_path / "web"), DirectoryBucket(tmp_path / "code")
    web.write("sub/a.npy", npy_bytes(np.arange(10, dtype=np.uint16)))
    web.write("b.npy", npy_bytes(np.arange(100, 107, dtype=np.uint16)))
    rows = np.array([[1, 2, 0, 0], [3, 0, 5, 0]], dtype=np.int32)
    code.write("sub/a.npy", npy_bytes(rows))
    return MixedBucket({"web": web, "code": code})


def data_of(**code: object) -> DataConfig:
    sources = {
        "web": {"source": "web", "weight": 1},
        "code": {"source": "code", "weight": 1, **code},
    }
    return settings(source=None, mixture=sources, separator_id=9)


def test_objects_stand_below_the_name_of_their_source(mixed: MixedBucket, tmp_path: Path) -> None:
    assert [blob.name for blob in mixed.list()] == ["code/sub/a.npy", "web/b.npy", "web/sub/a.npy"]
    assert [blob.name for blob in mixed.list("web/s")] == ["web/sub/a.npy"]
    info = mixed.info("web/b.npy")
    assert info is not None
    assert info.name == "web/b.npy"
    assert mixed.info("web/none.npy") is None
    assert mixed.read("web/b.npy", start=1, length=5) == b"NUMPY"
    mixed.download(info, tmp_path / "here.npy")
    assert np.load(tmp_path / "here.npy")[0] == 100
    assert mixed.local_file(info) == tmp_path / "web" / "b.npy"
    uploaded = mixed.upload(tmp_path / "here.npy", "code/new.npy")
    assert uploaded.name == "code/new.npy"
    mixed.write("code/note.txt", b"x")
    mixed.delete("code/new.npy")
    assert [path.name for path in (tmp_path / "code").glob("*.*")] == ["note.txt"]
    for name, bucket in mixed.sources.items():
        assert f"{name} ({bucket.url})" in mixed.url


def test_the_manifest_holds_the_sources_together_and_each_is_found_again(
    mixed: MixedBucket,
) -> None:
    data = data_of(pad_id=0)
    manifest = build_mixed_manifest(mixed, data, cache_file=None)
    assert [(shard.name, shard.tokens) for shard in manifest.shards] == [
        ("code/sub/a.npy", 6),  # 1 2 | 9 | 3 0 5
        ("web/b.npy", 7),
        ("web/sub/a.npy", 10),
    ]
    parts = split_by_source(manifest)
    assert {name: first for name, (first, _) in parts.items()} == {"code": 0, "web": 1}
    for name, (_, own) in parts.items():
        alone = build_manifest(mixed.sources[name], data.of_source(name), cache_file=None)
        assert own.fingerprint == alone.fingerprint


def test_every_shard_is_read_as_its_source_says(mixed: MixedBucket, tmp_path: Path) -> None:
    for code, rows in (
        ({"pad_id": 0}, [1, 2, 9, 3, 0, 5]),
        ({"pad_id": 5}, [1, 2, 0, 0, 9, 3, 0, 5, 0]),
    ):
        data = data_of(**code)
        manifest = build_mixed_manifest(mixed, data, cache_file=None)
        folder = tmp_path / "cache"
        with ShardCache(mixed, manifest, folder, data=data, vocabulary=512, fetches=True) as cache:
            cache.plan([0, 1, 2])
            read = []
            for index, shard in enumerate(manifest.shards):
                tokens = np.empty(shard.tokens, np.uint16)
                cache.open(index).read_into(tokens, first=0)
                read.append(tokens.tolist())
        assert read == [rows, list(range(100, 107)), list(range(10))]


def test_sources_of_different_tokenizers_are_refused(mixed: MixedBucket) -> None:
    for name, tokenizer in (("web", "gpt2"), ("code", "bytes")):
        [info] = [blob for blob in mixed.sources[name].list() if blob.name == "sub/a.npy"]
        shard = Shard("sub/a.npy", 10, "uint16", info.size, info.crc32c, info.generation)
        write_manifest(mixed.sources[name], Manifest((shard,), tokenizer))
    with pytest.raises(ShardError, match=r"different tokenizers \(code: bytes, web: gpt2\)"):
        build_mixed_manifest(mixed, data_of(), cache_file=None)


def test_a_source_of_an_unknown_tokenizer_takes_that_of_the_others(mixed: MixedBucket) -> None:
    [info] = [blob for blob in mixed.sources["web"].list() if blob.name == "b.npy"]
    shard = Shard("b.npy", 7, "uint16", info.size, info.crc32c, info.generation)
    write_manifest(mixed.sources["web"], Manifest((shard,), "gpt2"))
    assert build_mixed_manifest(mixed, data_of(pad_id=0), cache_file=None).tokenizer == "gpt2"
