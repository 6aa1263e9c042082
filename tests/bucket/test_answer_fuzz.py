"""Any response of a store ends in a result or in a `BucketError`."""

import io
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

from refocused.bucket import gcs
from refocused.bucket import store as stores
from refocused.bucket.bucket import BlobInfo, extended_crc32c
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.bucket.store import crc32c_to_base64
from refocused.system.errors import BucketError

ANSWERS = int(os.environ.get("REFOCUSED_ANSWERS", "2000"))
CONTENT = bytes(range(100))
CRC32C = crc32c_to_base64(extended_crc32c(0, CONTENT))
RESOURCE = {"name": "data/x", "size": "100", "crc32c": CRC32C, "generation": "7"}
VALUES: list[Any] = [
    None, "", "x", "data/y", "data/", "\x1b[2J", "\ud800", "-1", "1e9", "9" * 5000, 0, -5, 10**30,
    1.5, True, [], {}, [[]], "AAAA", "\u00b2", "a/../b", "data/" + "n" * 300, {"name": 1},
]  # fmt: skip
HEADERS = {
    "Range": ["bytes=0-9", "bytes=0-99", "bytes=5-", "bytes=0--1", "x", "bytes=0-" + "9" * 40],
    "Content-Range": ["bytes 0-99/100", "bytes 5-9/100", "bytes */100", "x"],
    "Retry-After": ["1", "86400", "\u00b2", "Thu, 99 Foo 2026", "9" * 400],
    "Location": ["http://127.0.0.1:1/session?upload_id=1", "x", "", "http://[", "gs://a/b"],
    "Content-Length": ["0", "100", "99", "-1", "x"],
    "Content-Encoding": ["gzip", "x"],
    "X-Goog-Hash": ["crc32c=AAAAAA==", "crc32c=!"],
}
STATUSES = (200, 200, 200, 200, 201, 204, 206, 206, 302, 304, 308, 308, 400, 401, 403, 404, 410,
            412, 416, 429, 500, 503, 999)  # fmt: skip


class Store:
    """Answers every request; about half of the responses are right, the others damaged."""

    def __init__(self) -> None:
        self.draw = random.Random()
        self.answered = 0

    def send(self, adapter: HTTPAdapter, request: requests.PreparedRequest) -> requests.Response:
        self.answered += 1
        right = self.draw.random() < 0.5
        status, headers, body = self.right(request) if right else self.wrong()
        reason = self.draw.choice(["OK", "", None, "\x1b[2J"])
        answer = urllib3.HTTPResponse(
            io.BytesIO(body), headers, status=status, reason=reason, preload_content=False
        )
        return adapter.build_response(request, answer)

    def right(self, request: requests.PreparedRequest) -> tuple[int, dict[str, str], bytes]:
        if "alt=media" in request.url:
            start = int(request.headers.get("Range", "bytes=0-").partition("=")[2].split("-")[0])
            return 206, {"Content-Range": f"bytes {start}-99/100"}, CONTENT[start:]
        if "uploadType=resumable" in request.url:
            return 200, {"Location": HEADERS["Location"][0]}, b""
        is_listing = request.url.partition("?")[0].endswith("/o") and request.method == "GET"
        return 200, {}, json.dumps({"items": [RESOURCE]} if is_listing else RESOURCE).encode()

    def wrong(self) -> tuple[int, dict[str, str], bytes]:
        chosen = {name: values for name, values in HEADERS.items() if self.draw.random() < 0.2}
        headers = {name: self.draw.choice(values) for name, values in chosen.items()}
        return self.draw.choice(STATUSES), headers, self.body()

    def body(self) -> bytes:
        kind = self.draw.random()
        if kind < 0.1:
            return self.draw.choice([b"", b"<html>", b"[" * 5000, b"\xff", b"9" * 5000, b"null"])
        if kind < 0.3:
            return CONTENT + b"x" * self.draw.choice([0, 0, 1, 1000])
        content: Any = self.draw.choice(
            [RESOURCE, {"items": [RESOURCE, RESOURCE]}, {"error": {"message": "no"}}]
        )
        return json.dumps(self.damaged(content)).encode()

    def damaged(self, content: Any) -> Any:
        """Return JSON with some parts missing or replaced."""
        if self.draw.random() < 0.05:
            return self.draw.choice(VALUES)
        if isinstance(content, dict):
            damaged = {k: self.damaged(v) for k, v in content.items() if self.draw.random() > 0.05}
            if "items" in content and self.draw.random() < 0.3:
                damaged["nextPageToken"] = self.draw.choice(VALUES)
            return damaged
        return [self.damaged(one) for one in content] if isinstance(content, list) else content


@pytest.mark.parametrize("operation", ["list", "info", "read", "range", "download", "small",
                                       "large", "delete"])  # fmt: skip
def test_any_response_ends_in_a_result_or_a_bucket_error(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setattr(gcs, "CHUNK_BYTES", 64)
    monkeypatch.setattr(stores, "SMALL_BYTES", 50 if operation == "large" else 1000)
    (tmp_path / "source").write_bytes(CONTENT)
    store = Store()
    monkeypatch.setattr(HTTPAdapter, "send", lambda adapter, asked, **_: store.send(adapter, asked))
    bucket = open_bucket("gs://bucket/data", retry=Retry(attempts=3, sleep=lambda _: None))
    blob = BlobInfo("x", 100, None, "7")
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: list(itertools.islice(bucket.list(), 50)),
        "info": lambda: bucket.info("x"),
        "read": lambda: bucket.read("x"),
        "range": lambda: bucket.read("x", start=5),
        "download": lambda: bucket.download(blob, tmp_path / "target"),
        "small": lambda: bucket.upload(tmp_path / "source", "x"),
        "large": lambda: bucket.upload(tmp_path / "source", "x"),
        "delete": lambda: bucket.delete("x"),
    }
    seed = ended = 0
    while store.answered < ANSWERS // 8:
        store.draw.seed(seed)
        try:
            calls[operation]()
            ended += 1
        except BucketError as error:
            assert len(str(error)) < 2000 and str(error).isprintable(), f"seed {seed}"
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1
    assert 0 < ended < seed
