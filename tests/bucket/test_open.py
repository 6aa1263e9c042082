from __future__ import annotations

from pathlib import Path

import pytest

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.gcs import GcsBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.system.errors import BucketError


def test_gs_is_google_cloud_storage() -> None:
    bucket = open_bucket("gs://some-bucket/a/prefix/")
    assert isinstance(bucket, GcsBucket)
    assert bucket.url == "gs://some-bucket/a/prefix"


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(tmp_path / "x"), "~/x"):
        bucket = open_bucket(url)
        assert isinstance(bucket, DirectoryBucket)
        assert bucket.url == str(tmp_path / "x")


@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///x", "https://x.com", "gs:/b/x", " "])
def test_anything_else_is_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(BucketError, match=r"Supported are gs://bucket/prefix"):
        open_bucket(url)
