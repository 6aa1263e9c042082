"""A model in a bucket, and its download: complete with its marker."""

import json

import pytest
from checkpoints.step_samples import flip_byte
from data.text_samples import files_of

from refocused.bucket.folder import DirectoryBucket
from refocused.evaluate import export_copy
from refocused.evaluate.export_copy import fetch_folder, upload_folder
from refocused.system.errors import BucketError, CheckpointError
from refocused.system.locks import FileLock

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(200)), "origin.json": b"1"}
WEIGHTS = "model.safetensors"


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in content.items():
        (folder / name).write_bytes(part)
    return folder


@pytest.fixture
def uploaded(tmp_path):
    """The folder of a model in the bucket."""
    write(tmp_path / "model", CONTENT)
    (tmp_path / "bucket").mkdir()
    upload(tmp_path)
    return tmp_path / "bucket/run/final_model"


def upload(folder):
    upload_folder(folder / "model", DirectoryBucket(folder / "bucket"), "run/final_model")


class Counted(DirectoryBucket):
    """A folder as a bucket that counts downloads and may lose its connection."""

    def __init__(self, folder, *, fails_at=None):
        super().__init__(folder)
        self.fetched: list[str] = []
        self._fails_at = fails_at

    def download(self, blob, target):
        if blob.name == self._fails_at:
            raise BucketError(f"{blob.name}: the connection was lost")
        self.fetched.append(blob.name)
        return super().download(blob, target)


def test_a_folder_is_in_the_bucket_once_its_marker_is(uploaded, tmp_path, monkeypatch):
    marker, here = uploaded / "COMMITTED", tmp_path / "here"
    assert json.loads(marker.read_text())[WEIGHTS]["bytes"] == 200
    fetch_folder(DirectoryBucket(uploaded), here)
    before = marker.stat().st_mtime_ns
    upload(tmp_path)
    assert marker.stat().st_mtime_ns == before  # nothing was done
    (tmp_path / "model/origin.json").unlink()
    changed = {"config.json": b"[]", WEIGHTS: CONTENT[WEIGHTS]}
    write(tmp_path / "model", changed)
    with monkeypatch.context() as patch:
        patch.setattr(export_copy, "upload_many", None)  # killed there
        with pytest.raises(TypeError):
            upload(tmp_path)
    assert not marker.exists()
    upload(tmp_path)
    assert files_of(fetch_folder(DirectoryBucket(uploaded), here)) == changed
    marker.unlink()
    assert files_of(uploaded) == changed


def test_an_interrupted_download_continues_and_leaves_no_partial_model(uploaded, tmp_path):
    here = tmp_path / "models/b/final_model"
    with pytest.raises(BucketError, match="the connection was lost"):
        fetch_folder(Counted(uploaded, fails_at=WEIGHTS), here)
    assert not here.exists()
    bucket = Counted(uploaded)
    for _ in range(2):
        assert files_of(fetch_folder(bucket, here)) == CONTENT
    assert bucket.fetched == [WEIGHTS]  # once, and alone
    # Local files are trusted only by their checksums.
    flip_byte(here / WEIGHTS)  # of the same size
    (here / "model.safetensors.index.json").write_text("of an older model")
    assert files_of(fetch_folder(bucket, here)) == CONTENT
    assert [path.name for path in here.parent.iterdir() if path.is_dir()] == ["final_model"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("marker lost", "has no COMMITTED object: no model is there, or its upload never finished"),
        ("marker torn", "COMMITTED holds b'{\"con', which is no marker"),
        ("object lost", "damaged: model.safetensors is missing"),
        ("object cut", "damaged: model.safetensors is not the file listed in COMMITTED"),
        ("object flipped", "damaged: model.safetensors is not the file listed in COMMITTED"),
        ("being fetched", "Another process is fetching"),
    ],
)
def test_an_incomplete_folder_is_not_a_model(uploaded, tmp_path, damage, message):
    weights, marker, here = uploaded / WEIGHTS, uploaded / "COMMITTED", tmp_path / "a"
    lock = FileLock(tmp_path / ".a.lock")
    {
        "marker lost": marker.unlink,
        "marker torn": lambda: marker.write_bytes(b'{"con'),
        "object lost": weights.unlink,
        "object cut": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "object flipped": lambda: flip_byte(weights),
        "being fetched": lock.acquire,
    }[damage]()
    with pytest.raises(CheckpointError, match=message):
        fetch_folder(DirectoryBucket(uploaded), here)
    lock.release()
    assert not here.exists()


def test_a_folder_without_a_marker_is_used_with_a_warning(tmp_path, caplog):
    theirs = write(tmp_path / "theirs", {"config.json": b"{}", "weights": b"w"})
    write(theirs / "below", {"more": b"m"})
    copy = fetch_folder(DirectoryBucket(theirs), tmp_path / "here")
    assert files_of(copy) == {"config.json": b"{}", "weights": b"w"}
    assert "whether its upload was finished is not known" in caplog.text
    write(tmp_path / "final_model", {"config.json": b"{}"})
    with pytest.raises(CheckpointError, match="its upload never finished"):
        fetch_folder(DirectoryBucket(tmp_path / "final_model"), tmp_path / "other")
