"""A store on loopback with Google's API, a latency and a rate, to measure a sync.

It lists, describes and serves objects, whole and by ranges, and counts downloads.
Every answer comes after a latency, and each stream is no faster than a rate, all together no
faster than another.
"""

import base64
import dataclasses
import http.server
import json
import multiprocessing
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import google_crc32c

PIECE_BYTES = 1 << 17
BUCKET = "benchmark"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Latency and rates of a link."""

    latency_s: float = 0.030  # before each answer, in seconds
    stream_rate: float = 20e6  # bytes a second of one answer
    # bytes a second of all responses together; None: no limit
    total_rate: float | None = None


@contextmanager
def shaped_store(folder: Path, shape: Shape) -> Iterator[str]:
    """Serve a folder's files as a bucket from a process of its own; yield its URL.

    So a client's work is measured, and not the server's.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(str(folder), shape, sender), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def requests_to(store: str) -> int:
    """Return how many downloads of objects or ranges a store has answered since the last call."""
    with urllib.request.urlopen(f"{store}/gets") as answer:
        return int(json.load(answer)["gets"])


def serve(folder: str, shape: Shape, sender: Connection) -> None:
    """Run the server until terminated."""
    server = Server(Path(folder), shape)
    sender.send(server.server_address[1])
    server.serve_forever()


class Server(http.server.ThreadingHTTPServer):
    """The objects, kept in memory, and the pace of all streams."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.metadata = {name: _described(name, body) for name, body in self.objects.items()}
        self.gets = 0
        self.shape = shape
        self._free_at = 0.0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count a download of an object or of a range of it."""
        with self._lock:
            self.gets += 1

    def forget_count(self) -> int:
        """Return the number of downloads, and reset it."""
        with self._lock:
            count, self.gets = self.gets, 0
        return count

    def wait_for_turn(self, size: int) -> None:
        """Wait until all streams together may have sent this much more."""
        if self.shape.total_rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.shape.total_rate
            wait = self._free_at - now
        time.sleep(max(wait, 0.0))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers `storage/v1` and, at `/gets`, the count."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a listing, an object's description, or its bytes."""
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        name = urllib.parse.unquote(url.path.rpartition("/o/")[2]) if "/o/" in url.path else ""
        if url.path == "/gets":
            self._send_json({"gets": self.server.forget_count()})
            return
        time.sleep(self.server.shape.latency_s)
        if name and query.get("alt") == ["media"]:
            self._send_object(name)
        elif name:
            self._send_json(self.server.metadata[name])
        else:
            self._send_json({"items": list(self.server.metadata.values())})

    def _send_json(self, value: Mapping[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_object(self, name: str) -> None:
        body = memoryview(self.server.objects[name])
        asked = self.headers.get("Range")
        first, last = 0, len(body) - 1
        if asked:
            asked_first, _, asked_last = asked.removeprefix("bytes=").partition("-")
            first, last = int(asked_first), min(int(asked_last or last), last)
        self.server.count()
        self.send_response(206 if asked else 200)
        metadata = self.server.metadata[name]
        self.send_header("X-Goog-Hash", f"crc32c={metadata['crc32c']}")
        self.send_header("X-Goog-Generation", "1")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(last - first + 1))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.end_headers()
        began = time.monotonic()
        for start in range(first, last + 1, PIECE_BYTES):
            piece = body[start : min(start + PIECE_BYTES, last + 1)]
            self.server.wait_for_turn(len(piece))
            self.wfile.write(piece)
            due = began + (start + len(piece) - first) / self.server.shape.stream_rate
            time.sleep(max(due - time.monotonic(), 0.0))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _described(name: str, body: bytes) -> dict[str, str]:
    checksum = google_crc32c.value(body).to_bytes(4, "big")
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": BUCKET,
        "size": str(len(body)),
        "crc32c": base64.b64encode(checksum).decode(),
        "generation": "1",
        "metageneration": "1",
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }
