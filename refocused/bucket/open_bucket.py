"""From what a person writes as a source or a mirror to the bucket it means."""

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

# Of each scheme: the module and the class of its store, imported only for such an address.
STORES = {"gs": ("refocused.bucket.gcs", "GcsBucket")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(gs):")


def open_bucket(
    url: str,
    *,
    credentials_file: Path | None = None,
    project: str | None = None,
    retry: RetryPolicy | None = None,
) -> Bucket:
    """Return the bucket that an address means; no request is sent yet.

    Args:
        url: `gs://bucket/prefix`, or the path of a folder (`~` is the home folder).
        credentials_file: Key file for `gs://`; None: the environment's own credentials.
        project: Project that pays for the requests to a requester-pays bucket.
        retry: How often and how long a fault of `gs://` is waited out; None: as training does.

    Raises:
        BucketError: The address is empty, of another scheme, or names no valid bucket.
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
            f"{url!r} is not a bucket this program can use. Supported are gs://bucket/prefix "
            "(Google Cloud Storage) and the path of a folder, without a scheme."
        )
    return DirectoryBucket(Path(url).expanduser())
