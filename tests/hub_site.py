"""A stand-in of the Hugging Face hub: data sets, whose files another host serves in ranges.

As on the hub, `/resolve/` answers with a redirect to a signed address of a storage host, which
refuses a request that still carries the hub's token. Lists come in pages. Faults can be scripted.
"""

import collections
import contextlib
import hashlib
import http.server
import io
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Literal

Fault = Literal["hang", "close", "cut", "429", "503"]
COMMIT = "f" * 40
DATASET = "HuggingFaceFW/fineweb-edu"
PAGE = 3  # files of an answer of the list
ROWS = 1000  # of a row group, as its publishers' tool writes them


class HubSite:
    """The running stand-in.

    Attributes:
        files: Content by data set and name.
        pages: Other files, by path.
        requests: Kind (`info`, `tree`, `resolve`, `storage`) of each request, in order.
        listed_sizes: Sizes of files whose content was cut off.
        environment: Variables that send huggingface_hub here.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self.pages: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.listed_sizes: dict[str, int] = {}
        self.ends = threading.Event()
        self._faults: list[tuple[str, Fault, int, int]] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"site": self})
        self._servers = [_Server(("127.0.0.1", 0), handler) for _ in range(2)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        hub, self.storage = (f"http://127.0.0.1:{one.server_port}" for one in self._servers)
        self.environment = {"HF_ENDPOINT": hub, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}

    def script(self, kind: str, fault: Fault, *, after: int = 0, times: int = 1) -> None:
        """Let requests of a kind fail, `after` so many of them."""
        with self._lock:
            self._faults.append((kind, fault, self.requests.count(kind) + after, times))

    def forget(self) -> None:
        """Forget past requests and all faults."""
        with self._lock:
            self.requests.clear()
            self._faults.clear()

    def count(self, kind: str) -> int:
        """Return how many requests of a kind there were."""
        return self.requests.count(kind)

    def size(self, name: str, file: str) -> int:
        """Return the size that the list has."""
        return self.listed_sizes.get(file, len(self.files[name][file]))

    def begin(self, kind: str) -> Fault | None:
        """Record a request; return its fault."""
        with self._lock:
            number = self.requests.count(kind)
            self.requests.append(kind)
            for named, fault, first, times in self._faults:
                if named == kind and first <= number < first + times:
                    return fault
        return None

    def close(self) -> None:
        """Stop the servers; let go of those that wait."""
        self.ends.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class _Handler(http.server.BaseHTTPRequestHandler):
    site: HubSite
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if path in self.site.pages:
            self._reply(self.site.pages[path])
            return
        parts = re.fullmatch(r"/(?:api/)?(?:datasets|storage)/([\w.-]+/[\w.-]+)(/.*)?", path)
        name, rest = (parts[1], parts[2] or "") if parts else ("", "")
        kind = "info"
        if path.startswith("/storage/"):
            kind = "storage"
        elif "/tree/" in rest:
            kind = "tree"
        elif "/resolve/" in rest:
            kind = "resolve"
        fault = self.site.begin(kind)
        if fault == "hang":
            self.site.ends.wait(60)
        if fault in ("hang", "close"):
            self.close_connection = True
        elif fault in ("429", "503"):
            self._reply(
                {"error": "busy"}, int(fault), **{"Retry-After": "1"} if fault == "429" else {}
            )
        elif name not in self.site.files:
            self._reply({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        elif kind == "tree":
            self._list(name)
        elif kind == "resolve":
            file = rest.removeprefix(f"/resolve/{COMMIT}/")
            if file not in self.site.files[name]:
                self._reply({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
                return
            address = f"{self.site.storage}/storage/{name}/{file}?Signature=x"
            self._reply({}, 302, Location=address)
        elif kind == "storage":
            if self.headers["Authorization"] is not None:
                self._reply({"error": "Only one auth mechanism allowed"}, 400)
                return
            self._send_range(self.site.files[name][rest[1:]], is_cut=fault == "cut")
        else:
            siblings = [{"rfilename": file} for file in self.site.files[name]]
            self._reply({"id": name, "sha": COMMIT, "siblings": siblings, "tags": []})

    do_HEAD = do_GET  # noqa: N815

    def _list(self, name: str) -> None:
        oids = {
            file: hashlib.sha1(content).hexdigest()
            for file, content in self.site.files[name].items()
        }
        listed = [
            {"type": "file", "path": file, "oid": oids[file], "size": self.site.size(name, file)}
            for file in oids
        ]
        page = int((re.search(r"cursor=(\d+)", self.path) or ["", "0"])[1])
        following = f"{self.path.partition('&')[0]}&cursor={page + 1}"
        link = f'<http://{self.headers["Host"]}{following}>; rel="next"'
        more = len(listed) > (page + 1) * PAGE
        self._reply(listed[page * PAGE :][:PAGE], **{"Link": link} if more else {})

    def _send_range(self, content: bytes, *, is_cut: bool) -> None:
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()  # type: ignore[union-attr]
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if is_cut else part)
        self.close_connection = is_cut

    def _reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub_site() -> Iterator[HubSite]:
    """Run the stand-in; its data sets are still to be filled."""
    site = HubSite()
    try:
        yield site
    finally:
        site.close()


def parquet_bytes(texts: Sequence[str], *, rows: int = ROWS) -> bytes:
    """Return a file with the columns of FineWeb-Edu, in row groups of so many rows."""
    import pyarrow
    from pyarrow import parquet

    numbers = range(len(texts))
    table = pyarrow.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{number:032x}>" for number in numbers],
            "dump": ["CC-MAIN-2024-10"] * len(texts),
            "url": [f"https://example.org/{number}" for number in numbers],
            "file_path": ["s3://commoncrawl/crawl-data/x.warc.gz"] * len(texts),
            "language": ["en"] * len(texts),
            "language_score": [0.98 for _ in numbers],
            "token_count": [len(text) // 4 for text in texts],
            "score": [3.1 for _ in numbers],
            "int_score": [3 for _ in numbers],
        }
    )
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, row_group_size=rows, compression="snappy")
    return buffer.getvalue()
