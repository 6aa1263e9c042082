from __future__ import annotations

import gc
import io
import pickle
import random
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, settings, tokens_of

from refocused.data.formats.array_headers import read_npy_header
from refocused.data.formats.token_blocks import token_blocks
from refocused.data.formats.token_layout import read_layout
from refocused.system.errors import ShardError

ROWS = np.array([[5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.int32)
LENGTHS = np.array([2, 3, 0, 4], np.int32)
MASK = (np.arange(4) < LENGTHS[:, None]).astype(np.int32)
KEPT = [5, 6, 7, 8, 9, 1, 2, 3, 4]


def refused(content: bytes, name: str, **changes: object) -> str:
    with pytest.raises(ShardError) as error:
        tokens_of(content, name, **changes)
    assert name in str(error.value)
    return str(error.value)


def test_rows_keep_what_their_lengths_say() -> None:
    content = npz_bytes(input_ids=ROWS, attention_mask=MASK, sequence_lengths=LENGTHS)
    assert tokens_of(content, "a.npz") == KEPT


def test_rows_keep_the_ones_of_their_mask_wherever_they_are() -> None:
    mask = MASK.copy()
    mask[0] = [0, 1, 0, 1]
    assert tokens_of(npz_bytes(input_ids=ROWS, attention_mask=mask), "a.npz") == [6, 0, *KEPT[2:]]


def test_a_mask_may_be_boolean_and_ids_may_not() -> None:
    content = npz_bytes(input_ids=ROWS, attention_mask=MASK.astype(bool))
    assert tokens_of(content, "a.npz") == KEPT
    assert "the elements are bool" in refused(npz_bytes(input_ids=ROWS > 0), "a.npz")


def test_separators_stand_between_rows_that_hold_tokens() -> None:
    content = npz_bytes(input_ids=ROWS, sequence_lengths=LENGTHS)
    expected = [5, 6, 99, 7, 8, 9, 99, 1, 2, 3, 4]
    assert tokens_of(content, "a.npz", separator_id=99) == expected


def test_separators_are_right_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refocused.data.formats.token_blocks.BLOCK_IDS", 4)
    content = npz_bytes(input_ids=ROWS[[2, 0, 1, 3]], sequence_lengths=LENGTHS[[2, 0, 1, 3]])
    expected = [5, 6, 99, 7, 8, 9, 99, 1, 2, 3, 4]
    assert tokens_of(content, "a.npz", separator_id=99) == expected


def test_rows_without_a_mask_lose_the_trailing_pad_id_alone() -> None:
    rows = np.array([[0, 5, 0, 6], [7, 0, 0, 0]], np.int32)
    assert tokens_of(npz_bytes(data=rows), "b.npz", pad_id=0) == [0, 5, 0, 6, 7]


def test_rows_without_a_mask_need_the_pad_id() -> None:
    assert "data.pad_id" in refused(npz_bytes(data=ROWS), "b.npz")


def test_lengths_win_over_the_pad_id() -> None:
    rows = np.array([[5, 0, 0]], np.int32)
    content = npz_bytes(input_ids=rows, sequence_lengths=np.array([2], np.int32))
    assert tokens_of(content, "a.npz", pad_id=0) == [5, 0]


def test_keys_are_tried_in_order_and_a_trailing_axis_is_dropped() -> None:
    content = npz_bytes(data=ROWS, arr_0=np.array([[[1], [2]]], np.int64), text=np.array(["words"]))
    assert tokens_of(content, "c.npz", pad_id=0) == [1, 2]


def test_the_only_integer_array_is_taken() -> None:
    assert tokens_of(npz_bytes(text=np.array([3, 4]), weights=np.ones(2)), "d.npz") == [3, 4]


@pytest.mark.parametrize("arrays", [{"x": ROWS, "y": ROWS}, {"x": np.ones(3)}, {}])
def test_an_unclear_npz_is_asked_about(arrays: dict[str, np.ndarray]) -> None:
    assert "which array holds the token ids?" in refused(npz_bytes(**arrays), "d.npz")


def test_pickled_arrays_are_refused_and_never_run() -> None:
    objects = np.array([[1, 2], [3]], dtype=object)
    text = refused(npz_bytes(sequences=objects), "c.npz")
    assert "--allow-pickle" in text
    assert "pickled" in refused(npy_bytes(objects), "c.npy")


def test_one_row_with_its_mask_is_read() -> None:
    content = npz_bytes(input_ids=np.array([4, 5, 0]), attention_mask=np.array([1, 1, 0]))
    assert tokens_of(content, "a.npz") == [4, 5]


@pytest.mark.parametrize("dtype", ["<u2", ">i4", "<i8", "u1"])
def test_streams_and_full_rows_are_read_in_every_integer_type(dtype: str) -> None:
    assert tokens_of(npy_bytes(np.arange(5).astype(dtype)), "f.npy") == [0, 1, 2, 3, 4]
    assert tokens_of(npy_bytes(np.arange(6).reshape(2, 3).astype(dtype)), "d.npy") == list(range(6))


def test_full_rows_are_joined_without_separators() -> None:
    content = npy_bytes(np.arange(6).reshape(2, 3))
    assert tokens_of(content, "d.npy", separator_id=9) == list(range(6))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint16])
def test_bare_tensors_are_read(dtype: torch.dtype) -> None:
    assert tokens_of(pt_bytes(torch.arange(6).to(dtype)), "chunk_000000.pt") == list(range(6))
    rows = torch.arange(6).reshape(2, 3).to(dtype)
    assert tokens_of(pt_bytes(rows), "rows.pt") == list(range(6))


def test_a_view_of_a_larger_storage_is_read_from_its_offset() -> None:
    assert tokens_of(pt_bytes(torch.arange(10)[3:6]), "view.pt") == [3, 4, 5]


@pytest.mark.parametrize(
    "value",
    [
        {"input_ids": torch.arange(3)},
        [torch.arange(3)],
        torch.ones(3),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(1, dtype=torch.int64).expand(10**12),
        3,
    ],
    ids=["dict", "list", "float", "transposed", "expanded", "number"],
)
def test_other_pt_files_are_refused(value: object) -> None:
    assert "torch.save(" in refused(pt_bytes(value), "x.pt")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('the pickle was run')",))


def test_a_pt_that_would_run_code_is_refused_without_running_it() -> None:
    content = pt_bytes(torch.arange(3))
    evil = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(evil, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry, pickle.dumps(Bomb(), 2) if is_pickle else old.read(entry))
    assert "no bare tensor" in refused(evil.getvalue(), "x.pt")


def test_headerless_files_need_their_type() -> None:
    content = np.arange(5, dtype="<u2").tobytes()
    assert tokens_of(content, "train.bin", dtype="uint16") == [0, 1, 2, 3, 4]
    assert "data.dtype" in refused(content, "train.bin")
    refused(content, "train.bin", dtype="uint32")  # 10 bytes are no whole number of ids


def test_llm_c_files_are_known_by_their_magic() -> None:
    assert tokens_of(llm_c_bytes([7, 8, 9]), "fineweb.bin", dtype="int64") == [7, 8, 9]


@pytest.mark.parametrize("count", [2, 4, -1, 2**31 - 1])
def test_llm_c_files_with_another_length_are_refused(count: int) -> None:
    refused(llm_c_bytes([7, 8, 9], count=count), "fineweb.bin")


def test_llm_c_files_of_another_version_are_refused() -> None:
    assert "version 2" in refused(llm_c_bytes([1], version=2), "fineweb.bin")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "txt"])
def test_text_is_refused_with_the_way_to_tokens(suffix: str) -> None:
    assert "prepare_data tokenize" in refused(b"words", f"x.{suffix}")


def test_floats_and_negative_ids_are_refused() -> None:
    assert "whole numbers" in refused(npy_bytes(np.ones(3)), "x.npy")
    assert "-4" in refused(npy_bytes(np.array([1, -4], np.int32)), "x.npy")


def test_negative_padding_is_fine() -> None:
    rows = np.array([[1, -100]], np.int32)
    content = npz_bytes(input_ids=rows, sequence_lengths=np.array([1]))
    assert tokens_of(content, "x.npz") == [1]


@pytest.mark.parametrize("shape", ["(10**12,)", "(1000000000000,)", "(-3,)", "(2, 2, 2)", "()"])
def test_shapes_that_lie_are_refused_before_anything_is_allocated(shape: str) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    refused(content, "x.npy")


def test_a_header_length_that_lies_is_refused() -> None:
    content = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + bytes(100)
    assert "4,294,967,295" in refused(content, "x.npy")


def test_a_header_whose_keys_are_not_all_text_is_refused() -> None:
    header = b"{'descr': '<i4', 'fortran_order': False, 40: (1,), }"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4)
    assert "header cannot be read" in refused(content, "x.npy")


def test_columns_first_is_refused() -> None:
    assert "column by column" in refused(npy_bytes(np.asfortranarray(ROWS)), "x.npy")


def test_a_member_that_claims_more_than_deflate_can_hold_is_refused() -> None:
    content = bytearray(npz_bytes(input_ids=np.arange(100)))
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**31)
    assert "claims 2,147,483,648" in refused(bytes(content), "x.npz")


@pytest.mark.parametrize(
    "arrays",
    [
        {"sequence_lengths": np.array([2, 3, 0], np.int32)},
        {"sequence_lengths": np.array([2, 3, 0, 5], np.int32)},
        {"sequence_lengths": np.array([2, 3, 0, -1], np.int32)},
        {"attention_mask": MASK[:3]},
        {"attention_mask": MASK * 7},
    ],
)
def test_lengths_and_masks_that_cannot_be_are_refused(arrays: dict[str, np.ndarray]) -> None:
    refused(npz_bytes(input_ids=ROWS, **arrays), "x.npz")


def test_a_file_of_padding_or_of_nothing_is_refused() -> None:
    refused(npz_bytes(input_ids=ROWS, attention_mask=MASK * 0), "x.npz")
    assert "no tokens" in refused(npy_bytes(np.array([], np.uint16)), "x.npy")


SAMPLES = {
    "x.npy": npy_bytes(np.arange(40, dtype=np.int32)),
    "x.npz": npz_bytes(input_ids=ROWS, sequence_lengths=LENGTHS),
    "y.npz": npz_bytes(input_ids=ROWS, attention_mask=MASK),
    "x.pt": pt_bytes(torch.arange(40)),
    "x.bin": llm_c_bytes(range(40)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_truncated_file_is_always_a_named_error(name: str) -> None:
    content = SAMPLES[name]
    for length in range(0, len(content), max(len(content) // 60, 1)):
        refused(content[:length], name)


@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_bytes_give_tokens_or_a_named_error_and_nothing_else(name: str) -> None:
    chance = random.Random(name)
    data = settings(pad_id=0)
    for _ in range(400):
        content = bytearray(SAMPLES[name])
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        file = io.BytesIO(content)
        try:
            layout = read_layout(file, name=name, data=data)
            assert sum(len(block) for block in token_blocks(file, layout, name=name)) < 1000
        except ShardError as error:
            assert name in str(error)


class Finalized:
    """Garbage in a cycle: collecting it lets another thread run, also inside of a parser."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        sum(range(50))


def test_headers_are_read_in_several_threads_at_once() -> None:
    """Found: on Python 3.11 a run ended with SystemError, AST constructor recursion depth."""
    content = npy_bytes(np.arange(5, dtype=np.uint16))

    def read_many() -> int:
        for _ in range(300):
            Finalized()
            header = read_npy_header(io.BytesIO(content), what="a.npy")
        return header.shape[0]

    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = [job.result() for job in [threads.submit(read_many) for _ in range(40)]]
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert found == [5] * 40
