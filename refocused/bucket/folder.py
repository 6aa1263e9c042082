"""A folder as a bucket, for data and mirrors on a disk or a mount."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from refocused.bucket.bucket import (
    BLOCK_BYTES,
    BlobInfo,
    blocks_of,
    checked_name,
    crc32c_of,
    extended_crc32c,
    require_checksum,
    require_description,
    require_same,
    size_and_checksum,
)
from refocused.bucket.partial_files import PART_SUFFIX, PartFile, disk_errors, require_space
from refocused.system.atomic_files import open_regular, publish
from refocused.system.errors import BucketError, CorruptObjectError

_UPLOAD = ".upload-"  # begins the hidden name of a file being written


class DirectoryBucket:
    """A bucket whose objects are the files below a folder.

    Files ending in `.part`, and those with a path component that starts with a dot, are neither
    listed nor written. Symbolic links to folders are not followed; a link that leads outside the
    folder is listed, but every use of it is an error.
    """

    endpoint = identity = None

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._root = path.absolute()

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name."""
        if not self._root.is_dir():
            text = "the folder does not exist. Check the path, or create the folder."
            raise BucketError(f"{self.url}: {text}")
        folder = prefix.rpartition("/")[0]
        start = self._root / checked_name(folder, where=self.url) if folder else self._root
        with disk_errors(start):
            blobs = [blob for blob in self._below(start) if blob.name.startswith(prefix)]
        yield from sorted(blobs, key=lambda blob: blob.name)

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object; None if it does not exist."""
        path = self._path(name)
        return _blob(name, path) if path.is_file() and not _is_hidden(name) else None

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`, fewer at the object's end."""
        path = self._existing(name)
        with disk_errors(path), open_regular(path) as file:
            size = max(path.stat().st_size - start, 0)
            require_description(str(path), size if length is None else min(size, length))
            file.seek(start)
            return file.read(-1 if length is None else length)

    def write(self, name: str, content: bytes, *, overwrite: bool | str = False) -> BlobInfo:
        """Store bytes. Without `overwrite`, an existing object with other bytes is an error.

        To replace one generation, a hidden file beside the object is locked.
        """
        checksum = extended_crc32c(0, content)
        return self._store(name, [content], len(content), checksum, overwrite=overwrite)

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Copy a file to a new name; no-op if the object already has the same bytes."""
        with disk_errors(source):
            size = source.stat().st_size
        return self._store(name, blocks_of(source), size, crc32c, source=source)

    def age_s(self, name: str) -> float:
        """Return 0: a folder has no clock of its own, and those of machines are set and stepped."""
        return 0.0

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Copy an object to `target` through a temporary file; return its CRC-32C."""
        source = self._existing(blob.name)
        require_space(target.parent, needed_bytes=blob.size)
        new = PartFile(target, total_bytes=blob.size, resume=False)
        with disk_errors(source), source.open("rb") as file, new as part:
            while part.size <= blob.size and (block := file.read(BLOCK_BYTES)):
                part.write(block)
            if part.size != blob.size or blob.crc32c not in (None, part.crc32c):
                part.discard()
                raise CorruptObjectError(
                    f"{source}: {size_and_checksum(part.size, part.crc32c)} read, "
                    f"{size_and_checksum(blob.size, blob.crc32c)} expected. The file changed or "
                    "is damaged: restore it, or exclude it."
                )
            part.publish()
        return part.crc32c

    def local_file(self, blob: BlobInfo) -> Path | None:
        """Return an object's file if it is unchanged since it was listed.

        None also where `blob` has a checksum: only a download compares that. Call it again after
        reading to learn whether the file changed meanwhile.
        """
        return self._path(blob.name) if self.info(blob.name) == blob else None

    def delete(self, name: str) -> None:
        """Remove one object, if it exists, and the folders left empty."""
        path = self._path(name)
        with disk_errors(path):
            path.unlink(missing_ok=True)
            _remove_leftovers(path.parent)
        with contextlib.suppress(OSError):  # from the first folder that is not empty
            for folder in path.parents:
                if folder == self._root:
                    return
                folder.rmdir()

    def _store(
        self,
        name: str,
        blocks: Iterable[bytes],
        size: int,
        crc32c: int | None,
        *,
        overwrite: bool | str = False,
        source: Path = Path(),
    ) -> BlobInfo:
        target = self._path(name)
        if _is_hidden(name):
            raise BucketError(
                f"{self.url}: the object name {name!r} is that of a temporary or hidden file, "
                "which is never listed. Choose a name that has no leading dot and does not end in "
                ".part."
            )
        if target.exists() and not overwrite:
            with disk_errors(source):
                checksum = crc32c_of(source) if crc32c is None else crc32c
            _require_same(target, size, checksum)
            return _blob(name, target)
        with _temporary(target, needed_bytes=size) as file, contextlib.ExitStack() as locks:
            checksum = 0
            for block in blocks:
                checksum = extended_crc32c(checksum, block)
                file.write(block)
            require_checksum(source, found=checksum, expected=crc32c)
            if isinstance(overwrite, str):
                lock = locks.enter_context(target.with_name(f".{target.name}.lock").open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                if str(target.stat().st_mtime_ns) != overwrite:
                    _require_same(target, size, checksum)
                    return _blob(name, target)
                file.flush()
                # Until the clock has ticked:
                while str(os.fstat(file.fileno()).st_mtime_ns) == overwrite:
                    os.utime(file.fileno())
            try:
                publish(file, target, overwrite=bool(overwrite))
            except FileExistsError:
                _require_same(target, size, checksum)
            return _blob(name, target)

    def _below(self, start: Path) -> Iterator[BlobInfo]:
        def fail(error: OSError) -> None:
            # A folder that is removed while it is listed, or a prefix below a file, holds nothing.
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        for folder, folders, files in os.walk(start, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._root).as_posix()
                if not _is_hidden(name) and path.is_file():  # it may have been removed since
                    yield _blob(name, path)

    def _path(self, name: str) -> Path:
        path = self._root / checked_name(name, where=self.url)
        real = Path(os.path.realpath(path))  # Path.resolve raises on a loop before Python 3.13
        if not real.is_relative_to(os.path.realpath(self._root)):
            raise BucketError(
                f"{path} is a link to {real}, outside the folder {self.url}. "
                "Replace the link by the file itself, or use the folder that holds the file."
            )
        return path

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not path.is_file():
            text = "there is no such object. Check the name against the folder's files."
            raise BucketError(f"{path}: {text}")
        return path


def _is_hidden(name: str) -> bool:
    return name.endswith(PART_SUFFIX) or any(part.startswith(".") for part in name.split("/"))


def _blob(name: str, path: Path) -> BlobInfo:
    with disk_errors(path):
        found = path.stat()
    return BlobInfo(name=name, size=found.st_size, generation=str(found.st_mtime_ns))


def _require_same(target: Path, size: int, checksum: int) -> None:
    with disk_errors(target):
        there = target.stat().st_size, crc32c_of(target)
    require_same(str(target), there=there, here=(size, checksum))


@contextlib.contextmanager
def _temporary(target: Path, *, needed_bytes: int) -> Iterator[BinaryIO]:
    """Open a hidden, locked file beside `target`, and remove that name in the end."""
    with disk_errors(target, needed_bytes=needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        require_space(target.parent, needed_bytes=needed_bytes)
        path = target.with_name(f"{_UPLOAD}{os.urandom(16).hex()}{PART_SUFFIX}")
        try:
            with path.open("xb") as file:
                with contextlib.suppress(OSError):  # a network disk without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        finally:
            path.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the hidden files of writers that were killed: nothing holds their locks.

    An empty one may be that of a writer that has not locked it yet. Where there are no locks,
    all stay.
    """
    for path in folder.glob(f"{_UPLOAD}*{PART_SUFFIX}"):
        with contextlib.suppress(OSError), path.open("r+b") as file:  # gone, or held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                path.unlink()
