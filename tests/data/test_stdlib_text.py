import io
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from shard_samples import settings

from refocused.bucket.folder import DirectoryBucket
from refocused.config import shipped_files
from refocused.data.loader.open_data import TokenLoader
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.data.manifest.stdlib_text import prepare_stdlib
from refocused.system.errors import BucketError, ShardError
from refocused.tokenizers.encoders import BYTES_END_OF_TEXT, BYTES_VOCABULARY


def tokens_of(bucket: DirectoryBucket, kind: str) -> np.ndarray:
    names = [blob.name for blob in bucket.list(f"stdlib_{kind}_")]
    return np.concatenate([np.load(io.BytesIO(bucket.read(name))) for name in names])


@pytest.fixture(autouse=True)
def library(tmp_path_factory, monkeypatch):
    part = tmp_path_factory.mktemp("library")
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("[_a-d]*.py"):
        shutil.copy(path, part)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(part)})


def test_documents_are_the_librarys_own_text(tmp_path):
    bucket = DirectoryBucket(tmp_path)
    manifest = prepare_stdlib(bucket)
    tokens = tokens_of(bucket, "train")
    assert tokens.dtype == np.uint16
    assert tokens[0] == BYTES_END_OF_TEXT
    assert tokens.max() == BYTES_VOCABULARY - 1
    ends = np.flatnonzero(tokens == BYTES_END_OF_TEXT)
    first = bytes(tokens[1 : ends[1]].astype(np.uint8))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert first in {path.read_bytes() for path in root.glob("_*.py")}

    counts = [shard.tokens for shard in manifest.shards]
    assert counts == [1_000_000, len(tokens) - 1_000_000, len(tokens_of(bucket, "val"))]


def test_the_same_python_gives_the_same_bytes_once_and_after_an_interruption(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "stdlib_train_000000.npy").write_bytes(b"of an interrupted call")
    first, second = (prepare_stdlib(DirectoryBucket(tmp_path / name)) for name in "ab")
    assert first == second
    bucket = DirectoryBucket(tmp_path / "a")
    data = settings(tokenizer="bytes", validation_files=["stdlib_val_*"], max_files=2)
    assert build_manifest(bucket, data) == first
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert prepare_stdlib(bucket) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before
    # A second process that begins before the manifest is there must not age the first one's shards.
    bucket.delete("manifest.json")
    again = prepare_stdlib(bucket)
    generations = [[shard.generation for shard in one.shards] for one in (first, again)]
    assert generations[0] == generations[1]


def test_tests_and_installed_packages_are_left_out(tmp_path, monkeypatch):
    taken = [f"{n}.py" for n in range(60)]
    for name in (*taken, "b/test/x.py", "site-packages/y.py", "d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    bucket = DirectoryBucket(tmp_path / "out")
    prepare_stdlib(bucket)
    tokens = np.concatenate([tokens_of(bucket, kind) for kind in ("train", "val")])
    assert sorted("".join(map(chr, tokens)).split(chr(256))) == sorted(["", *taken])


def test_a_python_without_its_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ShardError, match=r"no source text"):
        prepare_stdlib(DirectoryBucket(tmp_path / "out"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_demonstrations_own_folder_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts", "mine.txt").write_text("mine")
    Path("shards").mkdir()
    np.save("shards/stdlib_val_mine.npy", np.full(9000, 7, np.uint16))
    np.save("shards/mine.npy", np.full(9000, 7, np.uint16))
    before, copy = contents(tmp_path), Path("copy.yaml")
    demo = (shipped_files() / "runs/demo.yaml").read_text()
    for source, said in (
        ("texts", r"it holds 1 \.txt file\. Tokenize them: .* tokenize texts "),
        ("texts/mistyped", "the folder does not exist"),
    ):
        copy.write_text(demo.replace("source: python_stdlib", f"source: {source}"))
        with pytest.raises((BucketError, ShardError), match=said):
            TokenLoader.from_run(copy, batch_size=2)
    copy.write_text(demo.replace("source: python_stdlib", "source: shards"))
    with TokenLoader.from_run(copy, batch_size=2) as loader:
        assert set(next(iter(loader))[0].flatten().tolist()) == {7}  # not Python's library
    copy.unlink()
    shutil.rmtree("data")  # the cache
    assert contents(tmp_path) == before

    with TokenLoader.from_run("demo", batch_size=2) as loader:
        next(iter(loader))
    assert Path("data/stdlib/manifest.json").is_file()


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_another_content_of_its_folder_is_refused_and_kept(tmp_path, name):
    np.save(tmp_path / "mine.npy", np.arange(9, dtype=np.uint16))
    bucket = DirectoryBucket(tmp_path)
    if name == "manifest.json":
        write_manifest(bucket, build_manifest(bucket, settings()))
    before = contents(tmp_path)
    with pytest.raises(ShardError, match=r"holds other files \(mine\.npy\)\. Nothing was written"):
        prepare_stdlib(bucket)
    assert contents(tmp_path) == before
