"""Open the bucket that a source's or mirror's address names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.system.errors import BucketError

if TYPE_CHECKING:
    from refocused.bucket.gcs_errors import RetryPolicy

# Scheme: module and class of the store, imported on first use.
STORES = {"gs": ("refocused.bucket.gcs", "GcsBucket"), "s3": ("refocused.bucket.s3", "S3Bucket")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(gs):")


def open_bucket(
    url: str,
    *,
    credentials_file: Path | None = None,
    project: str | None = None,
    retry: RetryPolicy | None = None,
) -> Bucket:
    """Return the bucket at an address, without a request.

    Args:
        url: `SCHEME://bucket/prefix` of one of `STORES`, or a folder (`~` is the home folder).
        credentials_file: Key file for `gs://`; None: the environment's credentials.
        project: Project that pays for requests to a requester-pays bucket.
        retry: Retries of a remote store; None: those of training.

    Raises:
        BucketError: The address is empty, invalid, or of an unsupported scheme.
    """
    scheme = _SCHEME.match(url)
    if scheme and scheme[1] in STORES:
        module, name = STORES[scheme[1]]
        store: Bucket = getattr(importlib.import_module(module), name)(
            url, credentials_file=credentials_file, project=project, retry=retry
        )
        return store
    if scheme or not url.strip():
        raise BucketError(
            f"{url!r} is not a bucket this program can use. Supported are "
            f"{', '.join(f'{one}://bucket/prefix' for one in STORES)} and the path of a folder."
        )
    try:
        return DirectoryBucket(Path(url).expanduser())
    except RuntimeError:
        raise BucketError(f"{url!r}: there is no such user. Write the folder's path.") from None
