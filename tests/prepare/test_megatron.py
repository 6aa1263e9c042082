from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from refocused.prepare import document_streams as blocks_module
from refocused.prepare.document_streams import megatron_blocks
from refocused.system.errors import ShardError

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_pair(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], *, code: int = 8, name: str = "m"
) -> tuple[Path, Path]:
    """Write documents, each of sequences of ids, as Megatron does; return `.idx` and `.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    sequences = [sequence for document in documents for sequence in document]
    dtype = np.dtype(CODES[code])
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    ends = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(ends))
    index, content = folder / f"{name}.idx", folder / f"{name}.bin"
    index.write_bytes(
        header + lengths.tobytes() + pointers.astype("<i8").tobytes() + ends.tobytes()
    )
    content.write_bytes(np.array([i for s in sequences for i in s], dtype).tobytes())
    return index, content


def read(pair: tuple[Path, Path], *, separator_id: int | None = None) -> list[int]:
    found = megatron_blocks(*pair, separator_id=separator_id, name="m.bin")
    return [int(one) for block in found for one in block]


@pytest.mark.parametrize("code", CODES)
def test_every_element_type_is_read(tmp_path: Path, code: int) -> None:
    assert read(write_pair(tmp_path, [[[1, 2], [3]], [[100]]], code=code)) == [1, 2, 3, 100]


def test_documents_are_kept_apart_but_not_twice(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, [[[1, 2], [3]], [[]], [[4, 9]], [[5]], [[6]]])
    assert read(pair, separator_id=9) == [1, 2, 3, 9, 4, 9, 5, 9, 6]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 7, 100])
def test_blocks_do_not_show(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(block)
    documents = [[list(range(10, 10 + draw.integers(0, 9)))] for _ in range(40)]
    pair = write_pair(tmp_path, documents)
    whole = read(pair, separator_id=9)
    monkeypatch.setattr(blocks_module, "BLOCK_IDS", block)
    assert read(pair, separator_id=9) == whole
    texts = [document[0] for document in documents if document[0]]
    assert whole == [one for text in texts for one in [9, *text]][1:]


def damaged(pair: tuple[Path, Path], offset: int, content: bytes) -> tuple[Path, Path]:
    stored = bytearray(pair[0].read_bytes())
    stored[offset : offset + len(content)] = content
    pair[0].write_bytes(bytes(stored))
    return pair


@pytest.mark.parametrize(
    ("offset", "content", "said"),
    [
        (0, b"X", "not as Megatron's index"),
        (9, b"\2", "version 2"),
        (17, b"\6", "element type 6"),
        (18, struct.pack("<Q", 1 << 60), "do not fit"),
        (18, struct.pack("<Q", 0), "do not fit"),
        (26, struct.pack("<Q", 7), "do not fit"),
        (34, struct.pack("<i", 9), "do not lie one after the other"),
        (34, struct.pack("<i", -2), "do not lie one after the other"),
        (42, struct.pack("<q", 1), "do not lie one after the other"),
        (58, struct.pack("<q", 1), "do not cover"),
        (66, struct.pack("<q", 5), "do not cover"),
    ],
)
def test_a_lying_index_is_refused(tmp_path: Path, offset: int, content: bytes, said: str) -> None:
    pair = damaged(write_pair(tmp_path, [[[1, 2]], [[3]]]), offset, content)
    with pytest.raises(ShardError, match=said):
        read(pair)


def test_cut_files_and_negative_ids_are_refused(tmp_path: Path) -> None:
    index, content = write_pair(tmp_path, [[[1, 2]], [[3]]])
    content.write_bytes(content.read_bytes()[:-1])
    with pytest.raises(ShardError, match="do not lie"):
        read((index, content))
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(ShardError, match="not as Megatron's index"):
        read((index, content))
    with pytest.raises(ShardError, match="the id -1"):
        read(write_pair(tmp_path, [[[1, -1]]], code=4))
