"""Text files of buckets and of the Hugging Face hub, read in ranges without a local copy."""

import dataclasses
import fnmatch
import functools
import io
import re
from typing import Any, BinaryIO, cast

from refocused.bucket.open_bucket import BY_ENVIRONMENT, STORES, Credentials, open_bucket
from refocused.system.errors import BucketError, ShardError
from refocused.tokenizers.encoders import HUB

BLOCK_BYTES = 8 * 1024 * 1024
_FOOTER_BYTES = 256 * 1024  # of a `.parquet`; its columns are read whole
_ADDRESS = re.compile(rf"({'|'.join(STORES)})://([^/]+)/?(.*)")


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteText:
    """One object, with what reading uses of a `Path`."""

    store: str  # `gs://bucket`, or `hub:DATASET@COMMIT`
    name: str  # in the store
    size: int  # bytes
    version: int  # generation or content id, to detect a changed object
    credentials: Credentials = BY_ENVIRONMENT

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"

    def open(self, _mode: str = "rb", block: int = 0) -> BinaryIO:
        """Open the object, to be read in blocks; reading raises `BucketError` or `ShardError`."""
        usual = _FOOTER_BYTES if self.name.endswith(".parquet") else BLOCK_BYTES
        return cast("BinaryIO", io.BufferedReader(_Ranges(self), block or usual))

    def read(self, start: int, length: int) -> bytes:
        """Return a range, after retries; raise `ShardError` if the object has changed."""
        if self.store.startswith(HUB):  # a commit does not change
            return _hub_range(self, start, length)
        bucket = _bucket(self.store, self.credentials)
        content: bytes = bucket.read(self.name, start=start, length=length)
        now = bucket.info(self.name)
        if now is None or (now.size, now.generation or 0) != (self.size, self.version):
            raise ShardError(
                f"{self}: the object has changed since it was listed. Run the command again: as "
                "shards of two versions must not mix, it begins anew."
            )
        return content


class _Ranges(io.RawIOBase):
    """Reads an object by ranges; a short one is an error, never the end."""

    def __init__(self, text: RemoteText) -> None:
        self._text = text
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._text.size)
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._text.size - self._at), 0)
        content = self._text.read(self._at, length) if length else b""
        if len(content) != length:
            raise BucketError(
                f"{self._text}: {len(content):,} of {length:,} bytes received from byte "
                f"{self._at:,}. Run the same command again: it continues from here."
            )
        buffer[:length] = content
        self._at += length
        return length


@functools.lru_cache(maxsize=8)  # of this process
def _bucket(store: str, credentials: Credentials) -> Any:
    bucket: Any = open_bucket(store, credentials)
    bucket.unpacks = True  # texts tell by their first bytes whether they are compressed
    return bucket


def find_remote(address: str, credentials: Credentials = BY_ENVIRONMENT) -> list[RemoteText] | None:
    """Return the objects at `gs://bucket/NAME` or `hub:DATASET[@REVISION][:NAME]`, by name.

    `NAME` is an object, a folder, or a pattern whose `*` also matches `/`. None for another
    address. Raises `BucketError` if the store cannot be listed.
    """
    if address.startswith(HUB):
        dataset, _, wanted = address.removeprefix(HUB).partition(":")
        found = _hub_files(dataset)
    elif (parts := _ADDRESS.fullmatch(address)) is not None:
        store, wanted = f"{parts[1]}://{parts[2]}", parts[3]
        bucket = _bucket(store, credentials)
        found = [
            RemoteText(store, one.name, one.size, one.generation or 0, credentials)
            for one in bucket.list(re.split(r"[*?\[]", wanted)[0])
        ]
    else:
        return None
    folder = f"{wanted.rstrip('/')}/" if wanted else ""
    return [
        one for one in found if one.name.startswith(folder) or fnmatch.fnmatchcase(one.name, wanted)
    ]


def _hub_files(dataset: str) -> list[RemoteText]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    name, _, revision = dataset.partition("@")
    try:
        commit = HfApi().dataset_info(name, revision=revision or None, timeout=60).sha
        tree = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        files = sorted((one.path, one) for one in tree if isinstance(one, RepoFile))
    except Exception as error:  # of its HTTP library, which depends on its version
        raise _hub_error(f"{HUB}{dataset}", error) from None
    store = f"{HUB}{name}@{commit}"
    return [RemoteText(store, path, one.size, int(one.blob_id[:12], 16)) for path, one in files]


def _hub_range(text: RemoteText, start: int, length: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

    name, _, commit = text.store.removeprefix(HUB).partition("@")
    url = hf_hub_url(name, text.name, repo_type="dataset", revision=commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
    try:
        response = http_backoff("GET", url, headers=headers, timeout=60, follow_redirects=True)
        hf_raise_for_status(response)
    except Exception as error:  # of its HTTP library, which depends on its version
        raise _hub_error(str(text), error) from None
    whole = response.status_code == 200  # a server that knows no ranges
    return response.content[start : start + length] if whole else response.content


def _hub_error(what: str, error: Exception) -> BucketError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return BucketError(f"{what}: {reason:.300}. Check the name, HF_TOKEN and the connection.")
