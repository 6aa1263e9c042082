import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_samples import WatchedBucket, npy_bytes, npz_bytes, pt_bytes, settings
from text_samples import word_file

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.data.manifest.run_manifest import describe_run
from refocused.data.manifest.shard_manifest import (
    Manifest,
    Shard,
    build_manifest,
    manifest_from_json,
    manifest_to_json,
    write_manifest,
)
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, described

SHARD = Shard("a.npy", 10, "uint16", 148, 5, None, 9, 2)


@pytest.fixture
def bucket(tmp_path):
    return WatchedBucket(tmp_path / "source")


def build(bucket: WatchedBucket, cache_file: Path | None = None, **changes: object) -> Manifest:
    return build_manifest(bucket, settings(**changes), cache_file=cache_file)


def put_tokens(bucket: WatchedBucket, name: str, count: int = 10) -> None:
    bucket.put(name, npy_bytes(np.arange(count, dtype=np.uint16)))


def test_counts_come_from_headers_without_reading_the_tokens(bucket):
    rng = np.random.default_rng(0)
    lengths = np.full(400, 1000, np.int32)
    rows = rng.integers(0, 50000, (400, 1024), dtype=np.int32)
    bucket.put(
        "a.npz", npz_bytes(input_ids=rows, attention_mask=rows > 3, sequence_lengths=lengths)
    )
    bucket.put("b.npy", npy_bytes(rows.reshape(-1)))
    bucket.put("c.pt", pt_bytes(torch.from_numpy(rows.astype(np.int64))))
    manifest = build(bucket, separator_id=0)
    assert [shard.tokens for shard in manifest.shards] == [400_399, 409_600, 409_600]
    assert [shard.documents for shard in manifest.shards] == [400, None, None]
    assert [shard.dtype for shard in manifest.shards] == ["uint32"] * 3
    stored = sum(blob.size for blob in bucket.list())
    assert sum(size for _, size in bucket.reads) < stored / 10
    assert not bucket.downloads


def test_the_second_start_reads_nothing(bucket, tmp_path):
    put_tokens(bucket, "a/x.npy")
    put_tokens(bucket, "b/x.npy", 20)
    cache_file = tmp_path / "cache" / "headers.json"
    first = build(bucket, cache_file)
    bucket.reads.clear()
    assert build(bucket, cache_file) == first
    assert not bucket.reads
    put_tokens(bucket, "b/x.npy", 21)
    assert build(bucket, cache_file).tokens == 31
    assert {name for name, _ in bucket.reads} == {"b/x.npy"}


def test_a_damaged_cache_of_headers_is_made_again(bucket, tmp_path):
    put_tokens(bucket, "x.npy")
    cache_file = tmp_path / "headers.json"
    for damage in ("", "{}", "[]", '{"schema": 1, "headers": {"x": {"y": 1}}}'):
        cache_file.write_text(damage)
        assert build(bucket, cache_file).tokens == 10
    assert json.loads(cache_file.read_text())["headers"]


def test_all_refused_files_are_named_at_once(bucket):
    put_tokens(bucket, "good.npy")
    for number in range(7):
        bucket.put(f"bad_{number}.npy", b"no header")
    with pytest.raises(ShardError) as error:
        build(bucket)
    text = str(error.value)
    assert "7 of 8 files" in text
    assert "bad_4.npy" in text
    assert "and 2 more" in text
    assert build(bucket, exclude=["bad_*"]).tokens == 10


def test_the_fingerprint_speaks_of_content_and_nothing_else():
    def fingerprint(**changes: object) -> str:
        return Manifest((dataclasses.replace(SHARD, **changes),), "gpt2").fingerprint

    assert fingerprint() == fingerprint(generation="3", max_id=None, documents=None, size=999)
    others = [{"name": "b"}, {"tokens": 9}, {"dtype": "uint32"}, {"crc32c": 6}, {"crc32c": None}]
    assert len({fingerprint(), *(fingerprint(**change) for change in others)}) == 6
    assert len(fingerprint()) == 64


@pytest.mark.parametrize("tokens", [1000, 500_000], ids=["read whole", "sampled"])
@pytest.mark.parametrize("form", ["bare", "with a manifest without checksums"])
def test_a_folders_fingerprint_depends_on_content_not_on_names_and_sizes_alone(
    tmp_path, tokens, form
):
    path, bucket = tmp_path / "a.npy", DirectoryBucket(tmp_path)

    def described(ids: np.ndarray) -> Manifest:
        path.write_bytes(npy_bytes(ids.astype(np.uint16)))
        os.utime(path, ns=(7, 7))  # of an archive, in which all files have the same time
        return build_manifest(bucket, settings(), cache_file=tmp_path / ".counts.json")

    ids = np.arange(tokens) % 1000
    if form != "bare":
        row = Shard("a.npy", tokens, "uint16", 128 + 2 * tokens, None, None)
        write_manifest(bucket, Manifest((row,), "unknown"))
    first = described(ids)
    assert described(ids).fingerprint == first.fingerprint
    last = ids.copy()
    last[-1] += 1
    for other in (ids[::-1], last):
        assert described(other).fingerprint != first.fingerprint
        assert described(other).packing == first.packing  # decides how chunks are packed


def rows_of(bucket: WatchedBucket, **changes: Any) -> Manifest:
    """The manifest of two rows of two tokens, read with other settings."""
    rows = np.array([[1, 2, 0], [3, 4, 0]], np.int32)
    bucket.put("rows.npy", npy_bytes(rows))
    return build(bucket, include=["rows.npy"], **changes)


@pytest.mark.bucket
def test_the_fingerprint_is_that_of_the_content_where_listings_have_no_checksums(emulator):
    emulator.put("data/a.npy", npy_bytes(np.arange(10, dtype=np.uint16)))
    source = open_bucket(f"{emulator.url}/data")
    listed = build_manifest(source, settings())
    emulator.proxy.unlisted = frozenset({"crc32c"})  # customer-managed keys
    assert build_manifest(source, settings()) == listed


def test_how_rows_are_read_is_part_of_the_fingerprint_and_how_streams_are_is_not(bucket):
    one, other = (rows_of(bucket, pad_id=0, separator_id=separator) for separator in (7, 8))
    assert one.tokens == other.tokens == 5
    assert one.fingerprint != other.fingerprint
    full, padded = (rows_of(bucket, pad_id=pad) for pad in (None, 9))
    assert full.tokens == padded.tokens == 6
    assert full.fingerprint != padded.fingerprint
    put_tokens(bucket, "stream.npy")
    streams = [build(bucket, include=["stream.npy"], separator_id=n, pad_id=n) for n in (7, 8)]
    assert streams[0].fingerprint == streams[1].fingerprint


def test_a_separator_beyond_the_type_of_the_rows_makes_the_local_type_wider(bucket):
    rows = npz_bytes(input_ids=np.array([[5, 6], [7, 0]], np.uint16), sequence_lengths=[2, 1])
    bucket.put("rows.npz", rows)
    kinds = [build(bucket, separator_id=one).shards[0].dtype for one in (None, 65_535, 65_536)]
    assert kinds == ["uint16", "uint16", "uint32"]


def test_a_manifest_counted_with_another_separator_is_refused(bucket):
    write_manifest(bucket, rows_of(bucket, pad_id=0, separator_id=7))
    assert build(bucket, pad_id=0, separator_id=7).tokens == 5
    with pytest.raises(ShardError, match=r"counted rows\.npy with separator_id 7.*is 8"):
        build(bucket, pad_id=0, separator_id=8)


def test_padded_rows_without_a_separator_are_no_documents_to_mask(bucket):
    masked = {"mask_documents": True, "document_id": 5, "pad_id": 0}
    with pytest.raises(ShardError, match=r"rows\.npy: its padded rows.*data\.separator_id=5"):
        rows_of(bucket, **masked)
    assert rows_of(bucket, **masked, separator_id=5).tokens == 5


def test_a_manifest_survives_json_and_invalid_ones_are_refused():
    without = dataclasses.replace(SHARD, name="b", crc32c=None, sample=3)
    manifest = Manifest((SHARD, without), "gpt2", vocabulary=32_000)
    text = manifest_to_json(manifest)
    assert manifest_from_json(text, where="x") == manifest
    assert manifest_from_json(text, where="x").vocabulary == 32_000
    content = json.loads(text)
    for change in ({"schema": 2}, {"shards": [{"name": "x"}]}, {"shards": 3}, {"vocabulary": True}):
        with pytest.raises(ShardError, match="x: this is not a valid manifest"):
            manifest_from_json(json.dumps({**content, **change}), where="x")


@pytest.fixture
def prepared(bucket):
    for number in range(3):
        put_tokens(bucket, f"t_{number}.npy", 10 + number)
    write_manifest(bucket, build(bucket, tokenizer="gpt2"))
    bucket.reads.clear()
    return bucket


def test_prepared_data_are_read_by_their_manifest(prepared):
    put_tokens(prepared, "not_in_it.npy")
    manifest = build(prepared)
    assert (manifest.tokens, manifest.tokenizer) == (33, "gpt2")
    assert {name for name, _ in prepared.reads} == {"manifest.json"}
    assert manifest.shards[0].generation == "7"
    assert build(prepared, exclude=["t_1*"], max_files=1).tokens == 10


def test_files_that_the_manifest_does_not_list_are_counted_in_a_warning(prepared, caplog):
    def warned(**changes: object) -> list[str]:
        caplog.clear()
        assert describe_run({"": prepared}, settings(**changes)).tokens == 33
        return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]

    assert warned() == []
    prepared.put("readme.txt", b"no tokens")
    for number in range(38):
        put_tokens(prepared, f"more/u_{number:02d}.npy")
    (said,) = warned()
    assert "38 of 41 token files are not used" in said
    assert "more/u_00.npy" in said
    assert "manifest watched:source --update" in said
    assert warned(exclude=["more/*"]) == []


def test_objects_that_do_not_fit_the_manifest_are_named(prepared):
    (prepared.folder / "t_0.npy").unlink()
    put_tokens(prepared, "t_1.npy", 99)
    prepared.put("t_2.npy", npy_bytes(np.ones(12, np.uint16)))
    with pytest.raises(ShardError) as error:
        build(prepared)
    for said in ("3 of 3 objects", "t_0.npy is missing", "t_1.npy has 326 bytes, not 150"):
        assert said in str(error.value)
    assert "t_2.npy has the CRC-32C" in str(error.value)
    with pytest.raises(ShardError, match=r"1 of 1 objects.*t_1\.npy"):
        build(prepared, exclude=["t_0.npy", "t_2.npy"])


def test_a_tokenizers_file_may_lie_elsewhere(tmp_path, bucket):
    put_tokens(bucket, "t.npy")
    made = TokenizerChoice(str(word_file(tmp_path / "words.json")))
    write_manifest(bucket, build(bucket, tokenizer=described(made)[0]))
    moved = (tmp_path / "words.json").rename(tmp_path / "moved.json")
    assert build(bucket, tokenizer=str(moved)).tokenizer.startswith("tokenizer-")
    other = word_file(tmp_path / "other.json", ends="</s>")
    with pytest.raises(ShardError, match=r"its manifest.json says tokenizer 'tokenizer-"):
        build(bucket, tokenizer=str(other))


def put_chunks(bucket: WatchedBucket, promised: int) -> None:
    for number in (0, 1, 3):
        bucket.put(f"books/chunk_{number:06d}.pt", pt_bytes(torch.arange(5)))
    metadata = {"tokenizer": "cl100k", "num_chunks": promised, "vocab_size": 3}
    bucket.put("books/metadata.json", json.dumps(metadata).encode())


def test_missing_chunks_are_named_by_their_metadata(bucket):
    for promised in (4, 10**12):
        put_chunks(bucket, promised)
        with pytest.raises(ShardError, match=r"missing are books/chunk_000002\.pt"):
            build(bucket)
    put_chunks(bucket, 4)
    manifest = build(bucket, exclude=["chunk_000002.pt"])
    assert (manifest.tokens, manifest.tokenizer) == (15, "cl100k")
