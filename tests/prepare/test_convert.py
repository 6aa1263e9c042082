import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, settings
from data.text_samples import files_of

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.data.manifest.shard_manifest import Manifest, build_manifest, write_manifest
from refocused.prepare import convert as blocks_module
from refocused.prepare.convert import ConvertRequest, convert, megatron_blocks
from refocused.system.errors import ShardError


class CutError(Exception):
    pass


class Site:
    def __init__(self, folder: Path) -> None:
        self.source = DirectoryBucket(folder / "source")
        self.out = folder / "out"
        self.steps: list[tuple[int, int]] = []

    def put(self, name: str, content: bytes) -> None:
        self.source.write(name, content)

    def convert(
        self, *, source: Any = None, cut_after: int = 10**9, request: Any = None, **data: Any
    ) -> Manifest:
        def progress(done: int, total: int) -> None:
            self.steps.append((done, total))
            if len(self.steps) == cut_after + 1:  # the first is the start
                raise CutError

        return convert(
            source or self.source,
            DirectoryBucket(self.out),
            data=settings(**data),
            work=self.out / ".prepare",
            request=ConvertRequest(**{"vocabulary": 65_536, **(request or {})}),
            progress=progress,
        ).manifest

    def tokens(self) -> dict[str, list[int]]:
        paths = sorted(self.out.rglob("*.npy"))
        return {path.relative_to(self.out).as_posix(): np.load(path).tolist() for path in paths}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def ragged(rows: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def test_a_file_of_padding_alone_is_refused_and_no_other_takes_its_name(site):
    for name, rows in {"a": [[1, 0]], "b": [[0, 0]], "c": [[3, 0]]}.items():
        site.put(f"{name}.npz", npz_bytes(data=np.array(rows, np.int32)))
    with pytest.raises(ShardError, match=r"b\.npz: it holds no tokens"):
        site.convert(pad_id=0)


def test_every_form_becomes_streams_under_its_own_name(site):
    ids = np.array([[1, 2, 0], [3, 0, 0]], np.int32)
    site.put("x/a.npz", npz_bytes(input_ids=ids, sequence_lengths=np.array([2, 1], np.int32)))
    site.put("b.npz", npz_bytes(data=ids))
    site.put("d.npy", npy_bytes(np.array([[1, 2], [3, 4]], np.int64)))
    site.put("e.pt", pt_bytes(__import__("torch").arange(5)))
    site.put("g.bin", np.array([5, 6], np.uint16).tobytes())
    site.put("h.bin", llm_c_bytes([7, 8]))
    write_pair(Path(site.source.url), [[[1]], [[2, 3]]], name="i")
    manifest = site.convert(pad_id=0, separator_id=9, dtype="uint16")
    assert site.tokens() == {
        "x/a.npy": [1, 2, 9, 3],
        "b.npy": [1, 2, 9, 3],
        # A pad id is named, so full rows are rows of documents too.
        "d.npy": [1, 2, 9, 3, 4],
        "e.npy": [0, 1, 2, 3, 4],
        "g.npy": [5, 6],
        "h.npy": [7, 8],
        "i.npy": [1, 9, 2, 3],
    }
    assert {np.load(path).dtype for path in site.out.rglob("*.npy")} == {np.dtype(np.uint16)}
    assert manifest == build_manifest(DirectoryBucket(site.out), settings())
    assert {shard.name: shard.max_id for shard in manifest.shards}["h.npy"] == 8
    assert not (site.out / ".prepare").exists()


def test_pickled_arrays_are_refused_and_not_loaded(site, tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return exec, (f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()",)

    site.put("c.npz", npz_bytes(sequences=ragged([[1, 2], [], [3]])))
    site.put("d.npy", npy_bytes(ragged([Evil()])))
    for refused in ("c.npz", "d.npy"):
        with pytest.raises(ShardError, match=rf"{refused}.*Pickled arrays are not supported"):
            site.convert(include=[refused])
    assert not (tmp_path / "ran").exists()


def test_files_are_packed_with_separators_between_documents_of_two_files(site):
    row = np.array([[1, 2]], np.int32)
    for number in range(3):
        site.put(f"a{number}.npz", npz_bytes(input_ids=row + number, attention_mask=row * 0 + 1))
    site.put("b.npy", npy_bytes(np.array([7, 8], np.uint16)))
    site.put("c.npy", npy_bytes(np.array([7, 8], np.uint16)))
    site.convert(separator_id=9, request={"shard_tokens": 4, "name": "p"})
    assert site.tokens() == {
        "p_000000.npy": [1, 2, 9, 2],
        "p_000001.npy": [3, 9, 3, 4],
        "p_000002.npy": [9, 7, 8, 7],
        "p_000003.npy": [8],
    }


@pytest.mark.parametrize("shard_tokens", [None, 70])
@pytest.mark.parametrize("cut_after", [1, 3, 5])
def test_an_interrupted_conversion_continues(site, tmp_path, shard_tokens, cut_after):
    other = Site(tmp_path / "other")
    for number in range(6):
        content = npy_bytes(np.arange(50, dtype=np.uint16) + number)
        for one in (site, other):
            one.put(f"{number}.npy", content)
    request = {"shard_tokens": shard_tokens}
    with pytest.raises(CutError):
        site.convert(cut_after=cut_after, request=request)
    site.steps.clear()
    site.convert(request=request)
    done = cut_after if shard_tokens is None else 50 * cut_after // 70 * 70 // 50
    assert len(site.steps) == 1 + 6 - done  # what finished shards have is not read again
    other.convert(request=request)
    assert files_of(site.out) == files_of(other.out)


def test_ids_beyond_the_vocabulary_are_refused_and_wide_ones_take_four_bytes(site):
    site.put("a.npy", npy_bytes(np.array([1, 70_000], np.int32)))
    with pytest.raises(ShardError, match=r"the id 70,000, but --vocabulary is 65,536"):
        site.convert()
    manifest = site.convert(request={"vocabulary": 100_000})
    assert (manifest.shards[0].dtype, site.tokens()) == ("uint32", {"a.npy": [1, 70_000]})


def test_a_file_that_the_sources_manifest_lists_is_not_left_out(site):
    for name in ("a.npy", "b.npy"):
        site.put(name, npy_bytes(np.arange(9, dtype=np.uint16)))
    write_manifest(site.source, build_manifest(site.source, settings()))
    site.source.delete("b.npy")
    with pytest.raises(
        ShardError, match=r"b\.npy is missing\. .* or leave them out with --exclude"
    ):
        site.convert()
    site.convert(exclude=["b.npy"])
    assert list(site.tokens()) == ["a.npy"]


def test_what_cannot_be_converted_is_refused(site):
    site.put("a.jsonl", b"{}")
    with pytest.raises(ShardError, match="prepare_data tokenize"):
        site.convert()
    site.put("a.npy", npy_bytes(np.array([1], np.int32)))
    site.put("a.npz", npz_bytes(tokens=np.array([1], np.int32)))
    with pytest.raises(ShardError, match=r"a\.npy and a\.npz would both become a\.npy"):
        site.convert()
    assert not site.out.exists() or not list(site.out.iterdir())


@pytest.mark.bucket
def test_objects_of_a_bucket_are_fetched_whole_and_verified(site, emulator):
    bucket = open_bucket(f"{emulator.url}/data")
    bucket.write("c.npz", npz_bytes(sequences=np.array([1, 2, 3], np.int32)))
    bucket.write("d.npy", npy_bytes(np.array([5], np.int32)))
    site.convert(source=bucket)
    assert site.tokens() == {"c.npy": [1, 2, 3], "d.npy": [5]}
    assert not (site.out / ".prepare").exists()


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


def test_documents_of_megatron_are_never_fused(site):
    write_pair(Path(site.source.url), [[[1, 5]], [[2, 5, 3]]], name="i")
    with pytest.raises(ShardError, match=r"2 documents, with no end-of-text .* --separator-id"):
        site.convert()
    write_pair(Path(site.source.url), [[[1, 5]], [[2, 3], [5]], [[5]]], name="i")
    site.convert()  # they end with an id of their own
    assert site.tokens() == {"i.npy": [1, 5, 2, 3, 5, 5]}


@pytest.mark.parametrize(
    ("block", "code"), [*zip([1, 2, 3, 4, 7, 100], CODES, strict=True)], ids=CODES.values()
)
def test_output_is_independent_of_blocks_and_element_types(tmp_path, block, code, monkeypatch):
    draw = np.random.default_rng(block)
    # Documents of two sequences; some are empty, and some end with the separator already.
    lengths = draw.integers(0, 9, 40).tolist()
    documents = [[list(range(10, 10 + count)), [9] * (count == 5)] for count in lengths]
    pair = write_pair(tmp_path, documents, code=code)
    whole = read(pair, separator_id=9)
    monkeypatch.setattr(blocks_module, "BLOCK_IDS", block)
    assert read(pair, separator_id=9) == whole
    wanted: list[int] = []
    for first, second in documents:
        if first:
            wanted += [9] * (bool(wanted) and wanted[-1] != 9) + first + second
    assert whole == wanted


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
        (34, struct.pack("<i", 9), "are not contiguous in m.bin"),
        (34, struct.pack("<i", -2), "are not contiguous in m.bin"),
        (42, struct.pack("<q", 1), "are not contiguous in m.bin"),
        (58, struct.pack("<q", 1), "do not cover"),
        (66, struct.pack("<q", 5), "do not cover"),
    ],
)
def test_an_inconsistent_index_is_refused(tmp_path, offset, content, said):
    pair = damaged(write_pair(tmp_path, [[[1, 2]], [[3]]]), offset, content)
    with pytest.raises(ShardError, match=said):
        read(pair)
    with pytest.raises(ShardError, match="the negative id -1"):
        read(write_pair(tmp_path, [[[1, -1]]], code=4))
