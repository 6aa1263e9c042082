"""An S3 server on loopback, behind the proxy of `fakes` that injects network faults."""

import base64
import contextlib
import dataclasses
import http.client
import logging
import os
import sys
import types
import unittest.mock
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
from fakes import Answer, Emulator, FaultProxy, Request

CODES = {400: "BadDigest", 401: "ExpiredToken", 403: "AccessDenied", 412: "PreconditionFailed",
         404: "NoSuchKey", 416: "InvalidRange", 503: "SlowDown"}  # fmt: skip
CHECKSUM = "x-amz-checksum-crc32c"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


class S3Proxy(FaultProxy):
    """The proxy for S3, which also verifies checksums: moto stores what it is told."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._parts: dict[str, dict[int, bytes]] = {}  # of each upload

    def answer(self, request: Request) -> Answer:
        with self._lock:
            content, upload = request.body, request.query.get("uploadId", "")
            if request.is_chunk:
                number = int(request.query["partNumber"])
                self._parts.setdefault(upload, {})[number] = content
            elif request.method == "POST":
                content = b"".join(part for _, part in sorted(self._parts.get(upload, {}).items()))
            sent = {key.lower(): value for key, value in request.headers.items()}
            if sent.get(CHECKSUM) not in (None, crc32c_base64(content)):
                return self.error(400, "The checksum did not match", {})
            if request.is_listing:
                size = min(self.page_limit, int(request.query.get("max-keys", "1000")))
                query = {**request.query, "max-keys": str(size)}
                request = dataclasses.replace(request, query=query)
            answer = self._forward(request)
            answer.headers = {key.title(): value for key, value in answer.headers.items()}
            if request.is_chunk and CHECKSUM in sent:  # as S3 does, and moto does not
                answer.headers[CHECKSUM.title()] = sent[CHECKSUM]
            if "crc32c" in self.undescribed:
                answer.headers.pop(CHECKSUM.title(), None)
            return answer

    def error(self, status: int, message: str, headers: Mapping[str, str]) -> Answer:
        code, _, text = message.rpartition(": ")
        body = f"<Error><Code>{code or CODES.get(status)}</Code><Message>{text}</Message></Error>"
        return Answer(status, {"Content-Type": "application/xml", **headers}, body.encode())


def crc32c_base64(content: bytes) -> str:
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()


class S3Emulator(Emulator):
    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": self.proxy.url}

    def put(self, name: str, content: bytes, *, algorithm: str | None = "CRC32C") -> None:
        """Store or overwrite an object without the proxy, as another program would."""
        headers = {} if algorithm is None else {"x-amz-sdk-checksum-algorithm": algorithm}
        if algorithm == "CRC32C":
            headers[CHECKSUM] = crc32c_base64(content)
        put(self._server, f"/{self.bucket}/{urllib.parse.quote(name)}", content, headers)


def put(server: Any, path: str, content: bytes, headers: Mapping[str, str]) -> None:
    connection = http.client.HTTPConnection(*server.get_host_and_port(), timeout=30)
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}
    connection.request("PUT", path, body=content, headers=signed | dict(headers))
    assert connection.getresponse().status == 200
    connection.close()


@contextlib.contextmanager
def s3_server() -> Iterator[Any]:
    """Run moto on a free port of loopback, without buckets."""
    from moto.server import ThreadedMotoServer

    # moto computes CRC-32 instead where this package is missing.
    stand_in = types.SimpleNamespace(crc32c=google_crc32c.value, __spec__=google_crc32c.__spec__)
    sys.modules.setdefault("crc32c", stand_in)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def s3_bucket(server: Any, bucket: str) -> Iterator[Emulator]:
    """Create a bucket behind its own proxy, and set the environment of clients."""
    put(server, f"/{bucket}", b"", {})
    proxy = S3Proxy(server.get_host_and_port()[1])
    try:
        running = S3Emulator(proxy, bucket, server)
        with unittest.mock.patch.dict(os.environ, running.environment):
            yield running
    finally:
        proxy.close()
