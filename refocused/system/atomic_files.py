"""Replace files and folders atomically, flush them to the disk, and read files of others."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

MAX_DESCRIPTION_BYTES = 256 * 1024 * 1024  # of a manifest or settings; parsing takes ten times
# Errors of link() on file systems without hard links (exFAT, many FUSE mounts).
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: start writing without waiting for the end


def replace_file(
    path: Path, content: bytes, *, durable: bool = False, concurrent: bool = False
) -> None:
    """Replace a file's content atomically; on an error the old content remains.

    The temporary file is hidden, in the same folder. Its name is fixed, so that the next writer
    overwrites one left by a killed process.

    Args:
        path: The file; its folder must exist.
        durable: On return the new content survives a power cut.
        concurrent: Other processes may replace the file at the same time; the last one wins.
            The temporary name is then another one each time.

    Raises:
        OSError: The disk is full or not writable.
    """
    unique = f".{os.urandom(8).hex()}" if concurrent else ""  # containers share process ids
    path = path.absolute()  # `.` has a name then, and is refused as any folder
    temporary = path.with_name(f".{path.name}{unique}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                publish(file, path)
        if not durable:
            temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def publish(file: BinaryIO | FileIO, path: Path, *, overwrite: bool = True) -> None:
    """Flush an open, written file and give it its final name, which then survives a power cut.

    Without `overwrite`, raise FileExistsError if another file has that name.
    """
    file.flush()
    os.fsync(file.fileno())  # of this descriptor, which reports failed writes
    temporary = Path(file.name)
    if not overwrite:
        try:
            path.hardlink_to(temporary)  # the caller removes the other name
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            overwrite = True
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
    if overwrite:
        temporary.replace(path)
    fsync_path(path.parent)


def rename(path: Path, target: Path) -> Path:
    """Rename a file or folder within its disk, so that the new name survives a power cut."""
    path.rename(target)
    fsync_path(target.parent)
    return target


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file whose name is not yet visible; its bytes then survive a power cut."""
    path.write_bytes(content)
    fsync_path(path)


def write_json_atomic(path: Path, content: object) -> None:
    """Replace a file durably with indented JSON; raise `ValueError` for NaN and infinities."""
    text = json.dumps(content, indent=1, allow_nan=False)
    replace_file(path, (text + "\n").encode(), durable=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a file that somebody else made; raise `OSError` unless it is a regular file.

    A pipe would wait for a writer, and a link to a device such as /dev/zero never ends.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, "not a regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """Read a description that somebody else made; raise `OSError` as `open_regular`, or by size."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_DESCRIPTION_BYTES:
            what = f"{size:,} bytes, more than the {MAX_DESCRIPTION_BYTES:,} of a description"
            raise OSError(errno.EFBIG, what, str(path))
        return file.read()


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a folder's entries (needed after creating a file) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directories(root: Path) -> None:
    """Flush the entries of `root` and of all folders below it, innermost first."""
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(folder))


def start_write_back(descriptor: int, start: int, size: int) -> None:
    """Start to write a range of a file to the disk; errors are reported by a later `fsync`."""
    sync = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux's; Python does not wrap it
    if sync is not None:
        sync(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Rename a finished folder to `folder`, on the same disk, and remove the one it replaces."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a killed replacement
    if folder.exists():
        folder.rename(old)
    rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an immutable file, or copy it where links are not possible."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
        fsync_path(target)
