"""Simulate a power cut: a disk loses all content that was not flushed by `fsync`."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest


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
