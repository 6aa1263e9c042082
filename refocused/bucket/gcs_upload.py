"""A large file sent to Google Cloud Storage in chunks that survive a broken connection."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.gcs_errors import Fault, fault_of, fault_of_response, fault_types
from refocused.bucket.gcs_requests import ONCE, TIMEOUT_S, GoogleRequests, crc32c_to_base64
from refocused.bucket.partial_files import disk_errors
from refocused.system.errors import BucketError

# Multiples of 256 KiB, as the protocol requires. A connection that is cut before a chunk is
# through makes no progress where the store keeps nothing of it: the chunks then get smaller, and
# larger again after some were kept.
CHUNK_BYTES = 16 * 1024 * 1024
SMALLEST_CHUNK_BYTES = 256 * 1024
_SHRINK = 4
_KEPT_TO_GROW = 4
CREATE = "storage.objects.create"  # the permission
_HELD = re.compile(r"bytes=0-(\d{1,15})")
_DONE = (200, 201)
_INCOMPLETE = 308
_SESSION_GONE = (404, 410)


class ResumableUpload:
    """One large file on its way (cloud.google.com/storage/docs/performing-resumable-uploads).

    After a fault a request asks how much the store holds, so that an answer that was lost costs
    nothing, and smaller chunks follow if it kept nothing; a session that the store forgot is
    replaced by a new one. Attempts count only while the store does not hold more than ever before.
    (The client library sends a failed chunk again whole, at one size, in one session.)
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
        self._furthest = 0  # most bytes that the store ever confirmed
        self._held = 0  # bytes that it confirmed last
        self._chunk_bytes = CHUNK_BYTES
        self._kept = 0  # chunks in a row

    def send(self) -> BlobInfo | None:
        """Send everything; return the store's description, None where it is not readable."""
        url = self._open_session()
        confirmed: int | None = 0  # None: unknown, ask the store
        while True:
            answer = self._put(url, confirmed)
            if isinstance(answer, Fault):
                self._wait_after(answer)
                confirmed = None
            elif answer.status_code in _DONE:
                try:
                    return self._requests.described(answer.json())
                except (ValueError, RecursionError, ConnectionError):
                    return None
            elif answer.status_code == _INCOMPLETE:
                confirmed = self._confirmed(answer, is_chunk=confirmed is not None)
            elif answer.status_code in _SESSION_GONE:
                self._attempts.wait_after(fault_of_response(answer))
                url, confirmed, self._held = self._open_session(), 0, 0
            else:
                self._wait_after(fault_of_response(answer))
                confirmed = None

    def _open_session(self) -> str:
        def ask() -> str:
            blob = new_blob(self._requests, self._name, self._checksum)
            url: str = blob.create_resumable_upload_session(
                size=self._size, if_generation_match=0, checksum=None, **ONCE
            )
            return url

        return self._requests.ask(ask, self._name, permission=CREATE)

    def _put(self, url: str, confirmed: int | None) -> Any:
        """Send the next chunk, or ask for the state; return the answer or a `Fault`."""
        content, span = b"", "*"
        if confirmed is not None:
            content = self._chunk(confirmed)
            span = f"{confirmed}-{confirmed + len(content) - 1}"
        try:
            return self._requests.connection.session.put(
                url,
                data=content,
                headers={"Content-Range": f"bytes {span}/{self._size}"},
                timeout=TIMEOUT_S,
                allow_redirects=False,  # 308 means "incomplete" here
            )
        except fault_types() as error:
            return fault_of(error)

    def _chunk(self, offset: int) -> bytes:
        wanted = min(self._chunk_bytes, self._size - offset)
        with disk_errors(self._source), self._source.open("rb") as file:
            content = os.pread(file.fileno(), wanted, offset)
        if len(content) < wanted:
            raise BucketError(
                f"{self._source}: ends at {offset + len(content):,} bytes, {self._size:,} "
                "expected. The file was cut while it was sent; send it again when it is whole."
            )
        return content

    def _wait_after(self, fault: Fault) -> None:
        if not fault.transient:
            raise self._requests.refused(fault, self._name, permission=CREATE)
        self._attempts.wait_after(fault)

    def _confirmed(self, answer: Any, *, is_chunk: bool) -> int | None:
        """Return how many bytes the store holds, from `Range: bytes=0-LAST`; None: ask again."""
        text = answer.headers.get("Range")
        found = _HELD.fullmatch(text) if text else None
        held = int(found[1]) + 1 if found else 0
        if (text and not found) or held >= self._size:
            reason = f"the store did not say readably how much it holds: Range {text[:40]!r}"
            self._attempts.wait_after(Fault(reason, transient=True))
            return None
        is_more, self._held = held > self._held, held
        self._fit_chunks(is_more)
        if held > self._furthest:
            self._furthest = held
            self._attempts.progressed()
        elif is_chunk and not is_more:
            self._attempts.wait_after(Fault("a chunk was answered but not kept", transient=True))
        return held

    def _fit_chunks(self, is_more: bool) -> None:
        """Choose the size of the next chunks by whether the store kept some of the last one."""
        self._kept = self._kept + 1 if is_more else 0
        if not is_more:
            self._chunk_bytes = max(self._chunk_bytes // _SHRINK, SMALLEST_CHUNK_BYTES)
        elif self._kept % _KEPT_TO_GROW == 0:
            self._chunk_bytes = min(2 * self._chunk_bytes, CHUNK_BYTES)


def new_blob(requests: GoogleRequests, name: str, checksum: int) -> Any:
    """Make a blob whose metadata carry the checksum, so that the store refuses other bytes."""
    blob = requests.blob(name)
    blob.crc32c = crc32c_to_base64(checksum)
    blob.content_type = "application/octet-stream"
    return blob
