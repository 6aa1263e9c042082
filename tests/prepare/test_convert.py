from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, settings
from data.text_samples import files_of
from fakes import Emulator
from prepare.test_megatron import write_pair

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.gcs import GcsBucket
from refocused.data.manifest.shard_manifest import Manifest, build_manifest
from refocused.prepare.convert import ConvertRequest, convert
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
        )

    def tokens(self) -> dict[str, list[int]]:
        paths = sorted(self.out.rglob("*.npy"))
        return {path.relative_to(self.out).as_posix(): np.load(path).tolist() for path in paths}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def ragged(rows: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def test_a_file_of_padding_alone_is_refused_and_no_other_takes_its_name(site: Site) -> None:
    for name, rows in {"a": [[1, 0]], "b": [[0, 0]], "c": [[3, 0]]}.items():
        site.put(f"{name}.npz", npz_bytes(data=np.array(rows, np.int32)))
    with pytest.raises(ShardError, match=r"b\.npz: it holds no tokens"):
        site.convert(pad_id=0)


def test_every_form_becomes_streams_under_its_own_name(site: Site) -> None:
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
    assert manifest == build_manifest(DirectoryBucket(site.out), settings(), cache_file=None)
    assert {shard.name: shard.max_id for shard in manifest.shards}["h.npy"] == 8
    assert not (site.out / ".prepare").exists()


def test_pickled_lists_are_read_only_when_allowed(site: Site) -> None:
    site.put("c.npz", npz_bytes(sequences=ragged([[1, 2], [], [3]])))
    with pytest.raises(ShardError, match="--allow-pickle"):
        site.convert(separator_id=9)
    site.convert(separator_id=9, request={"allow_pickle": True})
    assert site.tokens() == {"c.npy": [1, 2, 9, 3]}


def test_code_in_a_pickle_runs_elsewhere_and_only_when_allowed(site: Site, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            program = (
                f"import os, pathlib; pathlib.Path({str(marker)!r}).write_text(str(os.getpid()))"
            )
            return exec, (program,)

    site.put("c.npz", npz_bytes(sequences=ragged([Evil()])))
    with pytest.raises(ShardError, match="--allow-pickle"):
        site.convert()
    assert not marker.exists()
    with pytest.raises(ShardError, match="no list of whole numbers"):
        site.convert(request={"allow_pickle": True})
    import os

    assert marker.read_text() != str(os.getpid())


def test_a_broken_pickle_is_named(site: Site) -> None:
    site.put("c.npy", npy_bytes(ragged([[1]]))[:-3])
    with pytest.raises(ShardError, match=r"c\.npy: its pickled arrays cannot be read"):
        site.convert(request={"allow_pickle": True})


def test_files_are_packed_with_separators_between_documents_of_two_files(site: Site) -> None:
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
def test_an_interrupted_conversion_goes_on(
    site: Site, tmp_path: Path, shard_tokens: int | None, cut_after: int
) -> None:
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
    assert len(site.steps) == 1 + 6 - cut_after
    other.convert(request=request)
    assert files_of(site.out) == files_of(other.out)


def test_ids_beyond_the_vocabulary_are_refused_and_wide_ones_take_four_bytes(site: Site) -> None:
    site.put("a.npy", npy_bytes(np.array([1, 70_000], np.int32)))
    with pytest.raises(ShardError, match=r"the id 70,000, and --vocabulary is 65,536"):
        site.convert()
    (site.out / "recipe.json").unlink()
    manifest = site.convert(request={"vocabulary": 100_000})
    assert (manifest.shards[0].dtype, site.tokens()) == ("uint32", {"a.npy": [1, 70_000]})


def test_what_cannot_be_converted_is_refused(site: Site) -> None:
    site.put("a.jsonl", b"{}")
    with pytest.raises(ShardError, match="prepare_data tokenize"):
        site.convert()
    site.put("a.npy", npy_bytes(np.array([1], np.int32)))
    site.put("a.npz", npz_bytes(tokens=np.array([1], np.int32)))
    with pytest.raises(ShardError, match=r"a\.npy and a\.npz would both become a\.npy"):
        site.convert()
    assert not site.out.exists() or not list(site.out.iterdir())


@pytest.mark.bucket
def test_objects_of_a_bucket_are_fetched_whole_and_verified(site: Site, emulator: Emulator) -> None:
    bucket = GcsBucket(f"{emulator.url}/data")
    bucket.write("c.npz", npz_bytes(sequences=ragged([[1, 2], [3]])))
    bucket.write("d.npy", npy_bytes(np.array([5], np.int32)))
    site.convert(source=bucket, request={"allow_pickle": True})
    assert site.tokens() == {"c.npy": [1, 2, 3], "d.npy": [5]}
    assert not (site.out / ".prepare").exists()
