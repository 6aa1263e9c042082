"""The local shards of a machine, and the folder in which a data set's processes meet."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refocused.bucket.bucket import Bucket, checked_name, crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.formats.token_layout import SMALL_VOCABULARY, read_npy_header, vocabulary_advice
from refocused.data.manifest.run_manifest import source_of
from refocused.data.manifest.shard_manifest import Manifest, Shard
from refocused.system.atomic_files import publish, replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import FileLock
from refocused.system.strict_json import parse_json_object

HEADER_BYTES = 128  # of a .npy that numpy writes for a one-dimensional shape
KEY_PART = 8  # characters of a data set's folder
KEY_CHARACTERS, NAME_CHARACTERS = 32, 40  # of a local file's name
REQUEST_SECONDS = 10.0
ROW_SUFFIX = ".json"  # in place of `.npy`
MAX_DAMAGES = 2  # of one shard, each repaired by a new download; more point to the machine

_log = logging.getLogger(__name__)


def local_dtype(shard: Shard, *, vocabulary: int) -> str:
    """Return the local element type: uint16 if the file or the vocabulary allows it."""
    return "uint16" if vocabulary <= SMALL_VOCABULARY else shard.dtype


def local_bytes(shard: Shard, *, vocabulary: int) -> int:
    """Return the bytes that a shard takes on disk in its local form."""
    dtype = np.dtype(local_dtype(shard, vocabulary=vocabulary))
    return HEADER_BYTES + shard.tokens * dtype.itemsize


def peak_bytes(shard: Shard, bucket: Bucket, *, vocabulary: int) -> int:
    """Return the most bytes that a shard takes on disk while it is fetched and converted."""
    local = local_bytes(shard, vocabulary=vocabulary)
    if has_local_form(shard, local):
        return local
    copies = not isinstance(bucket, DirectoryBucket)  # files without a checksum are not copied
    return local + sum(f.size for f in shard.files if copies or f.crc32c is not None)


def has_local_form(shard: Shard, local: int) -> bool:
    """Whether an object very likely is its own local form, of `local` bytes, and is moved."""
    return shard.name.endswith(".npy") and shard.size == local


def check_vocabulary(shard: Shard, max_id: int, *, vocabulary: int) -> None:
    """Raise `ShardError` if a shard's largest id is outside the model's vocabulary."""
    if max_id >= vocabulary:
        raise ShardError(
            f"{shard.name}: its largest id is {max_id:,}, but the model's vocabulary ends at "
            f"{vocabulary - 1:,}. {vocabulary_advice(max_id)}, or put {shard.file_names} in "
            "data.skip."
        )


class TokenFile:
    """The tokens of one local shard; safe to share between threads.

    The file is read by position, not mapped into memory. A map of 200 MB of shards grew the
    process by 178 MB and took twice the CPU time per token; and a failing disk then kills the
    process by a signal instead of raising an error. A removed file stays readable.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        with path.open("rb") as file:
            header = read_npy_header(file, what=str(path))
            self._descriptor = os.dup(file.fileno())
        self._name = name
        self._offset = header.bytes
        self._token_bytes = header.dtype.itemsize
        self.count = header.shape[0]
        self.dtype = header.dtype

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read_into(self, tokens: npt.NDArray[Any] | memoryview, *, first: int) -> None:
        """Fill `tokens`, an array of the file's type or its bytes, from token `first` on.

        Raises `ShardError` if the file is too short, or the disk cannot be read.
        """
        offset = self._offset + first * self._token_bytes
        try:
            # To type checkers, numpy arrays are buffers only from Python 3.12 on.
            read = os.preadv(self._descriptor, [tokens], offset)  # type: ignore[list-item]
        except OSError as error:
            raise ShardError(
                f"{self._name}: its local copy cannot be read ({error.strerror}). Check the disk "
                "of data.cache, or set data.cache to another one."
            ) from error
        if read != tokens.nbytes:
            raise ShardError(
                f"{self._name}: its local copy ends at {offset + read:,} bytes, "
                f"{offset + tokens.nbytes:,} expected: it was truncated after the download. Start "
                "again to download it anew."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRow:
    """Facts of one local file; written after it, so that the file is complete."""

    size: int  # bytes of the local file
    crc32c: int  # of the local file
    max_id: int  # largest id in it


class LocalShards:
    """The local shards of one data set, in a folder that all data sets of `data.cache` share.

    A file's name has a digest of the shard's name in its source, its content and its local type.
    So a shard is fetched once, also for another selection of the same files. `folder` is that of
    the data set, where its processes meet.
    """

    def __init__(
        self, cache: Path, *, manifest: Manifest, data: DataConfig, vocabulary: int
    ) -> None:
        self.manifest = manifest
        self.vocabulary = vocabulary
        self._data = data
        self._data_of = {name: data.of_source(name) for name in data.mixture}
        # Runs that need different local types must not share a folder.
        wide = any(
            local_dtype(shard, vocabulary=vocabulary) != "uint16" for shard in manifest.shards
        )
        key = manifest.fingerprint[:KEY_PART] + manifest.packing[:KEY_PART]
        self.folder = cache / (f"{key}-uint32" if wide else key)
        self._cache, self._shards = cache, cache / "shards"
        self._paths: dict[int, Path] = {}
        self._sizes: dict[Path, tuple[float, int]] = {}  # time and bytes of all files
        self._verified: dict[int, tuple[int, ...]] = {}  # versions that this process has verified
        self._damages: collections.Counter[int] = collections.Counter()

    def path(self, index: int) -> Path:
        """Return the path of a shard's local form, whether or not it exists."""
        if index not in self._paths:
            prefix, shard = f"{self.source(index)}/", self.manifest.shards[index]
            shard = shard.renamed(lambda name: name.removeprefix(prefix))
            versions = [file.blob.version for file in shard.files]
            kind = local_dtype(shard, vocabulary=self.vocabulary)
            text = json.dumps([*shard.fingerprint_row(), versions, kind])
            key = hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]
            name = checked_name(shard.name, where=str(self._shards)).rpartition("/")[2]
            self._paths[index] = self._shards / f"{name[-NAME_CHARACTERS:]}.{key}.npy"
        return self._paths[index]

    def bytes(self, index: int) -> int:
        """Return the bytes of a shard's local form."""
        return local_bytes(self.manifest.shards[index], vocabulary=self.vocabulary)

    def source(self, index: int) -> str:
        """Return the name of a shard's source; empty without a mixture."""
        return source_of(self.manifest.shards[index].name) if self._data.mixture else ""

    def data(self, index: int) -> DataConfig:
        """Return the data section of a shard's source."""
        return self._data_of.get(self.source(index), self._data)

    def row(self, index: int) -> LocalRow | None:
        """Return a shard's row if it is local."""
        try:
            row = LocalRow(**parse_json_object(self._row_path(index).read_bytes()))
            size = self.path(index).stat().st_size
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return row if row.size == size else None

    def present(self) -> set[int]:
        """Return the shards that have a row, by one listing; `row` compares it with the file."""
        self._shards.mkdir(exist_ok=True)
        names = {path.name for path in self._shards.iterdir()}
        shards = range(len(self.manifest.shards))
        return {index for index in shards if self._row_path(index).name in names}

    def stored(self) -> dict[Path, int]:
        """Return the bytes of all local files, those of other data sets included, oldest first.

        Each file is looked at once: it does not change.
        """
        sizes = {}
        for path in self._shards.glob("*.npy"):
            with contextlib.suppress(FileNotFoundError):  # evicted by another process
                if path not in self._sizes:
                    status = path.stat()
                    self._sizes[path] = status.st_mtime, status.st_size
                sizes[path] = self._sizes[path]
        self._sizes = sizes
        return {path: sizes[path][1] for path in sorted(sizes, key=sizes.__getitem__)}

    def others(self) -> tuple[set[str], int]:
        """Return what running fetchers of other data sets need: file names, and bytes to come."""
        names, incoming = set[str](), 0
        for folder in (path.parent for path in self._cache.glob("*/fetcher.lock")):
            files = FetcherFiles(folder)
            if folder != self.folder and files.is_locked() and (heartbeat := files.heartbeat()):
                names.update(heartbeat.wanted)
                incoming += heartbeat.incoming
        return names, incoming

    def remove_leftovers(self) -> None:
        """Remove the unfinished files of fetchers that ended; the caller holds this one's lock."""
        for incoming in self._cache.glob("*/incoming"):
            lock = FetcherFiles(incoming.parent).lock
            if incoming.parent == self.folder or lock.acquire():
                shutil.rmtree(incoming, ignore_errors=True)
                lock.release()

    def publish(self, index: int, file: Path, *, max_id: int) -> None:
        """Move a finished file to its place durably, then write its row.

        The row comes last, since it allows others to open the file. It is not flushed: if a power
        cut empties it, the file counts as not local.
        """
        row = LocalRow(file.stat().st_size, crc32c_of(file), max_id)
        target = self.path(index)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._row_path(index).unlink(missing_ok=True)
        with file.open("rb") as written:  # it must reach the disk before its row
            publish(written, target)
        replace_file(self._row_path(index), json.dumps(dataclasses.asdict(row)).encode())

    def remove(self, index: int) -> None:
        """Delete a local shard, its row first; open files stay readable."""
        remove_local(self.path(index))

    def open(self, index: int) -> TokenFile | None:
        """Open a shard for reading; return None if it is not local.

        The first time in this process, the whole file is compared with the checksum of its row. A
        damaged file is removed, so that it is fetched again. Raises `ShardError` if it holds an id
        outside the vocabulary, or was damaged repeatedly.
        """
        row = self.row(index)
        if row is None:
            return None
        shard = self.manifest.shards[index]
        check_vocabulary(shard, row.max_id, vocabulary=self.vocabulary)
        try:
            if self._is_intact(index, row):
                return TokenFile(self.path(index), name=shard.name)
        except FileNotFoundError:  # evicted since the row was read
            pass
        return None

    def _is_intact(self, index: int, row: LocalRow) -> bool:
        path = self.path(index)
        version = _version(path)
        if self._verified.get(index) == version:
            return True
        try:
            checksum = crc32c_of(path)
            problem = f"CRC-32C {checksum:#010x}, {row.crc32c:#010x} expected"
        except FileNotFoundError:
            raise
        except OSError as error:
            checksum, problem = None, error.strerror or str(error)
        if checksum == row.crc32c:
            self._verified[index] = version
            return True
        if _version(path) == version:  # not replaced by another process meanwhile
            self._damages[index] += 1
            name = f"{self.manifest.shards[index].name}: its local copy {path}"
            self.remove(index)
            if self._damages[index] > MAX_DAMAGES:
                raise ShardError(
                    f"{name} was damaged {self._damages[index]} times, even after it was fetched "
                    f"again ({problem}). Check that disk and the machine's memory, or set "
                    "data.cache to a folder on another disk."
                )
            _log.warning("%s is damaged (%s); fetching it again", name, problem)
        return False

    def _row_path(self, index: int) -> Path:
        return self.path(index).with_suffix(ROW_SUFFIX)


def remove_local(path: Path) -> None:
    """Delete a local file, its row first; open files stay readable."""
    path.with_suffix(ROW_SUFFIX).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _version(path: Path) -> tuple[int, ...]:
    """Return a value that changes when a file is replaced or rewritten."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of the fetcher, written every second."""

    pid: int
    beats: int  # so that each is another one: ranks see that the fetcher runs without a clock
    progress: int = 0  # changes whenever bytes or shards arrive
    error: str | None = None  # the failure that ended it
    troubles: dict[str, str] = dataclasses.field(default_factory=dict)  # last failure, by shard
    given_up: tuple[int, ...] = ()  # shards that are proven wrong
    wanted: tuple[str, ...] = ()  # names of the files to keep
    incoming: int = 0  # bytes that the shards under way take at most


class FetcherFiles:
    """The heartbeat, the lock and the requests of one cache folder."""

    def __init__(self, folder: Path) -> None:
        self._heartbeat = folder / "fetcher.json"
        self._requests = folder / "asked"
        self._lock_path = folder / "fetcher.lock"
        self.lock = FileLock(self._lock_path)  # its holder is the folder's only fetcher
        self._repeated: dict[str, tuple[int, float]] = {}  # time of each request, and when seen

    def beat(self, heartbeat: Heartbeat) -> None:
        """Replace the heartbeat, atomically."""
        replace_file(self._heartbeat, json.dumps(dataclasses.asdict(heartbeat)).encode())

    def heartbeat(self) -> Heartbeat | None:
        """Return the last heartbeat of any process, or None."""
        try:
            return Heartbeat(**parse_json_object(self._heartbeat.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def request(self, index: int) -> None:
        """Request a shard from the process that fetches; to be repeated while it is needed.

        On a full disk the request is lost, and the shard is fetched when the plan has it.
        """
        with contextlib.suppress(OSError):
            self._requests.mkdir(parents=True, exist_ok=True)
            (self._requests / str(index)).touch()

    def requests(self, *, now: float) -> list[int]:
        """Return the shards whose request was repeated in the last 10 s; remove the others.

        `now` is on a monotonic clock. The files' times are only compared with each other: they are
        those of the disk's server, or of a clock that was stepped.
        """
        indices = []
        for path in sorted(self._requests.glob("*")):
            try:
                time_ns = path.stat().st_mtime_ns
            except FileNotFoundError:  # withdrawn since it was listed
                continue
            if self._repeated.get(path.name, (0, 0.0))[0] != time_ns:
                self._repeated[path.name] = time_ns, now
            if now - self._repeated[path.name][1] < REQUEST_SECONDS:
                indices.append(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return indices

    def withdraw(self, index: int) -> None:
        """Remove a request; a rank that still waits repeats it."""
        (self._requests / str(index)).unlink(missing_ok=True)

    def is_locked(self) -> bool:
        """Whether a running process holds the lock."""
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared and only for an instant: a fetcher that is blocked by it tries again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
