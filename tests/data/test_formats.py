import gc
import gzip
import io
import pickle
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, tokens_of

from refocused.data.formats.token_layout import read_npy_header
from refocused.system.errors import ShardError

ROWS = np.array([[5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.int32)
LENGTHS = np.array([2, 3, 0, 4], np.int32)
MASK = (np.arange(4) < LENGTHS[:, None]).astype(np.int32)
KEPT = [5, 6, 7, 8, 9, 1, 2, 3, 4]
SEPARATED = [5, 6, 99, 7, 8, 9, 99, 1, 2, 3, 4]
OTHER_MASK = np.array([[0, 1, 0, 1], *MASK[1:]])
UINT16 = np.arange(5, dtype="<u2").tobytes()


def case(what: str, name: str, content: bytes, tokens: list[int], **data: Any) -> Any:
    return pytest.param(name, content, tokens, data, id=what)


def rows(**arrays: Any) -> bytes:
    return npz_bytes(**{"input_ids": ROWS, **arrays})


@pytest.mark.parametrize(
    ("name", "content", "tokens", "data"),
    [
        case("lengths", "a.npz", rows(attention_mask=MASK, sequence_lengths=LENGTHS), KEPT),
        case("a mask", "a.npz", rows(attention_mask=OTHER_MASK), [6, 0, *KEPT[2:]]),
        case("a boolean mask", "a.npz", rows(attention_mask=MASK.astype(bool)), KEPT),
        case("separators", "a.npz", rows(sequence_lengths=LENGTHS), SEPARATED, separator_id=99),
        case(
            "rows without a mask lose the trailing pad id alone",
            "b.npz",
            npz_bytes(data=np.array([[0, 5, 0, 6], [7, 0, 0, 0]])),
            [0, 5, 0, 6, 7],
            pad_id=0,
        ),
        case(
            "lengths win over the pad id",
            "a.npz",
            npz_bytes(input_ids=np.array([[5, 0, 0]]), sequence_lengths=np.array([2])),
            [5, 0],
            pad_id=0,
        ),
        case(
            "keys are tried in order and a trailing axis is dropped",
            "c.npz",
            npz_bytes(data=ROWS, arr_0=np.array([[[1], [2]]]), text=np.array(["words"])),
            [1, 2],
            pad_id=0,
        ),
        case(
            "the only integer array",
            "d.npz",
            npz_bytes(text=np.array([3, 4]), weights=np.ones(2)),
            [3, 4],
        ),
        case(
            "one row with its mask",
            "a.npz",
            npz_bytes(input_ids=np.array([4, 5, 0]), attention_mask=np.array([1, 1, 0])),
            [4, 5],
        ),
        case(
            "padding may be negative",
            "x.npz",
            npz_bytes(input_ids=np.array([[1, -100]]), sequence_lengths=np.array([1])),
            [1],
        ),
        case(
            "full rows are joined without separators",
            "d.npy",
            npy_bytes(np.arange(6).reshape(2, 3)),
            [*range(6)],
            separator_id=9,
        ),
        *[
            case(f"{kind} {shape}", "f.npy", npy_bytes(array.reshape(shape)), [*range(6)])
            for kind in ("<u2", ">i4", "<i8", "u1")
            for array in [np.arange(6).astype(kind)]
            for shape in ((6,), (2, 3))
        ],
        *[
            case(f"{kind} {shape}", "c.pt", pt_bytes(tensor.reshape(shape)), [*range(6)])
            for kind in (torch.int64, torch.int32, torch.int16, torch.uint16)
            for tensor in [torch.arange(6).to(kind)]
            for shape in ((6,), (2, 3))
        ],
        case("a view of a larger storage", "v.pt", pt_bytes(torch.arange(10)[3:6]), [3, 4, 5]),
        case("a headerless file", "train.bin", UINT16, [*range(5)], dtype="uint16"),
        case("llm.c's magic", "f.bin", llm_c_bytes([7, 8, 9]), [7, 8, 9], dtype="int64"),
    ],
)
def test_every_form_gives_its_tokens(name, content, tokens, data):
    assert tokens_of(content, name, **data) == tokens


def test_separators_are_right_across_blocks(monkeypatch):
    monkeypatch.setattr("refocused.data.formats.token_blocks.BLOCK_IDS", 4)
    content = npz_bytes(input_ids=ROWS[[2, 0, 1, 3]], sequence_lengths=LENGTHS[[2, 0, 1, 3]])
    assert tokens_of(content, "a.npz", separator_id=99) == SEPARATED


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('the pickle was run')",))


def pickled_bomb() -> bytes:
    """A `.pt` file that would run code."""
    evil = io.BytesIO()
    good = io.BytesIO(pt_bytes(torch.arange(3)))
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(evil, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry, pickle.dumps(Bomb(), 2) if is_pickle else old.read(entry))
    return evil.getvalue()


def npy_header(entries: str) -> bytes:
    text = f"{{{entries}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


def inflating() -> bytes:
    """An `.npz` whose directory claims 2 GiB in its member."""
    content = bytearray(npz_bytes(input_ids=np.arange(100)))
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**31)
    return bytes(content)


OBJECTS = np.array([[1, 2], [3]], dtype=object)

# The file's name and content, how it is read, and what the refusal says beside the name.
REFUSED: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.npz", npz_bytes(input_ids=ROWS > 0), {}, "the elements are bool"),
    ("b.npz", npz_bytes(data=ROWS), {}, "data.pad_id"),
    *[
        ("d.npz", npz_bytes(**arrays), {}, "it is unclear which array holds the token ids")
        for arrays in ({"x": ROWS, "y": ROWS}, {"x": np.ones(3)}, {})
    ],
    ("c.npz", npz_bytes(sequences=OBJECTS), {}, "Pickled arrays"),
    ("c.npy", npy_bytes(OBJECTS), {}, "Pickled"),
    *[
        ("x.pt", pt_bytes(value), {}, "torch.save(")
        for value in (
            {"input_ids": torch.arange(3)},
            [torch.arange(3)],
            torch.ones(3),
            torch.arange(6).reshape(2, 3).T,
            torch.zeros(1, dtype=torch.int64).expand(10**12),
            3,
        )
    ],
    ("x.pt", pickled_bomb(), {}, "not a bare tensor"),
    ("train.bin", UINT16, {}, "data.dtype"),
    ("train.bin", UINT16, {"dtype": "uint32"}, "the file has 10"),  # no whole number of ids
    *[("f.bin", llm_c_bytes([7, 8, 9], count=n), {}, "") for n in (2, 4, -1, 2**31 - 1)],
    ("f.bin", llm_c_bytes([1], version=2), {}, "version 2"),
    *[
        (f"x.{suffix}", b"words", {}, "prepare_data tokenize")
        for suffix in ("parquet", "jsonl", "jsonl.gz", "txt")
    ],
    ("x.npy", npy_bytes(np.ones(3)), {}, "but token ids are integers"),
    ("x.npy", npy_bytes(np.array([1, -4], np.int32)), {}, "-4"),
    *[
        ("x.npy", npy_header(f"'descr': '<i8', 'fortran_order': False, 'shape': {shape}"), {}, "")
        for shape in ("(10**12,)", "(1000000000000,)", "(-3,)", "(2, 2, 2)", "()")
    ],
    ("x.npy", b"\x93NUMPY\x02\x00" + b"\xff" * 4 + bytes(100), {}, "4,294,967,295"),
    ("x.npy", npy_header("'descr': '<i4', 'fortran_order': False, 40: (1,)"), {}, "cannot be read"),
    ("x.npy", npy_bytes(np.asfortranarray(ROWS)), {}, "in column order"),
    ("x.npz", inflating(), {}, "claims 2,147,483,648"),
    *[
        ("x.npz", npz_bytes(input_ids=ROWS, **{key: np.array(values)}), {}, "")
        for key, values in (
            ("sequence_lengths", [2, 3, 0]),
            ("sequence_lengths", [2, 3, 0, 5]),
            ("sequence_lengths", [2, 3, 0, -1]),
            ("attention_mask", MASK[:3]),
            ("attention_mask", MASK * 7),
            ("attention_mask", MASK * 0),
        )
    ],
    ("x.npy", npy_bytes(np.array([], np.uint16)), {}, "no tokens"),
]


def refused(content: bytes, name: str, **changes: object) -> str:
    with pytest.raises(ShardError) as error:
        tokens_of(content, name, **changes)
    assert name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "content", "data", "said"), REFUSED)
def test_unsupported_files_are_refused_by_name(name, content, data, said):
    assert said in refused(content, name, **data)


SAMPLES = {
    "x.npy": npy_bytes(np.arange(40, dtype=np.int32)),
    "x.npz": npz_bytes(input_ids=ROWS, sequence_lengths=LENGTHS),
    "y.npz": npz_bytes(input_ids=ROWS, attention_mask=MASK),
    "x.pt": pt_bytes(torch.arange(40)),
    "x.bin": llm_c_bytes(range(40)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_truncated_file_is_always_a_named_error(name):
    content = SAMPLES[name]
    for length in range(0, len(content), max(len(content) // 60, 1)):
        refused(content[:length], name)


class Finalized:
    """Garbage in a cycle: collecting it lets another thread run, also inside of a parser."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        sum(range(50))


def test_headers_are_read_in_several_threads_at_once():
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


WIDE = np.random.default_rng(0).integers(0, 128_000, 4000)


def test_llama_3_files_of_llm_c_have_four_bytes_an_id():
    header = struct.pack("<3i", 20240801, 7, len(WIDE)).ljust(1024, b"\0")
    content = header + WIDE.astype("<u4").tobytes()
    assert tokens_of(content, "f.bin", dtype="uint16") == WIDE.tolist()
    with pytest.raises(ShardError, match=r"version 1 of llm\.c's format 20240801; only 7 is"):
        tokens_of(content[:4] + b"\1" + content[5:], "f.bin")


@pytest.mark.parametrize(
    ("content", "dtype", "said"),
    [
        (WIDE.astype("<u4").tobytes(), "uint16", "every second id is 0"),
        ((WIDE % 50_000).astype("<u4").tobytes(), "uint16", "every second id is 0"),
        (WIDE.astype("<i8").tobytes(), "uint32", "every second id is 0"),
        (
            gzip.compress(WIDE.astype("<u2").tobytes(), mtime=0) + b"\0",
            "uint16",
            "compressed by gzip",
        ),
    ],
)
def test_bytes_that_are_not_ids_are_refused(content, dtype, said):
    content += bytes(-len(content) % 8)
    with pytest.raises(ShardError, match=f"f.bin: .*{said}"):
        tokens_of(content, "f.bin", dtype=dtype)


@pytest.mark.parametrize("name", ["f.bin", "f.npy"])
def test_ids_that_only_begin_as_gzip_does_are_read(name):
    ids = np.array([0x8B1F, 7, *range(1000)], "<u2")
    content = ids.tobytes() if name == "f.bin" else npy_bytes(ids)
    assert tokens_of(content, name, dtype="uint16") == ids.tolist()
