"""Storing bytes in Google Cloud Storage so that exactly they are there, or an error is raised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import BlobInfo, crc32c_of, crc32c_to_base64, extended_crc32c
from refocused.bucket.gcs_errors import RefusedRequestError
from refocused.bucket.gcs_requests import ONCE, TIMEOUT_S, GoogleRequests
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.resumable_upload import ResumableUpload
from refocused.system.errors import BucketError

_SMALL_BYTES = 8 * 1024 * 1024  # sent in one request
_FRESH_STARTS = 3  # after bytes that the store refused as damaged
_PERMISSION = "storage.objects.create"
_BAD_REQUEST = 400  # the bytes were damaged on the way, or the file changed
_EXISTS = 412  # an object of that name is there: another's, or ours whose answer was lost


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What is to be stored.

    Attributes:
        size: Bytes.
        crc32c: Checksum that the store must confirm.
        send: Makes one attempt at it; returns the store's description, where it is readable.
    """

    size: int
    crc32c: int
    send: Callable[[], BlobInfo | None]


def bytes_content(
    requests: GoogleRequests, name: str, content: bytes, *, overwrite: bool
) -> Content:
    """Describe bytes that are sent in one request."""
    checksum = extended_crc32c(0, content)

    def send() -> BlobInfo:
        blob = _new_blob(requests, name, checksum)
        blob.upload_from_string(
            content,
            content_type="application/octet-stream",
            if_generation_match=None if overwrite else 0,
            checksum=None,
            **ONCE,
        )
        return requests.described(blob)

    return Content(
        size=len(content),
        crc32c=checksum,
        send=lambda: requests.ask(send, name, permission=_PERMISSION),
    )


def file_content(
    requests: GoogleRequests, name: str, source: Path, *, crc32c: int | None
) -> Content:
    """Describe a file: a small one is sent in one request, a large one in chunks.

    Args:
        requests: The way to the store.
        name: The object's name.
        source: The file.
        crc32c: Its checksum where that is known, which saves reading it twice.

    Raises:
        BucketError: The file cannot be read, or is not what `crc32c` says.
    """
    with disk_errors(source):
        size = source.stat().st_size
        if size > _SMALL_BYTES:
            checksum = crc32c_of(source) if crc32c is None else crc32c
            send = _chunked_send(requests, name, source, size=size, checksum=checksum)
            return Content(size=size, crc32c=checksum, send=send)
        content = bytes_content(requests, name, source.read_bytes(), overwrite=False)
    if crc32c not in (None, content.crc32c):
        raise BucketError(
            f"{source}: crc32c {content.crc32c:#010x} read, {crc32c:#010x} expected. "
            "The file changed or is damaged; it was not stored."
        )
    return content


def store(
    requests: GoogleRequests, name: str, content: Content, *, stored_crc32c: Callable[[], int]
) -> BlobInfo:
    """Send until the store has described the object with our size and checksum.

    Args:
        requests: The way to the store.
        name: The object's name.
        content: What is sent; the store compares it with the checksum that goes along.
        stored_crc32c: Reads what is there, where the store describes an object that may be
            another's, and keeps no checksum of it.

    Raises:
        BucketError: Other bytes are there already, or the store refuses.
    """
    for start in range(_FRESH_STARTS + 1):
        stored = None
        try:
            stored = content.send()
        except RefusedRequestError as refused:
            last = start == _FRESH_STARTS
            if refused.status != _EXISTS and (refused.status != _BAD_REQUEST or last):
                raise
        was_compared = stored is not None
        stored = stored or requests.info(name)
        if stored is not None:
            found = stored.crc32c
            if found is None:
                found = content.crc32c if was_compared else stored_crc32c()
            _require_same(stored, content, found=found, address=requests.address(name))
            return stored
    raise BucketError(
        f"{requests.address(name)}: the store said that it has it, and does not. Another program "
        "deletes there, or a lifecycle rule does: see the bucket's settings, then run again."
    )


def _require_same(stored: BlobInfo, content: Content, *, found: int, address: str) -> None:
    if (stored.size, found) != (content.size, content.crc32c):
        raise BucketError(
            f"{address} already holds other bytes: {stored.size:,} bytes, crc32c {found:#010x} "
            f"there; {content.size:,} bytes, crc32c {content.crc32c:#010x} here. Objects are not "
            "overwritten: delete it first, or choose another name."
        )


def _chunked_send(
    requests: GoogleRequests, name: str, source: Path, *, size: int, checksum: int
) -> Callable[[], BlobInfo | None]:
    def open_session() -> str:
        blob = _new_blob(requests, name, checksum)
        url: str = blob.create_resumable_upload_session(
            content_type="application/octet-stream",
            size=size,
            if_generation_match=0,
            checksum=None,
            **ONCE,
        )
        return url

    def send() -> BlobInfo | None:
        answer = ResumableUpload(
            source,
            size=size,
            open_session=lambda: requests.ask(open_session, name, permission=_PERMISSION),
            session=requests.connection.session,
            attempts=requests.attempts("uploading", name),
            timeout_s=TIMEOUT_S,
            refused=lambda fault: requests.refused(fault, name, permission=_PERMISSION),
        ).send()
        try:
            return requests.described_in(answer)
        except ConnectionError:
            return None  # the store is asked

    return send


def _new_blob(requests: GoogleRequests, name: str, checksum: int) -> Any:
    """Make a blob whose metadata carry the checksum, so that the store refuses other bytes."""
    blob = requests.blob(name)
    blob.crc32c = crc32c_to_base64(checksum)
    return blob
