"""A disk that loses, at a power cut, whatever no `fsync` has pushed to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Watches `fsync` and renames; `cut` leaves files as an unlucky power cut would.

    New names survive a cut here, and the content of files only as their last `fsync` met it: the
    rest reads as zeros, as the holes of a file that was made by `truncate` do.

    Attributes:
        exposed: Names that were given, by a rename or a link, to files (or to folders of files)
            whose bytes the disk lacked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exposed: list[Path] = []
        self._synced: dict[int, bytes] = {}
        fsync = os.fsync

        def watched_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
                self._synced[status.st_ino] = content

        monkeypatch.setattr(os, "fsync", watched_fsync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def cut(self, folder: Path, *, spared: str = "") -> None:
        """Lose what the disk lacks of the files below a folder.

        Args:
            folder: The folder.
            spared: End of the names of files that the kernel happened to have written.
        """
        for path in folder.rglob("*"):
            if path.is_file() and not (spared and path.name.endswith(spared)):
                path.write_bytes(self._on_disk(path))

    def _watched(self, give_name: Any) -> Any:
        def watched(source: Any, target: Any, **options: Any) -> None:
            found = Path(source)
            files = [found] if found.is_file() else [p for p in found.rglob("*") if p.is_file()]
            if any(self._on_disk(path) != path.read_bytes() for path in files):
                self.exposed.append(Path(target))
            give_name(source, target, **options)

        return watched

    def _on_disk(self, path: Path) -> bytes:
        status = path.stat()
        synced = self._synced.get(status.st_ino, b"")
        return synced[: status.st_size].ljust(status.st_size, b"\0")
