"""A large file sent to Google Cloud Storage in chunks that survive a broken connection."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refocused.bucket.gcs_errors import Attempts, Fault, fault_of, fault_of_response, fault_types
from refocused.bucket.partial_files import disk_errors
from refocused.system.errors import BucketError

# Multiples of 256 KiB, as the protocol requires. A connection that is cut before a chunk is
# through makes no progress where the store keeps nothing of it: the chunks then get smaller, and
# larger again after some were kept.
CHUNK_BYTES = 16 * 1024 * 1024
SMALLEST_CHUNK_BYTES = 256 * 1024
_SHRINK = 4
_KEPT_TO_GROW = 4
_HELD = re.compile(r"bytes=0-(\d{1,15})")
_DONE = frozenset({200, 201})
_INCOMPLETE = 308
_SESSION_GONE = frozenset({404, 410})


class ResumableUpload:
    """One file on its way (cloud.google.com/storage/docs/performing-resumable-uploads).

    After a fault the store is asked how much it holds, so that an answer that was lost costs
    nothing, and smaller chunks follow if it kept nothing; a session that the store forgot is
    replaced by a new one. Attempts count only while the store does not hold more than ever before.

    Args:
        source: The file.
        size: Its bytes, as the session was told.
        open_session: Asks for a session; returns its URL.
        session: `requests` session that carries the chunks.
        attempts: Counts the faults.
        timeout_s: Connect and read time-outs of one request, in seconds.
        refused: Makes the error of a fault that will not pass.
    """

    def __init__(
        self,
        source: Path,
        *,
        size: int,
        open_session: Callable[[], str],
        session: Any,
        attempts: Attempts,
        timeout_s: tuple[float, float],
        refused: Callable[[Fault], BucketError],
    ) -> None:
        self._source = source
        self._size = size
        self._open_session = open_session
        self._session = session
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._refused = refused
        self._furthest = 0  # most bytes that the store ever confirmed
        self._held = 0  # bytes that it confirmed last
        self._chunk_bytes = CHUNK_BYTES
        self._kept = 0  # chunks in a row

    def send(self) -> object:
        """Send everything; return the store's last answer, None where it is no JSON.

        Raises:
            BucketError: The store refuses, the faults do not end, or the file got shorter.
        """
        url = self._open_session()
        confirmed: int | None = 0  # None: unknown, the store must be asked
        while True:
            answer = self._put(url, confirmed)
            if isinstance(answer, Fault):
                self._wait_after(answer)
                confirmed = None
            elif answer.status_code in _DONE:
                return _content(answer)
            elif answer.status_code == _INCOMPLETE:
                confirmed = self._confirmed(answer, is_chunk=confirmed is not None)
            elif answer.status_code in _SESSION_GONE:
                self._attempts.wait_after(fault_of_response(answer))
                url, confirmed, self._held = self._open_session(), 0, 0
            else:
                self._wait_after(fault_of_response(answer))
                confirmed = None

    def _put(self, url: str, confirmed: int | None) -> Any:
        """Send the next chunk, or ask for the state; return the answer or a `Fault`."""
        if confirmed is None:
            content, span = b"", "*"
        else:
            content = self._chunk(confirmed)
            span = f"{confirmed}-{confirmed + len(content) - 1}"
        try:
            return self._session.put(
                url,
                data=content,
                headers={"Content-Range": f"bytes {span}/{self._size}"},
                timeout=self._timeout_s,
                allow_redirects=False,  # 308 means "incomplete" here
            )
        except fault_types() as error:
            return fault_of(error)

    def _wait_after(self, fault: Fault) -> None:
        if not fault.transient:
            raise self._refused(fault)
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
        if not is_more:
            self._chunk_bytes = max(self._chunk_bytes // _SHRINK, SMALLEST_CHUNK_BYTES)
            self._kept = 0
            return
        self._kept += 1
        if self._kept == _KEPT_TO_GROW:
            self._chunk_bytes = min(2 * self._chunk_bytes, CHUNK_BYTES)
            self._kept = 0

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


def _content(answer: Any) -> object:
    try:
        content: object = answer.json()
    except (ValueError, RecursionError):
        return None
    return content
