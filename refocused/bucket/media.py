"""The bytes of an object of Google Cloud Storage, in pieces as large as the network hands over.

The client library hands on eight kilobytes at a time: half of the processor's time of a download.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from refocused.bucket.gcs_requests import TIMEOUT_S, GoogleRequests

PIECE_BYTES = 256 * 1024
_OK, _PARTIAL = 200, 206
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


def read_media(
    requests: GoogleRequests, name: str, *, start: int, end: int | None, generation: int | None
) -> bytes:
    """Return the bytes `start` to `end` (inclusive; None: the last) of an object, asked for once.

    Raises:
        Exception: One of `fault_types`.
    """
    from requests import RequestException

    pieces, size = [], 0
    for piece in _pieces(requests, name, start=start, end=end, generation=generation):
        pieces.append(piece)
        size += len(piece)
        if end is not None and size > end - start + 1:
            raise RequestException("more bytes were answered than were asked for")
    return b"".join(pieces)


def stream_media(
    requests: GoogleRequests, name: str, *, start: int, generation: int | None
) -> Iterator[bytes]:
    """Yield an object's bytes from `start` on as they arrive, asked for once.

    Raises:
        Exception: One of `fault_types`; what came before it has been yielded.
    """
    return _pieces(requests, name, start=start, end=None, generation=generation)


def _pieces(
    requests: GoogleRequests, name: str, *, start: int, end: int | None, generation: int | None
) -> Iterator[bytes]:
    """Ask (cloud.google.com/storage/docs/json_api/v1/objects/get) and yield the answer's bytes."""
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
        if answer.status_code not in (_OK, _PARTIAL):
            raise RequestException(f"HTTP {answer.status_code}, which holds no part of the object")
        if is_part and not _is_from(start, answer):
            raise RequestException("another part of the object was answered than was asked for")
        while piece := answer.raw.read1(PIECE_BYTES, decode_content=False):
            yield piece


def _is_from(start: int, answer: Any) -> bool:
    """Whether an answer begins at a byte; some proxies answer a part with status 200."""
    told = answer.headers.get("Content-Range")
    if told is None:
        return bool(answer.status_code == _PARTIAL)
    found = _RANGE.fullmatch(told)
    return found is not None and found[1].lstrip("0") == str(start).lstrip("0")
