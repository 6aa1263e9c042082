from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import (
    WatchedBucket,
    llm_c_bytes,
    npy_bytes,
    npz_bytes,
    prepare,
    pt_bytes,
    settings,
)
from data.text_samples import tiny_bpe, word_file

from refocused.bucket.bucket import stored_crc32c
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.data.manifest.shard_manifest import Manifest, Shard, read_manifest, write_manifest
from refocused.prepare import inspect_data as report_module
from refocused.prepare.inspect_data import DataReport, IdStatistics, inspect_data
from refocused.prepare.verify_data import FileCheck, verify_data
from refocused.system.errors import ShardError


def inspect(
    bucket: Any, *, sample: int = 10**9, vocabulary: int | None = None, **data: Any
) -> DataReport:
    return inspect_data(bucket, settings(**data), sample, vocabulary, shows_text=False)


@pytest.fixture
def bucket(tmp_path):
    return WatchedBucket(tmp_path / "data")


def padded(rows: list[list[int]], columns: int) -> bytes:
    ids = np.zeros((len(rows), columns), np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    return npz_bytes(input_ids=ids, sequence_lengths=lengths)


def test_padding_and_rows_are_counted(bucket):
    bucket.put("a.npz", padded([[5, 6, 7], [8], [5, 6, 7], []], 10))
    report = inspect(bucket, separator_id=9)
    assert (report.files, report.documents, report.places) == (1, 3, 40)
    assert report.tokens == 7 + 2  # two separators between three rows
    assert report.padding_fraction == pytest.approx(33 / 40)
    sample = report.sample
    assert (sample.tokens, sample.min_id, sample.max_id, sample.distinct_ids) == (7, 5, 8, 4)
    assert sample.documents == 3
    assert sample.most_frequent[0] == (5, pytest.approx(2 / 7))
    assert sum(sample.id_histogram.counts) == 7
    assert sum(sample.length_histogram.counts) == 3
    assert report.sampled_fraction == 1.0
    assert any("82.5% of the stored ids are padding" in note for note in report.notes)
    assert not report.problems


def lengths_of(sample: IdStatistics) -> dict[int, int]:
    """Return the number of documents of each length; up to 5 tokens, each has its own bin."""
    edges, counts = sample.length_histogram.edges, sample.length_histogram.counts
    assert sum(counts) == sample.documents
    return {int(edge): count for edge, count in zip(edges, counts, strict=False) if count}


def test_documents_are_found_by_their_separator_or_their_rows(bucket, monkeypatch):
    bucket.put("a.npy", npy_bytes(np.array([9, 1, 2, 9, 3, 9, 1, 2], np.uint16)))
    assert inspect(bucket).sample.documents is None
    bucket.put("b.npy", npy_bytes(np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], np.int32)))
    for block in (1 << 16, 3):  # a document, or a row, over several blocks is one
        monkeypatch.setattr("refocused.data.formats.token_blocks.BLOCK_IDS", block)
        sample = inspect(bucket, separator_id=9, include=("a.npy",)).sample
        assert (lengths_of(sample), sample.tokens) == ({1: 1, 2: 2}, 8)
        sample = inspect(bucket, separator_id=9, include=("b.npy",)).sample
        assert lengths_of(sample) == {5: 2}


def test_every_form_is_read_and_the_refused_are_named(bucket):
    row = np.arange(12, dtype=np.int32).reshape(2, 6)
    bucket.put("a.npz", padded([[1, 2]], 4))
    bucket.put("d.npy", npy_bytes(row))
    bucket.put("d.pt", pt_bytes(__import__("torch").tensor(row)))
    bucket.put("h.bin", llm_c_bytes([1, 2, 3]))
    objects = np.empty(1, object)
    objects[0] = [1, 2]
    bucket.put("c.npz", npz_bytes(sequences=objects))
    bucket.put("i.bin", b"\0" * 16)
    bucket.put("i.idx", b"MMIDIDX\0\0")
    bucket.put("j.jsonl", b"{}")
    report = inspect(bucket)
    assert report.kinds == {"npz": 1, "npy": 1, "pt": 1, "llm.c": 1}
    assert report.tokens == 2 + 12 + 12 + 3
    for said in ("Pickled arrays", "i.bin (and 1 more", "prepare_data convert`", "tokenize`"):
        assert any(said in problem for problem in report.problems), said


def test_a_sample_is_spread_over_files_and_reported(bucket, monkeypatch):
    monkeypatch.setattr(report_module, "SAMPLED_FILES", 5)
    for number in range(20):
        ids = np.full(100_000, number, np.uint16)
        bucket.put(f"{number:02d}.npy", npy_bytes(ids))
    report = inspect(bucket, sample=1000)
    assert (report.sampled_files, report.sample.tokens) == (5, 1000)
    assert report.sample.max_id == 19
    assert report.sampled_fraction == pytest.approx(1000 / 2_000_000)
    assert any("5 of 20 files" in note for note in report.notes)
    assert sum(length for _, length in bucket.reads) < 20 * 70_000 * 2


def test_ids_beyond_a_vocabulary_are_a_problem(bucket):
    bucket.put("a.npy", npy_bytes(np.array([1, 2**32 - 1], np.uint32)))
    sample = inspect(bucket).sample  # which takes no memory for ids between
    assert (sample.max_id, sample.distinct_ids) == (2**32 - 1, 1)
    bucket.put("a.npy", npy_bytes(np.array([1, 50_256], np.uint16)))
    assert not inspect(bucket, vocabulary=50_257).problems
    problem = inspect(bucket, vocabulary=50_256).problems[0]
    assert "Set model.vocabulary to the size of the tokenizer" in problem
    assert problem.endswith("at least 50257.")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.tile(np.arange(500, dtype=np.uint32), 2).view(np.uint16), "every second id is 0"),
        (np.array([5] * 700 + list(range(300)), np.uint16), "70% of its first 1,000 ids are 5"),
    ],
)
def test_ids_that_are_probably_no_tokens_are_a_problem(bucket, ids, said):
    bucket.put("a.npy", npy_bytes(ids))
    assert any(said in problem for problem in inspect(bucket).problems)


@pytest.mark.parametrize(
    ("ids", "data", "shown"),
    [
        ([256, *b"one\n", 256, *b"two"], {}, r"<|endoftext|> 'one\n' <|endoftext|> 'two'"),
        ([*b"a" * 50, 256, 256], {}, f"'{'a' * 40}' <|endoftext|>  <|endoftext|>"),
        ([[*b"ab"], [*b"cd"]], {}, "'ab' (end of row) 'cd'"),
        ([[*b"ab", 9], [*b"c", 9, 9]], {"pad_id": 9}, "'ab' (end of row) 'c'"),
    ],
)
def test_text_is_shown_around_a_border_of_documents(bucket, ids, data, shown):
    bucket.put("a.npy", npy_bytes(np.array(ids, np.int32)))
    bucket.put("recipe.json", b'{"tokenizer": "bytes"}')
    report = inspect_data(bucket, settings(**data), 10**9, None, shows_text=True)
    assert report.texts == (f"a.npy: {shown}",)
    assert (report.lost_fraction, report.problems) == (0, ())


@pytest.mark.parametrize(
    ("kind", "ids", "lost"),
    [
        ("words", [0, 1, 3] * 99, 0),
        ("words", [0, 1, 3] * 99 + [2] * 3, 0.01),
        ("words", [0, 1, 3] * 9 + [2], 1 / 28),  # unknown to the tool that made them
        ("words", [0, 1, 3] * 9 + [4], 1 / 28),  # beyond the tokenizer
        ("pairs", [262, 257, 260, 261, 262, 257], 0),
        ("pairs", [[104, *[258] * 18, 127]] * 2, 0),  # rows cut the bytes of a character
        ("pairs", [262, 83, 71, 68, 262, 257], 1 / 2),  # "the" is one id
    ],
)
def test_ids_that_the_tokenizer_would_not_give_are_reported(bucket, tmp_path, kind, ids, lost):
    bucket.put("a.npy", npy_bytes(np.array(ids, np.int32)))
    how = {"tokenizer": str(word_file(tmp_path / "tokenizer.json"))}
    if kind == "pairs":
        how = {"tokenizer": "gpt2", "bpe_folder": str(tiny_bpe(tmp_path))}
    report = inspect_data(bucket, settings(**how), 10**9, None, shows_text=True)
    assert report.lost_fraction == pytest.approx(lost)
    said = [one for one in (*report.notes, *report.problems) if "lost in a round trip" in one]
    assert len(said) == (lost > 0) and len(report.problems) == (lost > 0.01)


def test_an_empty_selection_is_refused(bucket):
    bucket.put("readme.md", b"")
    with pytest.raises(ShardError, match="neither tokens nor text among 1 objects"):
        inspect(bucket)


def verify(
    bucket: Any, *, deep: bool = False, vocabulary: int | None = None, **data: Any
) -> dict[str, FileCheck]:
    steps: list[tuple[int, int]] = []
    findings = verify_data(
        bucket,
        settings(**data),
        deep=deep,
        vocabulary=vocabulary,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[-1][0] == steps[-1][1]
    return {finding.name: finding for finding in findings}


@pytest.fixture
def prepared(tmp_path):
    """Three shards of 100 tokens with their manifest."""
    bucket = DirectoryBucket(tmp_path / "data")
    prepare(bucket, {f"t_{n}.npy": np.arange(100, dtype=np.uint16) + n for n in range(3)})
    return bucket


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_intact_files_have_no_problems(prepared):
    for deep in (False, True):
        found = verify(prepared, deep=deep)
        assert [finding.problem for finding in found.values()] == [None] * 3
        assert [finding.tokens for finding in found.values()] == [100] * 3
    assert [finding.max_id for finding in found.values()] == [99, 100, 101]
    found = verify(prepared, deep=True, vocabulary=101)
    assert [finding.problem is None for finding in found.values()] == [True, True, False]


def test_damage_is_found_without_reading_deep(prepared, tmp_path):
    flip(tmp_path / "data" / "t_0.npy", 200)
    (tmp_path / "data" / "t_1.npy").unlink()
    with (tmp_path / "data" / "t_2.npy").open("ab") as file:
        file.write(b"x")
    found = {name: finding.problem or "" for name, finding in verify(prepared).items()}
    assert "CRC-32C" in found["t_0.npy"]
    assert "not in the listing" in found["t_1.npy"]
    assert "bytes" in found["t_2.npy"]


def test_a_wrong_manifest_is_found_by_a_deep_check(prepared):
    blob = prepared.info("t_0.npy")
    assert blob is not None
    row = Shard("t_0.npy", 99, "uint16", blob.size, stored_crc32c(prepared, blob), None)
    write_manifest(prepared, Manifest((row,), "gpt2"))
    assert verify(prepared)["t_0.npy"].problem is None
    assert "it holds 100 tokens" in (verify(prepared, deep=True)["t_0.npy"].problem or "")


def test_files_without_a_manifest_are_read(tmp_path):
    bucket = DirectoryBucket(tmp_path / "data")
    bucket.write("a.npy", npy_bytes(np.arange(50, dtype=np.int32)))
    bucket.write("b.npy", npy_bytes(np.arange(50, dtype=np.int32))[:-4])
    bucket.write("c.npy", npy_bytes(np.array([1, -1], np.int32)))
    found = verify(bucket)
    assert found["a.npy"].tokens == 50
    assert "truncated" in (found["b.npy"].problem or "")
    assert found["c.npy"].problem is None
    assert "holds the negative id -1" in (verify(bucket, deep=True)["c.npy"].problem or "")


@pytest.mark.bucket
def test_a_bucket_is_verified_by_its_own_checksums(emulator):
    bucket = open_bucket(f"{emulator.url}/data")
    blob = bucket.write("a.npy", npy_bytes(np.arange(50, dtype=np.uint16)))
    write_manifest(bucket, Manifest((Shard("a.npy", 50, "uint16", blob.size, 1, None),), "x"))
    assert "CRC-32C" in (verify(bucket)["a.npy"].problem or "")
    downloads = [r for r in emulator.proxy.requests if r.is_download and "a.npy" in r.path]
    assert not downloads


def test_a_deep_verification_finds_ids_that_the_type_in_the_manifest_cannot_hold(prepared):
    content = npy_bytes(np.full(100, 70_000, np.int32))
    blob = prepared.write("t_1.npy", content, overwrite=True)
    rows = {one.name: one for one in read_manifest(prepared).shards}
    checksum = stored_crc32c(prepared, blob)
    rows["t_1.npy"] = Shard("t_1.npy", 100, "uint16", blob.size, checksum, None)
    write_manifest(prepared, Manifest(tuple(rows.values()), "gpt2"))
    found = verify(prepared, deep=True, vocabulary=100_000)
    assert "the id 70,000, but manifest.json says uint16" in str(found["t_1.npy"].problem)
    assert found["t_0.npy"].problem is None
