"""Upload a large file to Google Cloud Storage in chunks, resuming after broken connections."""

import os
import re
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.gcs_errors import Fault, fault_of, fault_of_response, fault_types
from refocused.bucket.gcs_requests import ONCE, TIMEOUT_S, GoogleRequests, crc32c_to_base64
from refocused.bucket.partial_files import disk_errors
from refocused.system.errors import BucketError

# Multiples of 256 KiB, as the protocol requires. The store may keep nothing of a chunk that was
# cut off, so chunks shrink after a failure, and grow again after four that were kept.
CHUNK_BYTES = 16 * 1024 * 1024
MIN_CHUNK_BYTES = 256 * 1024
SHRINK = 4
_KEPT_TO_GROW = 4
CREATE = "storage.objects.create"  # the permission
_CONFIRMED = re.compile(r"bytes=0-(\d{1,15})")
_DONE = (200, 201)
_INCOMPLETE = 308
_SESSION_GONE = (404, 410)


class ResumableUpload:
    """Upload of one file (cloud.google.com/storage/docs/performing-resumable-uploads).

    After a fault, the upload queries how much the store holds and continues from there, with
    smaller chunks if it kept nothing. A session that the store no longer knows is replaced.
    Attempts count only while the store does not hold more than ever before. (The client library
    resends a failed chunk whole, at one size, in one session.)
    """

    def __init__(
        self, requests: GoogleRequests, name: str, source: Path, *, size: int, checksum: int
    ) -> None:
        self._requests = requests
        self._name = name
        self._source = source
        self._size = size
        self._checksum = checksum
        self._attempts = requests.attempts("uploading", name)
        self._max_held = 0  # most bytes that the store ever confirmed
        self._held = 0  # bytes that it confirmed last
        self._chunk_bytes = CHUNK_BYTES
        self._kept = 0  # chunks in a row

    def send(self) -> BlobInfo | None:
        """Send the file; return the store's description, or None if it is not readable."""
        url = self._open_session()
        confirmed: int | None = 0  # None: unknown, query the store
        while True:
            content, span = b"", "*"  # the next chunk, or a query of the state
            if confirmed is not None:
                length = min(self._chunk_bytes, self._size - confirmed)
                content = read_chunk(self._source, confirmed, length, size=self._size)
                span = f"{confirmed}-{confirmed + len(content) - 1}"
            try:
                response = self._requests.connection.session.put(
                    url,
                    data=content,
                    headers={"Content-Range": f"bytes {span}/{self._size}"},
                    timeout=TIMEOUT_S,
                    allow_redirects=False,  # 308 means "incomplete" here
                )
            except fault_types() as error:
                self._wait_after(fault_of(error))
                confirmed = None
                continue
            if response.status_code in _DONE:
                try:
                    described = response.json()
                    self._requests._require_name(described, self._name)
                    return self._requests.blob_info(described)
                except (ValueError, RecursionError, ConnectionError):
                    return None
            elif response.status_code == _INCOMPLETE:
                confirmed = self._confirmed(response, is_chunk=confirmed is not None)
            elif response.status_code in _SESSION_GONE:
                self._attempts.wait_after(fault_of_response(response))
                url, confirmed, self._held = self._open_session(), 0, 0
            else:
                self._wait_after(fault_of_response(response))
                confirmed = None

    def _open_session(self) -> str:
        def send() -> str:
            blob = new_blob(self._requests, self._name, self._checksum)
            url: str = blob.create_resumable_upload_session(
                size=self._size, if_generation_match=0, checksum=None, **ONCE
            )
            return url

        return self._requests.send(send, self._name, permission=CREATE)

    def _wait_after(self, fault: Fault) -> None:
        self._requests.wait_after(fault, self._attempts, self._name, permission=CREATE)

    def _confirmed(self, response: Any, *, is_chunk: bool) -> int | None:
        """Return how many bytes the store holds (`Range: bytes=0-LAST`); None: query it again."""
        text = response.headers.get("Range")
        found = _CONFIRMED.fullmatch(text) if text else None
        held = int(found[1]) + 1 if found else 0
        if (text and not found) or held >= self._size:
            reason = f"the store's response has an invalid header Range {text[:40]!r}"
            self._attempts.wait_after(Fault(reason, transient=True))
            return None
        is_more, self._held = held > self._held, held
        self._kept = self._kept + 1 if is_more else 0
        if not is_more:
            self._chunk_bytes = max(self._chunk_bytes // SHRINK, MIN_CHUNK_BYTES)
        elif self._kept % _KEPT_TO_GROW == 0:
            self._chunk_bytes = min(2 * self._chunk_bytes, CHUNK_BYTES)
        if held > self._max_held:
            self._max_held = held
            self._attempts.progressed()
        elif is_chunk and not is_more:
            self._attempts.wait_after(Fault("the store kept nothing of a chunk", transient=True))
        return held


def read_chunk(source: Path, offset: int, length: int, *, size: int) -> bytes:
    """Return bytes of a file; raise `BucketError` if it no longer has its `size`."""
    with disk_errors(source), source.open("rb") as file:
        content = os.pread(file.fileno(), length, offset)
    if len(content) < length:
        raise BucketError(
            f"{source}: ends at {offset + len(content):,} bytes, {size:,} expected. The file was "
            "truncated during the upload; upload it again when it is complete."
        )
    return content


def new_blob(requests: GoogleRequests, name: str, checksum: int) -> Any:
    """Return a blob whose metadata carry the checksum, which the store then verifies."""
    blob = requests.blob(name)
    blob.crc32c = crc32c_to_base64(checksum)
    blob.content_type = "application/octet-stream"
    return blob
