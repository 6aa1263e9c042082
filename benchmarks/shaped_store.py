"""A store on loopback with Google's API, a latency and a rate, to measure a sync.

It lists, describes and serves objects, whole and by ranges, and counts downloads.
Every answer comes after a latency, and each stream is no faster than a rate.
"""

import base64
import bisect
import collections
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
PAGE_OBJECTS = 1000  # of a listing, as Google's
# A file of the folder with more objects, by name: the size, and the content unless nobody reads it.
PAPER = "paper_objects.json"
BUCKET = "benchmark"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Latency and rates of a link."""

    latency_s: float = 0.030  # before each answer, in seconds
    stream_rate: float = 20e6  # bytes a second of one answer


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


def requests_to(store: str, kind: str = "gets") -> int:
    """Return how many downloads, or all `answers`, a store has given since the last call."""
    with urllib.request.urlopen(f"{store}/gets") as answer:
        return int(json.load(answer).get(kind, 0))


def serve(folder: str, shape: Shape, sender: Connection) -> None:
    """Run the server until terminated."""
    server = Server(Path(folder), shape)
    sender.send(server.server_address[1])
    server.serve_forever()


class Server(http.server.ThreadingHTTPServer):
    """The objects, kept in memory."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        paper = json.loads(self.objects.pop(PAPER, b"{}"))
        self.objects |= {name: (body or "").encode() for name, (_, body) in paper.items()}
        self.metadata = {name: _described(name, body) for name, body in self.objects.items()}
        for name, (size, _) in paper.items():
            self.metadata[name]["size"] = str(size)
        self.names = sorted(self.metadata)
        self.counts = collections.Counter[str]()
        self.shape = shape
        self._lock = threading.Lock()

    def count(self, kind: str) -> None:
        """Count an answer, or a download of an object or of a range of it."""
        with self._lock:
            self.counts[kind] += 1

    def forget_count(self) -> collections.Counter[str]:
        """Return the numbers of downloads and of all answers, and reset them."""
        with self._lock:
            counts, self.counts = self.counts, collections.Counter()
        return counts

    def page(self, query: Mapping[str, list[str]]) -> dict[str, object]:
        """Return one page of a listing."""
        prefix, start = query.get("prefix", [""])[0], int(query.get("pageToken", ["0"])[0])
        first = bisect.bisect_left(self.names, prefix)
        end = bisect.bisect_left(self.names, prefix + "\U0010ffff")
        stop = min(first + start + PAGE_OBJECTS, end)
        items = [self.metadata[name] for name in self.names[first + start : stop]]
        return {"items": items} | ({"nextPageToken": str(stop - first)} if stop < end else {})


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
            self._send_json(self.server.forget_count())
            return
        self.server.count("answers")
        time.sleep(self.server.shape.latency_s)
        if name and query.get("alt") == ["media"]:
            self._send_object(name)
        elif name:
            self._send_json(self.server.metadata[name])
        else:
            self._send_json(self.server.page(query))

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
        self.server.count("gets")
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
