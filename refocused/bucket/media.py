"""The bytes of an object of Google Cloud Storage, in pieces as large as the network hands over.

The client library hands on eight kilobytes at a time: half of the processor's time of a download.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refocused.bucket.google_requests import TIMEOUT_S, GoogleRequests

PIECE_BYTES = 256 * 1024
_PARTIAL = 206


def read_media(
    requests: GoogleRequests, name: str, *, start: int, end: int | None, generation: int | None
) -> bytes:
    """Return the bytes `start` to `end` (inclusive; None: the last) of an object, asked for once.

    Raises:
        Exception: One of `fault_types`.
    """
    with _answer(requests, name, start=start, end=end, generation=generation) as answer:
        content: bytes = answer.raw.read(decode_content=False)
        return content


def stream_media(
    requests: GoogleRequests, name: str, *, start: int, generation: int | None
) -> Iterator[bytes]:
    """Yield an object's bytes from `start` on as they arrive, asked for once.

    Raises:
        Exception: One of `fault_types`; what came before it has been yielded.
    """
    with _answer(requests, name, start=start, end=None, generation=generation) as answer:
        while piece := answer.raw.read1(PIECE_BYTES, decode_content=False):
            yield piece


@contextmanager
def _answer(
    requests: GoogleRequests, name: str, *, start: int, end: int | None, generation: int | None
) -> Iterator[Any]:
    """Ask (cloud.google.com/storage/docs/json_api/v1/objects/get) and yield the answer."""
    from requests import RequestException

    is_part = bool(start) or end is not None
    headers = {"Accept-Encoding": "gzip"}  # an object stored in gzip comes as it is stored
    if is_part:
        headers["Range"] = f"bytes={start}-{'' if end is None else end}"
    with requests.connection.session.get(
        requests.media_url(name),
        params=requests.parameters(alt="media", generation=generation),
        headers=headers,
        stream=True,
        timeout=TIMEOUT_S,
    ) as answer:
        if not answer.ok:
            _ = answer.content  # says why, and is read while the connection is there
            answer.raise_for_status()
        if is_part and answer.status_code != _PARTIAL:
            raise RequestException("a part of the object was asked for, and all of it answered")
        yield answer
