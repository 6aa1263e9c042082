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
    from refocused.bucket.gcs_errors import RetryPolicy

# Scheme: module and class of the store, imported on first use.
STORES = {"gs": ("refocused.bucket.gcs", "GcsBucket"), "s3": ("refocused.bucket.s3", "S3Bucket")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(gs):")


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """How `gs://` is reached."""

    key_file: Path | None = None  # None: the environment's credentials
    project: str | None = None  # that pays for requests to a requester-pays bucket


BY_ENVIRONMENT = Credentials()


def open_bucket(
    url: str, credentials: Credentials = BY_ENVIRONMENT, *, retry: RetryPolicy | None = None
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
    if scheme and scheme[1] in STORES:
        module, name = STORES[scheme[1]]
        store: Bucket = getattr(importlib.import_module(module), name)(
            url, credentials_file=credentials.key_file, project=credentials.project, retry=retry
        )
        return store
    if scheme or not url.strip():
        raise BucketError(
            f"{url!r} is not a bucket this program can use. Supported are "
            f"{', '.join(f'{one}://bucket/prefix' for one in STORES)} and the path of a folder."
        )
    return DirectoryBucket(local_path(url))
