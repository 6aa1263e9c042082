from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import WatchedBucket, llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, settings
from fakes import Emulator

from refocused.bucket.gcs import GcsBucket
from refocused.prepare import inspect_data as report_module
from refocused.prepare.inspect_data import DataReport, draw_report, inspect_data
from refocused.system.errors import ShardError


def inspect(
    bucket: Any, *, sample: int = 10**9, vocabulary: int | None = None, **data: Any
) -> DataReport:
    return inspect_data(bucket, settings(**data), sample_tokens=sample, vocabulary=vocabulary)


@pytest.fixture
def bucket(tmp_path: Path) -> WatchedBucket:
    return WatchedBucket(tmp_path / "data")


def padded(rows: list[list[int]], columns: int) -> bytes:
    ids = np.zeros((len(rows), columns), np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    return npz_bytes(input_ids=ids, sequence_lengths=lengths)


def test_padding_and_repeated_rows_are_counted(bucket: WatchedBucket) -> None:
    bucket.put("a.npz", padded([[5, 6, 7], [8], [5, 6, 7], []], 10))
    report = inspect(bucket, separator_id=9)
    assert (report.files, report.documents, report.places) == (1, 3, 40)
    assert report.tokens == 7 + 2  # two separators between three rows
    assert report.padding_fraction == pytest.approx(33 / 40)
    sample = report.sample
    assert (sample.tokens, sample.min_id, sample.max_id, sample.distinct_ids) == (7, 5, 8, 4)
    assert (sample.documents, sample.duplicate_documents) == (3, 1)
    assert sample.most_frequent[0] == (5, pytest.approx(2 / 7))
    assert sum(sample.id_histogram.counts) == 7
    assert sum(sample.length_histogram.counts) == 3
    assert report.sampled_fraction == 1.0
    assert any("82.5% of what is stored is padding" in note for note in report.notes)
    assert not report.problems


def test_documents_of_a_stream_are_known_by_their_separator(bucket: WatchedBucket) -> None:
    bucket.put("a.npy", npy_bytes(np.array([9, 1, 2, 9, 3, 9, 1, 2], np.uint16)))
    assert inspect(bucket).sample.documents is None
    sample = inspect(bucket, separator_id=9).sample
    assert (sample.documents, sample.duplicate_documents, sample.tokens) == (3, 1, 8)


def test_a_document_over_several_blocks_is_one(
    bucket: WatchedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refocused.data.formats.token_blocks.BLOCK_IDS", 3)
    document = list(range(20, 31))
    bucket.put("a.npy", npy_bytes(np.array([9, *document, 9, 7, 9, *document], np.uint16)))
    sample = inspect(bucket, separator_id=9).sample
    assert (sample.documents, sample.duplicate_documents) == (3, 1)
    bucket.put("b.npy", npy_bytes(np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], np.int32)))
    sample = inspect(bucket, separator_id=9, include=("b.npy",)).sample
    assert (sample.documents, sample.duplicate_documents) == (2, 1)


def test_every_form_is_read_and_the_refused_are_named(bucket: WatchedBucket) -> None:
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
    for said in (
        "--allow-pickle",
        "i.bin (and 1 more",
        "`refocused prepare_data convert`",
        "tokenize`",
    ):
        assert any(said in problem for problem in report.problems), said


def test_texts_are_one_problem_however_many_there_are(bucket: WatchedBucket) -> None:
    for number in range(12):
        bucket.put(f"{number:02d}.txt", b"words")
    (problem,) = inspect(bucket).problems
    assert problem.startswith("00.txt (and 11 more like it): this is text, not tokens.")
    assert "prepare_data tokenize" in problem


def test_a_sample_is_spread_over_files_and_said(
    bucket: WatchedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_ids_beyond_a_vocabulary_are_a_problem(bucket: WatchedBucket) -> None:
    bucket.put("a.npy", npy_bytes(np.array([1, 50_256], np.uint16)))
    assert not inspect(bucket, vocabulary=50_257).problems
    problem = inspect(bucket, vocabulary=50_256).problems[0]
    assert "Set model.vocabulary to the size of the tokenizer" in problem
    assert problem.endswith("at least 50257.")


def test_absurd_ids_take_no_memory(bucket: WatchedBucket) -> None:
    bucket.put("a.npy", npy_bytes(np.array([3, 2**32 - 1], np.uint32)))
    sample = inspect(bucket).sample
    assert (sample.max_id, sample.distinct_ids) == (2**32 - 1, 1)


def test_nothing_to_look_at_is_refused(bucket: WatchedBucket) -> None:
    bucket.put("readme.md", b"")
    with pytest.raises(ShardError, match="neither tokens nor text among 1 objects"):
        inspect(bucket)


@pytest.mark.bucket
def test_a_bucket_is_inspected_by_ranges(emulator: Emulator) -> None:
    bucket = GcsBucket(f"{emulator.url}/data")
    bucket.write("a.npy", npy_bytes(np.arange(60_000, dtype=np.uint16)))
    large = np.tile(np.arange(1000, dtype=np.uint16), 2000)
    bucket.write("b.npy", npy_bytes(large))
    before = len(emulator.proxy.requests)
    report = inspect(bucket, sample=10_000)
    downloads = [r for r in emulator.proxy.requests[before:] if r.is_download]
    assert downloads
    assert all("range" in {name.lower() for name in r.headers} for r in downloads)
    assert (report.tokens, report.sample.tokens) == (2_060_000, 10_000)


def test_the_picture_is_a_png(bucket: WatchedBucket, tmp_path: Path) -> None:
    bucket.put("a.npy", npy_bytes(np.arange(100, dtype=np.uint16)))
    file = tmp_path / "new" / "picture.png"
    draw_report(inspect(bucket), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 5000
