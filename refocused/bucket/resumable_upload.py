"""A large file sent to Google Cloud Storage in chunks that survive a broken connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refocused.bucket.google_faults import fault_of, fault_of_response, fault_types
from refocused.bucket.retry import Attempts, Fault
from refocused.errors import BucketError

CHUNK_BYTES = 16 * 1024 * 1024  # a multiple of 256 KiB, as the protocol asks
_DONE = frozenset({200, 201})
_INCOMPLETE = 308
_SESSION_GONE = frozenset({404, 410})


class ResumableUpload:
    """One file on its way (cloud.google.com/storage/docs/performing-resumable-uploads).

    After a fault the store is asked how much it holds, so that an answer that was lost costs
    nothing; a session that the store forgot is replaced by a new one.

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
                confirmed = self._confirmed(answer, before=confirmed)
            elif answer.status_code in _SESSION_GONE:
                self._attempts.wait_after(fault_of_response(answer))
                url, confirmed = self._open_session(), 0
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

    def _confirmed(self, answer: Any, *, before: int | None) -> int:
        """Return how many bytes the store holds, from `Range: bytes=0-LAST`."""
        held = answer.headers.get("Range")
        confirmed = int(held.rpartition("-")[2]) + 1 if held else 0
        if confirmed > self._furthest:
            self._furthest = confirmed
            self._attempts.progressed()
        elif before is not None and confirmed <= before:
            self._attempts.wait_after(Fault("a chunk was answered but not kept", transient=True))
        return confirmed

    def _chunk(self, offset: int) -> bytes:
        wanted = min(CHUNK_BYTES, self._size - offset)
        with self._source.open("rb") as file:
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
    except ValueError:
        return None
    return content
