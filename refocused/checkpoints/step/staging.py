"""How a step is created and removed: under a hidden name, and in one rename."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from refocused.bucket.bucket import crc32c_of, extended_crc32c
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    FileRecord,
)
from refocused.checkpoints.step.step_directory import PART, Part, StepDirectory, parse_name
from refocused.checkpoints.step.verify import describe, require_content, verify
from refocused.system.atomic_files import fsync_directories, fsync_path
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.locks import FileLock

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".tmp-"
REMOVAL_PREFIX = ".del-"
SUPERSEDED_PREFIX = "superseded-"  # of version 0.1
BAD_PREFIX = ".bad-"
FETCH_SUFFIX = "-fetch"
FETCH_LOCK = ".fetch.lock"  # held by the download that writes into such a directory


class Staging:
    """The hidden directory that a step is written to before it exists.

    Every rank builds it from the same arguments; one rank on each disk creates and commits it.
    """

    def __init__(
        self, checkpoints: Path, *, name: str, token: str, part: Part | None = None
    ) -> None:
        self.part = part
        self.final = checkpoints / name
        self.path = checkpoints / f"{STAGING_PREFIX}{self.final.name}-{token}"
        self._published = False

    def create(self) -> None:
        """Make the directory and the folders in it."""
        for folder in ("zero", "ranks"):
            (self.path / folder).mkdir(parents=True)

    def describe(self, contents: Mapping[str, bytes], *, node: int) -> dict[str, FileRecord]:
        """Write the step's descriptions by name; return all files beside the ranks' folders."""
        for name, content in contents.items():
            (self.path / name).write_bytes(content)
        return self._flushed(self.path.iterdir(), node)

    def unlisted(self, listed: Collection[str], *, node: int) -> dict[str, FileRecord]:
        """Flush and return the files that no rank has listed."""
        paths = self.path.rglob("*")
        return self._flushed((path for path in paths if self._name(path) not in listed), node)

    def read_back(self, names: Iterable[str], *, rank: int) -> CheckpointError | None:
        """Open files that a rank wrote as a resume will; return what is wrong with one."""
        try:
            for name in names:
                require_content(self.path / name, name, step=parse_name(self.final.name) or 0)
        except CheckpointError as error:
            return type(error)(
                f"{self.final.name} was not saved, since what rank {rank} wrote cannot be read "
                f"back: {error}"
            )
        return None

    def seal(self, manifest: CheckpointManifest) -> None:
        """Write the manifest and then its marker; the writers have flushed the files.

        Raises CheckpointError when a step of that name exists already, or a file of the manifest is
        absent or has another size; the staging directory stays.
        """
        if self.final.exists():
            raise CheckpointError(
                f"{self.final} exists already and a saved step is never rewritten. "
                "Remove it, or give the run another name (run.name=...)."
            )
        problems = verify(StepDirectory(self.path, manifest, self.part), deep=False)
        if problems:
            raise CheckpointError(
                f"Step {manifest.step} was not saved whole: {describe(problems)}. "
                "Look at the disk's space and at the errors of each rank above."
            )
        if self.part is not None:
            _write_flushed(self.path / PART, self.part.model_dump_json().encode())
        write_manifest(self.path, manifest)
        fsync_directories(self.path)

    def publish(self, manifest: CheckpointManifest) -> StepDirectory:
        """Give a sealed directory its final name, in one rename."""
        install(self.path, self.final)
        self._published = True
        return StepDirectory(self.final, manifest, self.part)

    def discard(self) -> None:
        """Remove what was written: hidden, or published where another machine could not do it too.

        What a failing disk keeps stays a leftover, which `clean_leftovers` removes.
        """
        if self._published:
            with contextlib.suppress(OSError):
                remove_step(self.final)
        shutil.rmtree(self.path, ignore_errors=True)

    def failure(self, error: OSError) -> CheckpointError:
        """Return the error of a save that the disk refused, with the room left on it."""
        return CheckpointError(
            f"{self.final.name} was not saved: {error.strerror or error} "
            f"({error.filename or self.path}; {_room_left(self.path.parent, besides=self.path)}). "
            "What was written of it is removed. Make room on that disk, or lower checkpoint.keep."
        )

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _flushed(self, paths: Iterable[Path], node: int) -> dict[str, FileRecord]:
        records = {}
        for path in sorted(path for path in paths if path.is_file()):
            fsync_path(path)
            size, crc32c = path.stat().st_size, crc32c_of(path)
            records[self._name(path)] = FileRecord(size=size, crc32c=crc32c, node=node)
        return records


def _write_flushed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync_path(path)


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest of a directory that has no marker, and then the marker."""
    content = manifest.to_json()
    _write_flushed(path / MANIFEST, content)
    marker = manifest.marker(extended_crc32c(0, content))
    _write_flushed(path / COMMITTED, marker.to_json())


def install(path: Path, final: Path) -> None:
    """Give a complete directory, whose files are flushed, its final name in one rename."""
    if not final.parent.exists():  # of a branch: this is its first checkpoint
        final.parent.mkdir()
        fsync_path(final.parent.parent)
    path.rename(final)
    fsync_path(final.parent)


def _renamed(path: Path, prefix: str) -> Path:
    """Give a step directory a name that nothing reads."""
    hidden = path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}")
    path.rename(hidden)
    fsync_path(path.parent)
    return hidden


def remove_step(path: Path) -> None:
    """Remove a step directory: first its name, in one rename, then its bytes."""
    doomed = _renamed(path, REMOVAL_PREFIX)
    with contextlib.suppress(FileNotFoundError):  # a start may clean up at the same time
        shutil.rmtree(doomed)


def set_aside(path: Path) -> Path:
    """Rename a corrupt checkpoint so that nothing reads it; return its new path."""
    return _renamed(path, BAD_PREFIX)


def leftovers(checkpoints: Path) -> list[Path]:
    """Return every directory of a save, download or removal, killed or under way."""
    return _named(checkpoints, (STAGING_PREFIX, REMOVAL_PREFIX))


def steps_set_aside(checkpoints: Path) -> list[Path]:
    """Return every step directory that was set aside; nothing reads them."""
    return _named(checkpoints, (SUPERSEDED_PREFIX, BAD_PREFIX))


def _named(checkpoints: Path, prefixes: tuple[str, ...]) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    folders = [checkpoints, *checkpoints.glob("branch-*")]
    paths = (path for folder in folders for path in folder.iterdir())
    return sorted(path for path in paths if path.name.startswith(prefixes))


def bytes_below(folder: Path) -> int:
    """Return the bytes of the files in a folder; other processes may remove some meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def clean_leftovers(checkpoints: Path) -> list[Path]:
    """Remove what killed saves, downloads and removals left; return what was removed.

    The caller holds the run's lock and saves nothing at the moment, so that no save or removal of
    the run is going on. A download has a lock of its own.
    """
    found = leftovers(checkpoints)
    fetched = [path for path in found if path.name.endswith(FETCH_SUFFIX)]
    lock = FileLock(checkpoints / FETCH_LOCK)
    if fetched and not lock.acquire():
        found = [path for path in found if path not in fetched]
    try:
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.release()
    return [path for path in found if not path.exists()]


def _room_left(checkpoints: Path, *, besides: Path | None = None) -> str:
    """Say how much room the disk has, and which leftovers (`besides` one) take some of it."""
    try:
        text = f"{shutil.disk_usage(checkpoints).free / 1e9:.2f} GB free"
    except OSError:
        return "room unknown"
    left = [path for path in leftovers(checkpoints) if path != besides]
    if not left:
        return text
    return (
        f"{text}; leftovers of killed saves and removals take "
        f"{sum(map(bytes_below, left)) / 1e9:.2f} GB there and could not be removed: "
        f"{', '.join(path.name for path in left)}"
    )


def lack_of_room(checkpoints: Path, *, needed: int) -> str | None:
    """Say why a save of `needed` bytes does not fit on the disk; None: it may fit."""
    if shutil.disk_usage(checkpoints).free >= needed:
        return None
    return (
        f"{checkpoints} has {_room_left(checkpoints)}, and a save needs about {needed / 1e9:.2f} "
        "GB. Make room, lower checkpoint.keep, or set run.directory to a folder on another disk."
    )


def prepare_folder(checkpoints: Path, *, least_bytes: int) -> None:
    """Clean a folder, and make sure that a first save of at least `least_bytes` can succeed.

    The caller holds the run's lock. Raises ConfigError when nothing could be saved.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        removed = clean_leftovers(checkpoints)
        probe = checkpoints / ".probe"
        _write_flushed(probe, b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"No checkpoint could be saved: {checkpoints} cannot be written ({error.strerror}). "
            "Make it writable, or set run.directory to a folder on another disk. Nothing was "
            "trained."
        ) from error
    if removed:
        names = ", ".join(path.name for path in removed)
        logger.info("  removed  %s: left by killed saves, downloads or removals", names)
    if lack := lack_of_room(checkpoints, needed=least_bytes):
        if not any(checkpoints.glob("**/checkpoint_step_*")):
            raise ConfigError(f"No checkpoint could be saved: {lack} Nothing was trained.")
        logger.warning("%s Until then older steps are removed as far as retention allows.", lack)
