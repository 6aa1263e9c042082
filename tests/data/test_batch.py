from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cache import SHARD_STRIDE, FakeManifest, FolderCache

from refocused.data.loader import batch as batch_module
from refocused.data.loader.batch import IGNORED_LABEL, Batch, BatchReader
from refocused.system.errors import ShardError


@pytest.fixture
def manifest() -> FakeManifest:
    return FakeManifest.of(40, 41, 60)


@pytest.fixture
def cache(tmp_path, manifest) -> FolderCache:
    return FolderCache(tmp_path, manifest)


def read_one(reader: BatchReader, shards: list[int], windows: list[int], *, micro: int) -> Batch:
    (batch,) = reader.read(np.array([shards]), np.array([windows]), micro=micro).batches()
    return batch


def test_labels_are_the_next_tokens_of_the_shard(cache, manifest):
    reader = BatchReader(cache, sequence_length=8)
    batch = read_one(reader, [1, 0, 1], [4, 2, 0], micro=3)
    begins = torch.tensor([SHARD_STRIDE + 4 * 8, 2 * 8, SHARD_STRIDE])
    assert torch.equal(batch.input_ids, begins[:, None] + torch.arange(8))
    assert torch.equal(batch.labels, batch.input_ids + 1)
    assert batch.labels[0, -1] == SHARD_STRIDE + 40  # the very last token of the shard
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_inputs_and_labels_of_all_passes_are_views_of_the_same_contiguous_rows(cache, manifest):
    reader = BatchReader(cache, sequence_length=8)
    passes = reader.read(np.array([[1, 0], [2, 2]]), np.array([[4, 2], [5, 1]]), micro=2)
    assert (passes.tokens.shape, passes.tokens.is_contiguous()) == ((2, 2, 9), True)
    assert passes.masked_labels is None
    for number, batch in enumerate(passes.batches()):
        assert batch.input_ids.data_ptr() == passes.tokens[number].data_ptr()
        assert batch.labels.data_ptr() == passes.tokens[number].data_ptr() + 8
        assert torch.equal(batch.labels, batch.input_ids + 1)
    masked = reader.read(np.array([[1]]), np.array([[4]]), micro=2)
    assert masked.masked_labels is not None
    assert masked.batches()[0].labels.data_ptr() == masked.masked_labels.data_ptr()


def test_passes_read_together_are_those_read_one_by_one(tmp_path, manifest, monkeypatch):
    manifest.shards[1].dtype = "uint32"
    reader = BatchReader(FolderCache(tmp_path, manifest), sequence_length=4)
    draw = np.random.default_rng(3)
    shards, windows = draw.integers(0, 3, (5, 3)), draw.integers(0, 9, (5, 3))
    monkeypatch.setattr(batch_module, "STAGED_TOKENS", 4 * 4)  # four rows at a time: over passes
    together = reader.read(shards, windows, micro=3).batches()
    for batch, own, places in zip(together, shards.tolist(), windows.tolist(), strict=True):
        alone = read_one(reader, own, places, micro=3)
        assert torch.equal(batch.input_ids, alone.input_ids)
        assert torch.equal(batch.labels, alone.labels)
        assert (batch.shards.tolist(), batch.windows.tolist()) == (own, places)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_an_id_beyond_the_vocabulary_is_named_with_its_shard(tmp_path, manifest, dtype):
    manifest.shards[1].dtype = dtype
    cache = FolderCache(tmp_path, manifest, vocabulary=2050)
    reader = BatchReader(cache, sequence_length=8)
    assert read_one(reader, [1, 0], [1, 2], micro=2).input_ids.max() < 2050
    content = np.load(tmp_path / "part_1.npy")
    content[12] = 2050  # meanwhile, in the second window
    np.save(tmp_path / "part_1.npy", content)
    with pytest.raises(ShardError, match=r"part_1\.npy window 1: .* id 2,050.* ends at 2,049"):
        read_one(reader, [0, 1], [2, 1], micro=2)


def test_shards_of_both_types_share_a_batch_and_batches_share_no_memory(tmp_path, manifest):
    manifest.shards[1].dtype = "uint32"
    reader = BatchReader(FolderCache(tmp_path, manifest), sequence_length=4)
    np.save(tmp_path / "part_1.npy", np.load(tmp_path / "part_1.npy") + 2**31)
    first = read_one(reader, [0, 1, 2, 1], [1, 2, 3, 4], micro=5)
    kept = first.input_ids.clone()
    read_one(reader, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], micro=5)
    wide = 2**31 + SHARD_STRIDE
    begins = torch.tensor([4, wide + 8, 2 * SHARD_STRIDE + 12, wide + 16])
    assert torch.equal(first.input_ids[:4], begins[:, None] + torch.arange(4))
    assert torch.equal(first.labels[:4], first.input_ids[:4] + 1)
    assert torch.equal(first.input_ids, kept)


def test_describe_names_files_and_draws_runs_together(cache, manifest):
    batch = read_one(
        BatchReader(cache, sequence_length=2), [1, 0, 1, 1, 1], [12, 3, 10, 4, 11], micro=6
    )
    assert batch.describe() == "part_0.npy window 3; part_1.npy windows 4, 10-12"


def test_where_a_masked_document_ends_there_is_no_label(tmp_path, manifest):
    cache = FolderCache(tmp_path, manifest)
    np.save(tmp_path / "part_0.npy", np.array([9, 1, 2, 9, 9, 3, 4, 5, 9], dtype=np.uint16))
    reader = BatchReader(cache, sequence_length=8, document_id=9)
    batch = read_one(reader, [0], [0], micro=2)
    none = IGNORED_LABEL
    assert batch.input_ids[0].tolist() == [9, 1, 2, 9, 9, 3, 4, 5]
    assert batch.labels[0].tolist() == [1, 2, none, none, 3, 4, 5, none]
    assert batch.labels[1].tolist() == [none] * 8
    assert batch.counted_labels == 5
