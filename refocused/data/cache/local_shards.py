"""The local shards of a machine, and the locks by which its processes share them."""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

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
from refocused.system.strict_json import parse_json_object

HEADER_BYTES = 128  # of a .npy that numpy writes for a one-dimensional shape
KEY_CHARACTERS, NAME_CHARACTERS = 32, 40  # of a local file's name
ROW_SUFFIX = ".json"  # in place of `.npy`
RESERVED = "reserved"  # has the size of what the other files of its folder may take
FLOCK = "hhqqi4x"  # `struct flock` of Linux
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
        self._offset = header.offset
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
            read = os.preadv(self._descriptor, cast("Any", [tokens]), offset)
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


class ShardLocks:
    """Named locks between the processes that use a cache, as ranges of the bytes of one file.

    The kernel releases them when their process ends, even by kill -9. The threads of a process
    share the locks of an instance; another instance counts as another process.
    """

    _descriptor = -1

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, name: str, *, shared: bool = False, wait: bool = False) -> bool:
        """Take a lock, alone or `shared`; return False if another process has it, or `wait`."""
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        try:
            self._control(name, kind, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK)
        except BlockingIOError:
            return False
        return True

    def release(self, name: str) -> None:
        """Release a lock, if this process has it."""
        self._control(name, fcntl.F_UNLCK, fcntl.F_OFD_SETLK)

    def is_free(self, name: str) -> bool:
        """Whether no other process has a lock."""
        return self._control(name, fcntl.F_WRLCK, fcntl.F_OFD_GETLK) == fcntl.F_UNLCK

    def close(self) -> None:
        """Release all locks."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1  # the number is soon that of another file

    __del__ = close

    def _control(self, name: str, kind: int, command: int) -> int:
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        request = struct.pack(FLOCK, kind, os.SEEK_SET, start, 1, 0)
        return int(struct.unpack(FLOCK, fcntl.fcntl(self._descriptor, command, request))[0])


class LocalShards:
    """The local shards of one data set, in a folder that all data sets and runs share.

    A file's name has a digest of the shard's name in its source, its content and its local type.
    So a shard is fetched once, also for another selection of the same files.

    Its processes meet in `locks`. Those that plan or await a shard hold its `use` together, and who
    evicts it alone; who fetches it holds `fetch`. There is one more, `room`, for making room on
    the disk, and one for the unfinished files of each process.

    Raises `ShardError` if the folder cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Mapping[str, Bucket],
        *,
        manifest: Manifest,
        data: DataConfig,
        vocabulary: int,
    ) -> None:
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.folder, self._shards, self._incoming = folder, folder / "shards", folder / "incoming"
        sections = data.by_source
        self.sources = [source_of(s.name) if data.mixture else "" for s in manifest.shards]
        self.buckets = [buckets[source] for source in self.sources]
        self.data = [sections[source] for source in self.sources]
        self.bytes = [local_bytes(shard, vocabulary=vocabulary) for shard in manifest.shards]
        self.peaks = [  # bytes while a shard is fetched and converted
            peak_bytes(shard, bucket, vocabulary=vocabulary)
            for shard, bucket in zip(manifest.shards, self.buckets, strict=True)
        ]
        self.unfinished = self._incoming / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._paths: dict[int, Path] = {}
        self._sizes: dict[Path, tuple[float, int]] = {}  # time and bytes of all files
        self._verified: dict[int, tuple[int, ...]] = {}  # versions that this process has verified
        self._damages: collections.Counter[int] = collections.Counter()
        try:
            for part in (self._shards, self._incoming):
                part.mkdir(parents=True, exist_ok=True)
            self.locks = ShardLocks(folder / "locks")
            self.locks.acquire(f"incoming {self.unfinished.name}")
        except OSError as error:
            raise ShardError(
                f"{folder}: this folder for local shards cannot be created or locked "
                f"({error.strerror}). Set data.cache to a writable folder."
            ) from error

    def path(self, index: int) -> Path:
        """Return the path of a shard's local form, whether or not it exists."""
        if index not in self._paths:
            prefix, shard = f"{self.sources[index]}/", self.manifest.shards[index]
            shard = shard.renamed(lambda name: name.removeprefix(prefix))
            versions = [file.blob.version for file in shard.files]
            kind = local_dtype(shard, vocabulary=self.vocabulary)
            text = json.dumps([*shard.fingerprint_row(), versions, kind])
            key = hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]
            name = checked_name(shard.name, where=str(self._shards)).rpartition("/")[2]
            self._paths[index] = self._shards / f"{name[-NAME_CHARACTERS:]}.{key}.npy"
        return self._paths[index]

    def row(self, index: int) -> LocalRow | None:
        """Return a shard's row if it is local."""
        try:
            row = LocalRow(**parse_json_object(self._row_path(index).read_bytes()))
            size = self.path(index).stat().st_size
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return row if row.size == size else None

    def lock(self, kind: Literal["use", "fetch"], index: int) -> str:
        """Return the name of a shard's lock."""
        return f"{kind} {self.path(index).name}"

    def count(self) -> int:
        """Count the local shards of this data set, by one listing."""
        with contextlib.suppress(FileNotFoundError):  # removed by a person
            return len(self._row_names.intersection(path.name for path in self._shards.iterdir()))
        return 0

    @functools.cached_property
    def _row_names(self) -> frozenset[str]:
        return frozenset(self._row_path(i).name for i in range(len(self.manifest.shards)))

    def evict(self, path: Path) -> bool:
        """Delete a local file, unless another process uses it; open files stay readable."""
        if not self.locks.acquire(f"use {path.name}"):
            return False
        _remove(path)
        self.locks.release(f"use {path.name}")
        return True

    def reserve(self, busy: Iterable[int]) -> None:
        """Tell other processes what the shards that are being fetched may take on the disk."""
        self.unfinished.mkdir(parents=True, exist_ok=True)
        reservation = self.unfinished / RESERVED
        reservation.touch()
        os.truncate(reservation, sum(self.peaks[index] for index in busy))  # takes no space

    def reserved_by_others(self) -> int:
        """Return the bytes that others have reserved; remove what killed processes have left."""
        reserved = 0
        for folder in self._incoming.iterdir():
            if folder == self.unfinished:
                continue
            if self.locks.is_free(f"incoming {folder.name}"):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                reserved += (folder / RESERVED).stat().st_size
        return reserved

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

    def arrived(self) -> tuple[int, int]:
        """Return a value that changes whenever bytes or shards arrive in any process."""
        received = 0
        for path in self._incoming.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # finished since it was listed
                if path.name != RESERVED:
                    status = path.stat()
                    received += status.st_size + status.st_blocks  # also within a sparse file
        with contextlib.suppress(FileNotFoundError):
            return received, self._shards.stat().st_mtime_ns
        return received, 0

    def close(self) -> None:
        """Remove unfinished files, and release all locks."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.locks.close()

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
        _remove(self.path(index))

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
            if self._damages[index] > MAX_DAMAGES:  # removed, it would be fetched once more
                raise ShardError(
                    f"{name} was damaged {self._damages[index]} times, even after it was fetched "
                    f"again ({problem}). Check that disk and the machine's memory, or set "
                    "data.cache to a folder on another disk."
                )
            self.remove(index)
            _log.warning("%s is damaged (%s); fetching it again", name, problem)
        return False

    def _row_path(self, index: int) -> Path:
        return self.path(index).with_suffix(ROW_SUFFIX)


def _remove(path: Path) -> None:
    """Delete a local file, its row first; open files stay readable."""
    path.with_suffix(ROW_SUFFIX).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _version(path: Path) -> tuple[int, ...]:
    """Return a value that changes when a file is replaced or rewritten."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
