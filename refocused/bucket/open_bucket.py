"""Open the bucket that a source's or mirror's address names."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.system.errors import BucketError, local_path

if TYPE_CHECKING:
    from refocused.bucket.retry import Retry

# Scheme: module and class of the store, imported on first use.
STORES = {
    "gs": ("refocused.bucket.gcs", "GcsTransport"),
    "s3": ("refocused.bucket.s3", "S3Transport"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(gs):")
_BUCKET = re.compile(r"[^:]+://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """How `gs://` is reached."""

    key_file: Path | None = None  # None: the environment's credentials
    project: str | None = None  # that pays for requests to a requester-pays bucket


BY_ENVIRONMENT = Credentials()


def open_bucket(
    url: str, credentials: Credentials = BY_ENVIRONMENT, *, retry: Retry | None = None
) -> Bucket:
    """Return the bucket at an address, without a request.

    Args:
        url: `SCHEME://bucket/prefix` of one of `STORES`, or a folder (`~` is the home folder).
        credentials: Credentials for `gs://`.
        retry: Retries of a remote store; None: those of training.

    Raises:
        BucketError: The address is empty, invalid, or of an unsupported scheme.
        ConfigError: The home folder of an unknown user is named.
    """
    scheme = _SCHEME.match(url)
    if scheme is None and url.strip():
        return DirectoryBucket(local_path(url))
    if scheme is None or scheme[1] not in STORES:
        raise BucketError(
            f"{url!r} is not a bucket this program can use. Supported are "
            f"{', '.join(f'{name}://bucket/prefix' for name in STORES)} and the path of a folder."
        )
    if (address := _BUCKET.fullmatch(url)) is None:
        raise BucketError(
            f"{url!r} is not the address of a bucket. Write {scheme[1]}://bucket/prefix; a "
            "name has 3 to 222 lower-case letters, digits, dashes, dots and underscores."
        )
    module, name = STORES[scheme[1]]
    stores = importlib.import_module("refocused.bucket.store")
    prefix = (address[2] or "").strip("/")
    transport = getattr(importlib.import_module(module), name)(
        address[1],
        f"{prefix}/" if prefix else "",
        key_file=credentials.key_file,
        project=credentials.project,
    )
    store: Bucket = stores.Store(url.rstrip("/"), transport, retry)
    return store
