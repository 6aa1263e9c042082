import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from ranks import until
from shard_samples import WatchedBucket, cache_of, npy_bytes, opened, prepare, pt_bytes, settings

from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.manifest import run_manifest
from refocused.data.manifest.run_manifest import describe_run, pack_chunks, split_by_source
from refocused.data.manifest.shard_manifest import Manifest, Shard, build_manifest
from refocused.data.order.sequences import sequence_count, split_sequences
from refocused.system.errors import ShardError

CHUNKS, TOKENS = 10, 50


@pytest.fixture(autouse=True)
def _four_chunks_a_pack(monkeypatch):
    monkeypatch.setattr(run_manifest, "PACKED_TOKENS", 4 * TOKENS + 7)


@pytest.fixture
def bucket(tmp_path):
    bucket = WatchedBucket(tmp_path / "source")
    for number in range(CHUNKS):
        bucket.put(chunk_name(number), pt_bytes(torch.from_numpy(chunk_tokens(number))))
    return bucket


def chunk_name(number: int) -> str:
    return f"books/chunk_{number:06d}.pt"


def chunk_tokens(number: int) -> np.ndarray:
    return np.arange(TOKENS) + TOKENS * number


def build(bucket: WatchedBucket, **changes: object) -> Manifest:
    return describe_run({"": bucket}, settings(**changes))


def numbers(shard: Shard) -> list[int]:
    return [int(file.name[-9:-3]) for file in shard.files]


@hypothesis_settings(deadline=None)
@given(
    lengths=st.dictionaries(st.integers(0, 40), st.integers(1, 60), min_size=1),
    validation=st.sets(st.integers(0, 40)),
)
def test_packs_hold_every_chunk_once_in_order_without_gaps(lengths, validation):
    files = [Shard(chunk_name(n), lengths[n], "uint32", 9, n, None) for n in sorted(lengths)]
    data = settings(validation_files=[chunk_name(n) for n in validation])
    packed = pack_chunks(Manifest(tuple(files), "x"), data)
    assert [file for shard in packed.shards for file in shard.files] == files
    for shard in packed.shards:
        own = numbers(shard)
        assert own == list(range(own[0], own[0] + len(own)))
        assert len({number in validation for number in own}) == 1
        assert shard.tokens == sum(lengths[number] for number in own)
        assert len(own) == 1 or shard.tokens <= run_manifest.PACKED_TOKENS
    assert sorted(packed.shards, key=lambda shard: shard.name) == list(packed.shards)


def test_local_packs_are_the_chunks_one_after_the_other(bucket, tmp_path):
    with cache_of(bucket, tmp_path) as cache:
        packs = [opened(cache, index) for index in range(3)]
    assert [len(pack) for pack in packs] == [200, 200, 100]
    assert {pack.dtype for pack in packs} == {np.dtype(np.uint16)}
    assert np.concatenate(packs).tolist() == list(range(CHUNKS * TOKENS))
    assert sorted(bucket.downloads) == [chunk_name(number) for number in range(CHUNKS)]


def test_a_pack_is_refused_by_the_names_of_its_chunks(bucket, tmp_path):
    with cache_of(bucket, tmp_path) as cache:
        opened(cache, 0)
    named = "put books/chunk_000000.pt to books/chunk_000003.pt in data.skip"
    smaller = cache_of(bucket, tmp_path, vocabulary=100, fetches=False)
    with smaller, pytest.raises(ShardError, match=named):
        smaller.open(0)


def test_leaving_a_chunk_out_changes_its_pack_alone(bucket):
    before, after = build(bucket), build(bucket, exclude=["chunk_000005.pt"])
    split = split_sequences(before, sequence_length=33)  # sequences cross the borders of chunks
    assert sequence_count(split.train) == 6 + 6 + 3  # one in each chunk alone: 10
    assert [numbers(shard) for shard in after.shards] == [[0, 1, 2, 3], [4], [6, 7], [8, 9]]
    assert after.shards[0] == before.shards[0]
    assert after.shards[3] == before.shards[2]
    assert after.fingerprint != before.fingerprint


def test_the_fingerprint_is_that_of_the_files_and_the_packing_has_its_own(bucket):
    files = build_manifest(bucket, settings())
    packed, otherwise = build(bucket), build(bucket, validation_files=["chunk_000002.pt"])
    assert packed.fingerprint == otherwise.fingerprint == files.fingerprint
    assert len({files.packing, packed.packing, otherwise.packing}) == 3
    bucket.put(chunk_name(6), pt_bytes(torch.from_numpy(chunk_tokens(6)[::-1].copy())))
    assert build(bucket).fingerprint != packed.fingerprint


def test_max_files_and_validation_files_count_chunks(bucket):
    manifest = build(bucket, max_files=3, validation_files=["chunk_00000[2-3].pt"])
    assert [numbers(shard) for shard in manifest.shards] == [[0, 1], [2, 3], [4]]
    split = split_sequences(manifest, sequence_length=10, validation_files=["chunk_00000[2-3].pt"])
    assert [one.shard for one in split.validation] == [1]
    assert [one.shard for one in split.train] == [0, 2]


def test_padded_rows_are_documents_and_stay_files(bucket):
    for number in range(2):
        rows = torch.tensor([[1, 2, 0], [3, 0, 0]])
        bucket.put(f"rows/chunk_{number:06d}.pt", pt_bytes(rows))
    manifest = build(bucket, include=["rows/*"], pad_id=0, separator_id=9)
    assert [(shard.name, shard.tokens) for shard in manifest.shards] == [
        ("rows/chunk_000000.pt", 4),
        ("rows/chunk_000001.pt", 4),
    ]


def test_two_chunks_of_one_number_are_both_kept(bucket):
    bucket.put("books/chunk_0000003.pt", pt_bytes(torch.from_numpy(chunk_tokens(3))))
    files = [file.name for shard in build(bucket).shards for file in shard.files]
    assert len(files) == CHUNKS + 1 and "books/chunk_0000003.pt" in files


def test_an_outage_amid_a_pack_costs_no_second_download(bucket, tmp_path):
    with cache_of(bucket, tmp_path, settings(fetch_threads=1)) as cache:
        bucket.fails_after = 2
        cache.plan([0])
        until(lambda: len(bucket.downloads) >= 3)
        bucket.fails_after = None
        assert opened(cache, 0).tolist() == list(range(200))
    assert [bucket.downloads.count(chunk_name(number)) for number in (0, 1, 3)] == [1, 1, 1]


@pytest.fixture
def mixed(tmp_path):
    """Two sources with a file of the same name; one holds padded rows."""
    web, code = DirectoryBucket(tmp_path / "web"), DirectoryBucket(tmp_path / "code")
    web.write("sub/a.npy", npy_bytes(np.arange(10, dtype=np.uint16)))
    web.write("b.npy", npy_bytes(np.arange(100, 107, dtype=np.uint16)))
    rows = np.array([[1, 2, 0, 0], [3, 0, 5, 0]], dtype=np.int32)
    code.write("sub/a.npy", npy_bytes(rows))
    return {"web": web, "code": code}


def data_of(**code: object) -> DataConfig:
    sources = {
        "web": {"source": "web", "weight": 1},
        "code": {"source": "code", "weight": 1, **code},
    }
    return settings(source=None, mixture=sources, separator_id=9)


def test_the_manifest_holds_the_sources_together_and_each_is_found_again(mixed):
    data = data_of(pad_id=0)
    manifest = describe_run(mixed, data)
    assert [(shard.name, shard.tokens) for shard in manifest.shards] == [
        ("code/sub/a.npy", 6),  # 1 2 | 9 | 3 0 5
        ("web/b.npy", 7),
        ("web/sub/a.npy", 10),
    ]
    parts = split_by_source(manifest)
    assert {name: first for name, (first, _) in parts.items()} == {"code": 0, "web": 1}
    for name, (_, own) in parts.items():
        alone = build_manifest(mixed[name], data.of_source(name))
        assert own.fingerprint == alone.fingerprint


def test_every_shard_is_read_as_its_source_says(mixed, tmp_path):
    for code, rows in (
        ({"pad_id": 0}, [1, 2, 9, 3, 0, 5]),
        ({"pad_id": 5}, [1, 2, 0, 0, 9, 3, 0, 5, 0]),
    ):
        with cache_of(mixed, tmp_path / "cache", data_of(**code)) as cache:
            read = [opened(cache, index).tolist() for index in range(3)]
        assert read == [rows, list(range(100, 107)), list(range(10))]


def test_sources_are_of_one_tokenizer_where_they_say_so(mixed):
    prepare(mixed["web"], {"b.npy": np.arange(7, dtype=np.uint16)}, "gpt2")
    assert describe_run(mixed, data_of(pad_id=0)).tokenizer == "gpt2"
    prepare(mixed["code"], {"sub/a.npy": np.arange(8, dtype=np.uint16)}, "bytes")
    with pytest.raises(ShardError, match=r"different tokenizers \(code: bytes, web: gpt2\)"):
        describe_run(mixed, data_of())


def test_packs_of_a_mixture_are_renamed_with_their_chunks(bucket, tmp_path):
    mixed = {"a": bucket, "b": bucket}
    sources = {name: {"source": name, "weight": 1} for name in ("a", "b")}
    data = settings(source=None, mixture=sources)
    manifest = describe_run(mixed, data)
    assert split_by_source(manifest)["b"] == (3, build(bucket))
    with cache_of(mixed, tmp_path / "cache", data) as cache:
        assert opened(cache, 4).tolist() == list(range(200, 400))
