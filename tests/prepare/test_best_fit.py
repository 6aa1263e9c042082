import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from data.shard_samples import npy_bytes, settings
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from refocused.bucket.folder import DirectoryBucket
from refocused.data.formats.token_blocks import Ids
from refocused.models.attention import document_mask
from refocused.prepare import write_shards as shard_packer
from refocused.prepare.convert import ConvertRequest, convert
from refocused.prepare.write_shards import BestFit, PackResult, best_fit_decreasing

BEGIN, LENGTH = 0, 8


def stream_of(sizes: list[int]) -> Ids:
    """A stream of documents with so many ids after the begin id, all different."""
    numbers = itertools.count(1)
    return np.array(
        [one for size in sizes for one in (BEGIN, *itertools.islice(numbers, size))], np.uint16
    )


def packed(stream: Ids, block: int = 10_000) -> tuple[Ids, BestFit]:
    fit = BestFit(LENGTH, BEGIN, dtype=np.dtype(np.uint16))
    blocks = [stream[at : at + block] for at in range(0, len(stream), block)]
    sequences = [some for one in blocks for some in fit.add(one)] + list(fit.rest())
    return np.concatenate(sequences).reshape(-1, LENGTH), fit


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 50), st.integers(LENGTH, 200))
@example([7, 8, 14, 15, 0, 6], 5, 1000)
@example([40, 7], 3, LENGTH)
def test_no_id_is_lost_and_only_long_documents_are_cut(sizes, block, buffered):
    stream = stream_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_packer, "BUFFERED_IDS", buffered)
        sequences, fit = packed(stream, block)
    assert sorted(sequences[sequences != BEGIN]) == sorted(stream[stream != BEGIN])
    assert (sequences[:, 0] == BEGIN).all()
    parts = [part for row in sequences for part in np.split(row, np.flatnonzero(row == BEGIN))]
    kept = {tuple(part[1:]) for part in parts if len(part) > 1}
    documents = np.split(stream, np.flatnonzero(stream == BEGIN))[1:]
    whole = {tuple(one[1:]) for one in documents if 1 < len(one) <= LENGTH}
    assert whole <= kept
    ids = sequences.size
    assert (fit.counts["ids"], fit.counts["stream"]) == (ids, len(stream))
    assert fit.counts["padding"] == ids - sum(len(part) + 1 for part in kept)


def test_the_counts_of_documents_cut_with_and_without():
    sequences, fit = packed(stream_of([4, 3, 4, 20, 2]))  # in a stream: 0-4 5-8 9-13 14-34 35-37
    assert sequences.tolist() == [
        [0, 1, 2, 3, 4, 0, 32, 33],
        [0, 5, 6, 7, 0, 0, 0, 0],
        [0, 8, 9, 10, 11, 0, 0, 0],
        [0, *range(12, 19)],
        [0, *range(19, 26)],
        [0, *range(26, 32), 0],
    ]
    found = {"documents": 5, "cut": 1, "cut_in_stream": 2, "padding": 8, "ids": 48, "stream": 38}
    assert fit.counts == found


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_decreasing_against_its_definition(sizes):
    sequences: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        room = {20 - sum(sizes[i] for i in one): one for one in sequences}
        fullest = min((left for left in room if left >= sizes[number]), default=None)
        (room[fullest] if fullest is not None else sequences).append(
            number if fullest is not None else [number]  # type: ignore[arg-type]
        )
    filled = best_fit_decreasing(sizes, room=20)
    spaces = [sorted(sum(sizes[i] for i in one) for one in some) for some in (filled, sequences)]
    assert spaces[0] == spaces[1]


def test_a_packed_sequence_attends_within_its_documents_and_never_to_padding():
    sequences, _ = packed(stream_of([3, 2, 5, 1, 9, 4]))
    rows = torch.from_numpy(sequences.astype(np.int64))
    mask = document_mask(rows, document_id=BEGIN)[:, 0]
    for row, sees in zip(sequences, mask, strict=True):
        parts = np.cumsum(row == BEGIN)
        for query, key in itertools.product(range(LENGTH), repeat=2):
            assert sees[query, key] == (key <= query and parts[query] == parts[key])
        padding = [at for at in range(1, LENGTH) if (row[at : at + 2] == BEGIN).all()]
        assert all(sees[:, at].sum() == 1 for at in padding)


def converted(folder: Path, name: str, *, cut: bool = False) -> PackResult:
    def progress(done: int, total: int) -> None:
        if cut and done:
            raise KeyboardInterrupt

    return convert(
        DirectoryBucket(folder / "source"),
        DirectoryBucket(folder / name),
        data=settings(separator_id=BEGIN),
        work=folder / name / ".prepare",
        request=ConvertRequest(vocabulary=65_536, best_fit=LENGTH, shard_tokens=20),
        progress=progress,
    )


def test_convert_packs_each_file_and_continues_after_a_kill(tmp_path):
    sizes = ([4, 2, 4, 20, 2], [7, 3, 3, 30, 1])
    for number, one in enumerate(sizes):
        content = npy_bytes(stream_of(one))
        DirectoryBucket(tmp_path / "source").write(f"{number}.npy", content)
    whole = converted(tmp_path, "whole")
    with pytest.raises(KeyboardInterrupt):
        converted(tmp_path, "cut", cut=True)
    assert converted(tmp_path, "cut").manifest == whole.manifest
    rows = []
    for shard in whole.manifest.shards:
        assert (shard.packed_for, shard.document_id) == (LENGTH, BEGIN)
        tokens = np.load(tmp_path / "whole" / shard.name)
        assert (len(tokens) <= 17, len(tokens) % LENGTH, tokens[-1]) == (True, 1, BEGIN)
        rows.append(tokens[:-1])
    wanted = [packed(stream_of(one))[0].ravel() for one in sizes]
    assert np.concatenate(rows).tolist() == np.concatenate(wanted).tolist()
    assert whole.packing["documents"] == 10
