"""Find text files, local or in a store or on the Hugging Face hub; divide them into tasks."""

import contextlib
import dataclasses
import fnmatch
import functools
import io
import logging
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from refocused.bucket.bucket import extended_crc32c
from refocused.bucket.open_bucket import BY_ENVIRONMENT, STORES, Credentials, open_bucket
from refocused.data.formats.object_names import DESCRIPTION, HELD_OUT, TEXT_PATTERNS, text_kind
from refocused.system.errors import BucketError, ShardError, how_to_install, local_path
from refocused.tokenizers.encoders import HUB

BLOCK_BYTES = 8 * 1024 * 1024
HUB_SECONDS = 60.0  # without a byte from the hub, then a request is retried
_ADDRESS = re.compile(rf"({'|'.join(STORES)})://([^/]+)/?(.*)")


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteText:
    """One object, with what reading uses of a `Path`."""

    store: str  # `gs://bucket`, or `hub:DATASET@COMMIT`
    name: str  # in the store
    size: int  # bytes
    version: str  # generation or content id, to detect a changed object
    credentials: Credentials = BY_ENVIRONMENT

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"

    def open(self, _mode: str = "rb", block: int = 0) -> BinaryIO:
        """Open the object, to be read in blocks; reading raises `BucketError` or `ShardError`.

        A `.parquet` has no blocks: its reader reads whole columns, and each read is a request.
        """
        if self.name.endswith(".parquet") and not block:
            return cast("BinaryIO", _Ranges(self))
        return cast("BinaryIO", io.BufferedReader(_Ranges(self), block or BLOCK_BYTES))

    def read(self, start: int, length: int) -> bytes:
        """Return a range, after retries; raise `ShardError` if the object has changed."""
        if self.store.startswith(HUB):  # a commit does not change
            from huggingface_hub import hf_hub_url

            dataset, _, commit = self.store.removeprefix(HUB).partition("@")
            url = hf_hub_url(dataset, self.name, repo_type="dataset", revision=commit)
            try:
                response = _get_from_hub(url, Range=f"bytes={start}-{start + length - 1}")
            except Exception as error:  # of its HTTP library, which depends on its version
                raise _hub_error(str(self), error) from None
            received: bytes = response.content
            whole = response.status_code == 200  # a server that knows no ranges
            return received[start : start + length] if whole else received
        bucket = _bucket(self.store, self.credentials)
        content: bytes = bucket.read(self.name, start=start, length=length)
        now = bucket.info(self.name)
        if now is None or (now.size, now.generation or "") != (self.size, self.version):
            raise ShardError(
                f"{self}: the object has changed since it was listed. Run the command again: as "
                "shards of two versions must not mix, it begins anew."
            )
        return content


class _Ranges(io.RawIOBase):
    """Reads an object by ranges; a short one is an error, never the end."""

    def __init__(self, text: RemoteText) -> None:
        self._text = text
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._text.size)
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._text.size - self._at), 0)
        content = self._text.read(self._at, length) if length else b""
        if len(content) != length:
            raise BucketError(
                f"{self._text}: {len(content):,} of {length:,} bytes received from byte "
                f"{self._at:,}. Run the same command again: it continues from here."
            )
        buffer[:length] = content
        self._at += length
        return length


@functools.lru_cache(maxsize=8)  # of this process
def _bucket(store: str, credentials: Credentials) -> Any:
    bucket: Any = open_bucket(store, credentials)
    bucket.transport.unpacks = True  # texts tell by their first bytes whether they are compressed
    return bucket


def find_remote(address: str, credentials: Credentials = BY_ENVIRONMENT) -> list[RemoteText] | None:
    """Return the objects at `gs://bucket/NAME` or `hub:DATASET[@REVISION][:NAME]`, by name.

    `NAME` is an object, a folder, or a pattern whose `*` also matches `/`. None for another
    address. Raises `BucketError` if the store cannot be listed.
    """
    if address.startswith(HUB):
        from huggingface_hub import constants

        dataset, _, pattern = address.removeprefix(HUB).partition(":")
        name, _, revision = dataset.partition("@")
        # As `dataset_info` and `list_repo_tree`, which has no time limit.
        url: str | None = f"{constants.ENDPOINT}/api/datasets/{name}"
        at = f"/revision/{urllib.parse.quote(revision, safe='')}" if revision else ""
        listed = list[dict[str, Any]]()
        try:
            commit = _get_from_hub(f"{url}{at}").json()["sha"]
            url = f"{url}/tree/{commit}?recursive=true"
            while url is not None:
                response = _get_from_hub(url)
                listed += response.json()
                url = response.links.get("next", {}).get("url")
            files = sorted((file["path"], file) for file in listed if file["type"] == "file")
        except Exception as error:  # of its HTTP library, which depends on its version
            raise _hub_error(f"{HUB}{dataset}", error) from None
        store = f"{HUB}{name}@{commit}"
        texts = [RemoteText(store, path, file["size"], file["oid"]) for path, file in files]
    elif (parts := _ADDRESS.fullmatch(address)) is not None:
        store, pattern = f"{parts[1]}://{parts[2]}", parts[3]
        bucket = _bucket(store, credentials)
        texts = [
            RemoteText(store, blob.name, blob.size, blob.generation or "", credentials)
            for blob in bucket.list(re.split(r"[*?\[]", pattern)[0])
        ]
    else:
        return None
    folder = f"{pattern.rstrip('/')}/" if pattern else ""
    return [
        text
        for text in texts
        if text.name.startswith(folder) or fnmatch.fnmatchcase(text.name, pattern)
    ]


def _get_from_hub(url: str, **headers: str) -> Any:
    """Return the hub's answer, after retries and redirects; raises its libraries' errors."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

    response = http_backoff(
        "GET",
        url,
        headers={**build_hf_headers(), **headers},
        timeout=HUB_SECONDS,
        follow_redirects=True,
    )
    hf_raise_for_status(response)
    return response


def _hub_error(what: str, error: Exception) -> BucketError:
    text = str(error).partition("For more information check")[0]
    reason = " ".join(text.split()).rstrip(".") or type(error).__name__
    return BucketError(f"{what}: {reason:.300}. Check the name, HF_TOKEN and the connection.")


ARROW_FILE = b"ARROW1"  # begins a file of Arrow; `datasets` writes streams
TASK_BYTES = 32 * 1024 * 1024  # about five seconds of one process
EDGE_BYTES = 64 * 1024
ROWS_AT_ONCE = 256
# gzip and parquet's codecs compress real text by a factor of about ten at most.
UNPACKED_RATIO = 32
UNPACKED_BYTES = 16 * 1024 * 1024  # in addition, for small files
BATCH_RATIO = 8  # of a batch's bytes to the file's limit
SHOWN_NAMES = 5

_log = logging.getLogger(__name__)

TextPath = Path | RemoteText


@dataclasses.dataclass(frozen=True, slots=True)
class TextFile:
    """One input."""

    path: TextPath
    size: int  # bytes
    edges: int | str  # CRC-32C of both ends, or a version: detects a changed file of equal size


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, in bytes or in row groups of a `.parquet`.

    A line belongs to the span in which it starts.
    """

    path: TextPath
    start: int = 0
    end: int | None = None  # exclusive; None: the file's end


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The unit of work of a process."""

    spans: tuple[Span, ...]
    bytes: int  # of text, approximately


def find_inputs(
    arguments: Sequence[str], credentials: Credentials = BY_ENVIRONMENT
) -> list[TextFile]:
    """Return the text files at the given paths and addresses, and below the given folders.

    Files keep the order of the arguments; those of a folder are sorted by name, without hidden
    files. Files that are not text are left out with a warning. Raises `ShardError` if a path is
    missing, is not text, or occurs twice, and `BucketError` if a store cannot be listed.
    """
    paths: list[TextPath] = []
    for argument in arguments:
        remote = find_remote(argument, credentials)
        if remote is not None:
            paths += _texts_among({text.name: text for text in remote}, argument)
            continue
        if "://" in argument:
            raise ShardError(f"{argument}: give a path, gs://bucket/NAME, or hub:DATASET.")
        root = local_path(argument)
        if root.is_dir():
            files = [file for file in sorted(root.rglob("*")) if file.is_file()]
            names = {file.relative_to(root).as_posix(): file for file in files}
            visible = {name: file for name, file in names.items() if "/." not in f"/{name}"}
            paths += _texts_among(visible, argument)
            continue
        if not root.is_file():
            raise ShardError(f"{root}: there is no such file or folder. Correct the path.")
        if not text_kind(root.name):
            raise ShardError(
                f"{root}: this format is not supported; {TEXT_PATTERNS} are. Unpack or convert the "
                "file."
            )
        paths.append(root)
    known: dict[TextPath, TextFile] = {}
    for path in paths:
        real = path.resolve() if isinstance(path, Path) else path
        if real in known:
            raise ShardError(f"{path}: this file is given twice. Give it once.")
        if isinstance(path, RemoteText):
            known[real] = TextFile(path, path.size, path.version)
            continue
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                edges = extended_crc32c(0, file.read(EDGE_BYTES))
                file.seek(max(size - EDGE_BYTES, 0))
                edges = extended_crc32c(edges, file.read(EDGE_BYTES))
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}. Check its permissions.") from None
        known[real] = TextFile(path, size, edges)
    return list(known.values())


def _texts_among(found: Mapping[str, TextPath], argument: str) -> list[TextPath]:
    """Return the texts among the files of a folder, by name; warn of others, and of test splits."""

    def some(names: Sequence[str]) -> str:
        return ", ".join([*names[:SHOWN_NAMES], *["..."] * (len(names) > SHOWN_NAMES)])

    texts = [
        name
        for name in found
        if text_kind(name) and not DESCRIPTION.fullmatch(name.rpartition("/")[2])
    ]
    if not texts:
        raise ShardError(
            f"{argument}: no text files ({TEXT_PATTERNS}) are there. Correct the path or address."
        )
    if others := sorted(found.keys() - set(texts)):
        _log.warning(
            "%s: %d of %d files are left out, since they are not text of a known format: %s",
            *(argument, len(others), len(found), some(others)),
        )
    held_out = [name for name in texts if HELD_OUT.search(name)]
    if 0 < len(held_out) < len(texts):
        _log.warning(
            "%s: %d of %d text files look like validation or test sets, and are tokenized with the "
            "others: %s. To train without them, name the other files, or a pattern of them.",
            *(argument, len(held_out), len(texts), some(held_out)),
        )
    return [found[name] for name in texts]


def plan_tasks(files: Iterable[TextFile]) -> list[Task]:
    """Group spans into tasks of about 32 MiB of text, in order.

    Long `.parquet` files, and those of JSON lines that are not compressed, are split. The plan
    depends only on the files.
    """
    tasks, gathered, size = list[Task](), list[Span](), 0
    for file in files:
        name, path = file.path.name.lower(), file.path
        is_whole = file.size <= TASK_BYTES or not name.endswith((".jsonl", ".ndjson", ".parquet"))
        if not is_whole:
            with path.open("rb", EDGE_BYTES) as content:
                is_whole = compression(content) != ""
        if is_whole:
            spans = [(Span(path), file.size)]
        elif name.endswith(".parquet"):
            with _opened(path) as parquet:
                groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
                sizes = [group.total_byte_size for group in groups]
            spans = [(Span(path, n, n + 1), group_bytes) for n, group_bytes in enumerate(sizes)]
        else:
            ends = [*range(TASK_BYTES, file.size, TASK_BYTES), file.size]
            starts = [0, *ends[:-1]]
            spans = [(Span(path, at, to), to - at) for at, to in zip(starts, ends, strict=True)]
        for span, span_bytes in spans:
            last = gathered[-1] if gathered else None
            if last is not None and (last.path, last.end) == (span.path, span.start):
                # A `.parquet` is opened once a task: its footer may be as large as a row group.
                span = dataclasses.replace(gathered.pop(), end=span.end)
            gathered.append(span)
            size += span_bytes
            if size >= TASK_BYTES:
                tasks.append(Task(tuple(gathered), size))
                gathered, size = [], 0
    return [*tasks, Task(tuple(gathered), size)] if gathered else tasks


def column_texts(span: Span, *, field: str) -> Iterator[str | None]:
    """Yield a column's texts in an `.arrow`, or in the row groups of a `.parquet` span.

    Those that are null are None.

    Raises `ShardError` if the file is damaged, or the column is missing or not text.
    """
    types = import_pyarrow(span.path).types

    with _opened(span.path) as file:
        is_parquet = text_kind(span.path.name) == ".parquet"
        schema = file.schema_arrow if is_parquet else file.schema
        columns = schema.names.count(field)
        kind: Any = schema.field(field).type if columns == 1 else None
        values = kind.value_type if kind is not None and types.is_dictionary(kind) else kind
        is_text = types.is_string, types.is_large_string, types.is_string_view
        problem = None
        if not columns:
            problem = f"it has no column {field!r}; it has {', '.join(schema.names):.200}"
        elif columns > 1:
            problem = f"it has {columns} columns {field!r}"
        elif not any(check(values) for check in is_text):
            problem = f"the column {field!r} holds {kind}, which is not text"
        if problem is not None:
            raise ShardError(f"{span.path}: {problem}. Give the text's column with --field.")
        if not is_parquet:  # a file of Arrow has numbered batches, a stream can be iterated
            numbers = range(getattr(file, "num_record_batches", 0))
            for batch in map(file.get_batch, numbers) if numbers else file:
                yield from (text.as_py() for text in batch.column(field))
            return
        most, metadata = most_unpacked(size_of(span.path)), file.metadata
        column = next(n for n in range(len(file.schema)) if file.schema.column(n).path == field)
        for group in range(span.start, metadata.num_row_groups if span.end is None else span.end):
            unpacked = metadata.row_group(group).column(column).total_uncompressed_size
            if unpacked > most:
                raise unpacks_too_far(span.path)
            # Dictionary encoding stores a text once that may occur in every row.
            rows = max(min(ROWS_AT_ONCE, BATCH_RATIO * most // max(unpacked, 1)), 1)
            options = {"row_groups": [group], "columns": [field], "use_threads": False}
            for batch in file.iter_batches(rows, **options):
                yield from (text.as_py() for text in batch.column(field))


def size_of(path: TextPath) -> int:
    """Return a file's bytes."""
    return path.size if isinstance(path, RemoteText) else path.stat().st_size


def most_unpacked(size: int) -> int:
    """Return the maximum bytes of text of a compressed file; real text has fewer."""
    return UNPACKED_BYTES + UNPACKED_RATIO * size


def unpacks_too_far(path: TextPath) -> ShardError:
    """Return the error for a compressed file that holds more than `most_unpacked`."""
    return ShardError(
        f"{path}: its {size_of(path):,} bytes unpack to far more than text does. If that is "
        "intended, write it unpacked (gunzip, or parquet without compression and dictionary)."
    )


@contextlib.contextmanager
def _opened(path: TextPath) -> Iterator[Any]:
    pyarrow = import_pyarrow(path)
    try:
        with path.open("rb") as source, contextlib.ExitStack() as stack:
            if text_kind(path.name) == ".parquet":
                where = source if isinstance(path, RemoteText) else path
                # Without pre_buffer, a row group's pages are read on demand.
                yield stack.enter_context(pyarrow.parquet.ParquetFile(where, pre_buffer=False))
            elif source.read(len(ARROW_FILE)) == ARROW_FILE:
                yield stack.enter_context(pyarrow.ipc.open_file(source))
            else:
                source.seek(0)
                yield stack.enter_context(pyarrow.ipc.open_stream(source))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = text_kind(path.name)[1:]
        raise ShardError(
            f"{path}: the {kind} file cannot be read ({error}). Download it again, or leave it out."
        ) from None


def compression(file: Any) -> str:
    """Return `.gz`, `.zst` or "" by the first bytes, which no text has, and go back to them.

    A name does not tell: stores keep `Content-Encoding: gzip`, and clients unpack in passing.
    """
    magic = file.read(4)
    file.seek(0)
    return ".gz" if magic[:2] == b"\x1f\x8b" else ".zst" if magic == b"\x28\xb5\x2f\xfd" else ""


def import_pyarrow(path: TextPath) -> Any:
    """Import what reads a file's format or compression; raise `ShardError` if it is missing."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet  # noqa: F401
    except ModuleNotFoundError:
        kind, fix = Path(path.name).suffix, how_to_install("pyarrow")
        raise ShardError(f"{path}: {kind} files need pyarrow. Install it: {fix}") from None
    return pyarrow
