"""A storage emulator on loopback, behind a proxy that injects network faults."""

import contextlib
import dataclasses
import http.client
import http.server
import itertools
import json
import os
import re
import sys
import threading
import time
import unittest.mock
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import create_server

_HOP_HEADERS = frozenset(
    {"connection", "content-length", "transfer-encoding", "server", "date", "expect"}
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request to the proxy; `path` is decoded, `query` has the first value of each key.

    The properties know the requests of both stores.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_download(self) -> bool:
        return self.method == "GET" and (not self.query or self.query.get("alt") == "media")

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and (self.path.endswith("/o") or "list-type" in self.query)

    @property
    def is_upload(self) -> bool:
        return self.method in ("PUT", "POST")

    @property
    def is_chunk(self) -> bool:
        return self.method == "PUT" and not {"upload_id", "partNumber"}.isdisjoint(self.query)

    @property
    def page_token(self) -> str | None:
        return self.query.get("pageToken") or self.query.get("continuation-token")


ON_GS = pytest.mark.parametrize("emulator", ["gs"], indirect=True)  # not on each store
ON_EACH = pytest.mark.parametrize("emulator", ["gs", "s3"], indirect=True)
ON_S3 = pytest.mark.parametrize("emulator", ["s3"], indirect=True)
GARBLED = b"<html>"  # neither JSON nor an object


@dataclasses.dataclass(frozen=True)
class Fault:
    """Changes to one exchange."""

    delay_s: float = 0.0  # seconds to wait first
    lose_request: bool = False  # close the connection before the emulator gets the request
    lose_reply: bool = False  # close the connection after the emulator has handled the request
    status: int | None = None  # respond with this status and `message`, without the emulator
    message: str = "scripted fault"  # in the form of the store's JSON errors
    answered_as: int | None = None  # status in place of the emulator's
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # added to the response
    strip_headers: frozenset[str] = frozenset()  # removed from the response, in lower case
    reply: bytes | None = None  # body in place of the emulator's, such as `GARBLED`
    flip_byte: int | None = None  # index in the body of a byte to invert
    truncate_to: int | None = None  # bytes of the body, with a matching Content-Length
    cut_after: int | None = None  # bytes of the body before the connection is closed
    stall_after: int | None = None  # bytes of the body before a pause of `stall_s` and a close
    stall_s: float = 0.0
    bytes_per_second: int | None = None  # of the body


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class FaultProxy:
    """A proxy between client and emulator, which also adds what the emulator lacks.

    That is `ifGenerationMatch`, the `generation` of a download, and pages of a listing.
    """

    def __init__(self, emulator_port: int) -> None:
        self.requests: list[Request] = []  # in order of arrival
        self.page_limit = 1000  # maximum objects of a page
        self.unlisted: frozenset[str] = frozenset()  # fields left out of listings
        self.undescribed: frozenset[str] = frozenset()  # and also of an object's own resource
        self._scripts: list[tuple[Callable[[Request], bool], Iterator[Fault]]] = []
        self._unless_exists: dict[str, str] = {}  # upload_id -> path of the object's metadata
        self._emulator_port = emulator_port
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def script(self, when: Callable[[Request], bool], fault: Fault, *, times: int = 1) -> None:
        """Apply `fault` to the next `times` requests that `when` accepts; earlier scripts first."""
        self._scripts.append((when, itertools.repeat(fault, times)))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault_of(self, request: Request) -> Fault:
        with self._lock:
            self.requests.append(request)
            for when, faults in self._scripts:
                if when(request) and (fault := next(faults, None)):
                    return fault
        return Fault()

    def answer(self, request: Request) -> Answer:
        """Forward a request to the emulator, and add what that lacks."""
        with self._lock:
            refused = self._precondition(request)
            if refused is not None:
                return refused
            answer = self._forward(request)
            if request.is_listing:
                return self._page(request, answer)
            self._remember_session(request, answer)
            if self.undescribed and not request.is_download and answer.status == 200:
                described = json.loads(answer.body or b"{}")
                answer.body = json.dumps(_without(described, self.undescribed)).encode()
            # The emulator reports byte 0 as held by a session that has none.
            if answer.status == 308 and answer.headers.get("Range") == "bytes=0-0":
                del answer.headers["Range"]
            return answer

    def _forward(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._emulator_port, timeout=30)
        query = {
            key: value
            for key, value in request.query.items()
            if key not in ("maxResults", "pageToken", "fields")
        }
        url = urllib.parse.quote(request.path, safe="/") + "?" + urllib.parse.urlencode(query)
        headers = dict(request.headers) | {"Content-Length": str(len(request.body))}
        try:
            connection.request(request.method, url, body=request.body, headers=headers)
            reply = connection.getresponse()
            hop = _HOP_HEADERS - ({"content-length"} if request.method == "HEAD" else set())
            kept = {k: v for k, v in reply.getheaders() if k.lower() not in hop}
            return Answer(reply.status, kept, reply.read())
        finally:
            connection.close()

    def error(self, status: int, message: str, headers: Mapping[str, str]) -> Answer:
        return error_answer(status, message, headers)

    def _stored(self, path: str) -> dict[str, Any] | None:
        answer = self._forward(Request("GET", path, {}, {"Host": "127.0.0.1"}, b""))
        return json.loads(answer.body) if answer.status == 200 else None

    def _precondition(self, request: Request) -> Answer | None:
        path = None
        if request.is_chunk:
            path = self._unless_exists.get(request.query["upload_id"])
        elif "ifGenerationMatch" in request.query:
            wanted, stored = request.query["ifGenerationMatch"], self._stored(_object_path(request))
            if wanted != (stored["generation"] if stored else "0"):
                return error_answer(412, "At least one of the pre-conditions did not hold")
        if path is not None and self._stored(path) is not None:
            return error_answer(412, "At least one of the pre-conditions did not hold")
        if request.is_download and "generation" in request.query:
            stored = self._stored(request.path.removeprefix("/download"))
            if stored is None or stored["generation"] != request.query["generation"]:
                return error_answer(404, "No such object")
        return None

    def _remember_session(self, request: Request, answer: Answer) -> None:
        location = answer.headers.get("Location")
        if location and request.query.get("ifGenerationMatch") == "0":
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(location).query)
            self._unless_exists[query["upload_id"][0]] = _object_path(request)

    def _page(self, request: Request, answer: Answer) -> Answer:
        if answer.status != 200:
            return answer
        listing = json.loads(answer.body)
        items = sorted(listing.get("items", []), key=lambda item: item["name"])
        start = int(request.query.get("pageToken", "0"))
        size = min(self.page_limit, int(request.query.get("maxResults", "1000")))
        hidden = self.unlisted | self.undescribed
        listing["items"] = [_without(item, hidden) for item in items[start : start + size]]
        if start + size < len(items):
            listing["nextPageToken"] = str(start + size)
        return Answer(200, answer.headers, json.dumps(listing).encode())


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hung up, as faults make them do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each response waits 40 ms for an acknowledgement
    proxy: FaultProxy

    def do_GET(self) -> None:
        request = self._read_request()
        fault = self.proxy.fault_of(request)
        time.sleep(fault.delay_s)
        if fault.lose_request:
            self.close_connection = True
            return
        if fault.status is not None:
            answer = self.proxy.error(fault.status, fault.message, fault.headers)
        else:
            answer = self.proxy.answer(request)
            answer.status = fault.answered_as or answer.status
            answer.headers |= fault.headers
        if fault.lose_reply:
            self.close_connection = True
            return
        if fault.reply is not None:
            answer.body = fault.reply
        self._send(answer, fault)

    do_HEAD = do_GET  # noqa: N815
    do_POST = do_GET  # noqa: N815 - the base class's names
    do_PUT = do_GET  # noqa: N815
    do_DELETE = do_GET  # noqa: N815

    def _read_request(self) -> Request:
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query, True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
        return Request(self.command, urllib.parse.unquote(url.path), query, headers, body)

    def _send(self, answer: Answer, fault: Fault) -> None:
        body = bytearray(answer.body[: fault.truncate_to])
        if fault.flip_byte is not None:
            body[fault.flip_byte] ^= 0xFF
        dated = "Date" in answer.headers
        (self.send_response_only if dated else self.send_response)(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in fault.strip_headers:
                self.send_header(key, value)
        if self.command == "HEAD":  # it has the header of the emulator, and no body
            body.clear()
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        ends = [end for end in (fault.cut_after, fault.stall_after) if end is not None]
        with contextlib.suppress(ConnectionError):  # the client may time out during a stall
            self._write(body[: min(ends, default=None)], fault.bytes_per_second)
        time.sleep(fault.stall_s)
        self.close_connection |= bool(ends)

    def _write(self, body: bytearray, bytes_per_second: int | None) -> None:
        step = max(1, bytes_per_second // 20) if bytes_per_second else max(1, len(body))
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            if bytes_per_second:
                time.sleep(step / bytes_per_second)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: `FaultProxy.requests` has the requests."""


def error_answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return Answer(status, {"Content-Type": "application/json"} | dict(headers or {}), body)


def _without(fields: Mapping[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in hidden}


def _object_path(request: Request) -> str:
    """Return the metadata path of an upload's object."""
    if "name" in request.query:
        name = request.query["name"]
    else:  # in the JSON part of the body
        found = re.search(rb'"name": ?("(?:[^"\\]|\\.)*")', request.body)
        assert found is not None, request.body[:200]
        name = json.loads(found.group(1))
    return f"{request.path.removeprefix('/upload')}/{name}"


@dataclasses.dataclass
class Emulator:
    """A running store with one bucket."""

    proxy: FaultProxy
    bucket: str  # its name
    _server: Any

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find the store."""
        return {"STORAGE_EMULATOR_HOST": self.proxy.url}

    def put(self, name: str, content: bytes) -> None:
        """Store or overwrite an object without the proxy, as another program would."""
        port = self._server._api._httpd.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        path = f"/upload/storage/v1/b/{self.bucket}/o?uploadType=multipart"
        about = json.dumps({"name": name}).encode()
        parts = (b"application/json", about), (b"application/octet-stream", content)
        body = b"".join(b"--x\r\nContent-Type: %s\r\n\r\n%s\r\n" % part for part in parts)
        headers = {"Content-Type": "multipart/related; boundary=x"}
        connection.request("POST", path, body=body + b"--x--", headers=headers)
        assert connection.getresponse().status == 200
        connection.close()


@contextlib.contextmanager
def emulator_server() -> Iterator[Any]:
    """Run the emulator on a free port of loopback, without buckets."""
    server = create_server("127.0.0.1", 0, in_memory=True)
    # Otherwise it writes its whole index after each object, even in memory.
    server._storage._write_config_to_file = lambda: None
    with server:
        yield server


@contextlib.contextmanager
def emulated_bucket(server: Any, bucket: str) -> Iterator[Emulator]:
    """Create a bucket behind its own proxy, and set STORAGE_EMULATOR_HOST."""
    create_bucket(bucket, server._storage)
    proxy = FaultProxy(server._api._httpd.server_address[1])
    try:
        running = Emulator(proxy, bucket, server)
        with unittest.mock.patch.dict(os.environ, running.environment):
            yield running
    finally:
        proxy.close()


@contextlib.contextmanager
def storage_emulator(bucket: str = "refocused-test") -> Iterator[Emulator]:
    """Run a store with one empty bucket, for tests that do not use the `emulator` fixture."""
    with emulator_server() as server, emulated_bucket(server, bucket) as running:
        yield running
