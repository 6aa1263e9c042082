from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cache import SHARD_STRIDE, FolderCache, manifest_of

from refocused.data.loader import batch as batch_module
from refocused.data.loader.batch import IGNORED_LABEL, Batch, BatchReader
from refocused.system.errors import ShardError


def reader_of(folder, *, sequence_length, wide=None, vocabulary=1 << 32, **reading) -> BatchReader:
    cache = FolderCache(folder, manifest_of(40, 41, 60, wide=wide), vocabulary=vocabulary)
    return BatchReader(cache, sequence_length=sequence_length, **reading)


def read_one(reader: BatchReader, shards: list[int], windows: list[int], *, micro: int) -> Batch:
    (batch,) = reader.read(np.array([shards]), np.array([windows]), micro=micro).batches()
    return batch


@pytest.mark.parametrize("wide", [None, 1])
def test_an_id_beyond_the_vocabulary_is_named_with_its_shard(tmp_path, wide):
    reader = reader_of(tmp_path, sequence_length=8, wide=wide, vocabulary=2050)
    assert read_one(reader, [1, 0], [1, 2], micro=2).input_ids.max() < 2050
    content = np.load(tmp_path / "part_1.npy")
    content[12] = 2050  # meanwhile, in the second window
    np.save(tmp_path / "part_1.npy", content)
    with pytest.raises(ShardError, match=r"part_1\.npy window 1: .* id 2,050.* ends at 2,049"):
        read_one(reader, [0, 1], [2, 1], micro=2)


def test_shards_of_both_types_share_a_batch_and_batches_share_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_module, "STAGED_TOKENS", 3 * 4)  # three rows at a time
    reader = reader_of(tmp_path, sequence_length=4, wide=1)
    np.save(tmp_path / "part_1.npy", np.load(tmp_path / "part_1.npy") + 2**31)
    first = read_one(reader, [0, 1, 2, 1], [1, 2, 3, 4], micro=5)
    kept = first.input_ids.clone()
    read_one(reader, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], micro=5)
    wide = 2**31 + SHARD_STRIDE
    begins = torch.tensor([4, wide + 8, 2 * SHARD_STRIDE + 12, wide + 16])
    assert torch.equal(first.input_ids[:4], begins[:, None] + torch.arange(4))
    assert torch.equal(first.labels[:4], first.input_ids[:4] + 1)
    assert torch.equal(first.input_ids, kept)


def test_describe_names_files_and_draws_runs_together(tmp_path):
    reader = reader_of(tmp_path, sequence_length=2)
    batch = read_one(reader, [1, 0, 1, 1, 1], [12, 3, 10, 4, 11], micro=6)
    assert batch.describe() == "part_0.npy window 3; part_1.npy windows 4, 10-12"


def test_where_a_masked_document_ends_there_is_no_label(tmp_path):
    reader = reader_of(tmp_path, sequence_length=8, document_id=9)
    np.save(tmp_path / "part_0.npy", np.array([9, 1, 2, 9, 9, 3, 4, 5, 9], dtype=np.uint16))
    batch = read_one(reader, [0], [0], micro=2)
    none = IGNORED_LABEL
    assert batch.input_ids[0].tolist() == [9, 1, 2, 9, 9, 3, 4, 5]
    assert batch.labels[0].tolist() == [1, 2, none, none, 3, 4, 5, none]
    assert batch.labels[1].tolist() == [none] * 8
    assert batch.counted_labels == 5
