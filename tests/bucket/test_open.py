from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("url", ["gs://", "gs://YOUR-BUCKET/tokens", "gs://a/b", "gs://bu cket"])
def test_an_address_without_a_valid_bucket_is_refused(url: str) -> None:
    with pytest.raises(BucketError, match="is not the address of a bucket"):
        GcsBucket(url)


def test_importing_brings_in_neither_google_cloud_nor_requests() -> None:
    check = (
        "import sys, refocused.bucket.open_bucket, refocused.bucket.transfer;"
        "print([m for m in ('google.cloud.storage', 'google.auth', 'requests', 'urllib3', 'torch')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
