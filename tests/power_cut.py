"""Simulate deaths: a process that ends at a file-system call, and a disk that loses power."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.utime"}
_left: int | None = None  # changes of files before this process "dies"; None: it does not
_is_watching = False


class Killed(BaseException):
    """The process is dead: each further change of a file raises this, too."""


def _before_a_change(event: str = "os.fsync", arguments: tuple[Any, ...] = ()) -> None:
    global _left
    if _left is None or not (event in CHANGES or event in ("os.fsync", "open")):
        return
    if event == "open" and not (arguments[2] or 0) & (os.O_ACCMODE | os.O_CREAT):
        return  # to read
    if _left == 0:
        raise Killed(f"{event} {arguments[:1]}")
    _left -= 1


@contextlib.contextmanager
def killed_at(change: int | None) -> Iterator[None]:
    """Kill what runs in this context at a change of a file, counted from 0, in any thread."""
    global _is_watching, _left
    if not _is_watching:  # a hook cannot be removed
        sys.addaudithook(_before_a_change)
    _is_watching, _left = True, change
    try:
        yield
    finally:
        _left = None


class Disk:
    """Watches `fsync` and renames; `cut` leaves files as a power cut might.

    New names survive a cut, but content only up to the file's last `fsync`; the rest becomes
    zeros. `exposed` are the names given, by a rename or a link, to files (or folders of files)
    with bytes not yet flushed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exposed: list[Path] = []
        self._synced: dict[int, bytes] = {}
        fsync = os.fsync

        def watched_fsync(descriptor: int) -> None:
            _before_a_change()
            fsync(descriptor)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
                self._synced[status.st_ino] = content

        monkeypatch.setattr(os, "fsync", watched_fsync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def cut(self, folder: Path, *, spared: str = "") -> None:
        """Lose the unflushed content of files below a folder, except those ending in `spared`."""
        for path in folder.rglob("*"):
            if path.is_file() and not (spared and path.name.endswith(spared)):
                path.write_bytes(self._on_disk(path))

    def _watched(self, give_name: Any) -> Any:
        def watched(source: Any, target: Any, **options: Any) -> None:
            path = Path(source)
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            if any(self._on_disk(path) != path.read_bytes() for path in files):
                self.exposed.append(Path(target))
            give_name(source, target, **options)

        return watched

    def _on_disk(self, path: Path) -> bytes:
        status = path.stat()
        synced = self._synced.get(status.st_ino, b"")
        return synced[: status.st_size].ljust(status.st_size, b"\0")
