"""Create and remove checkpoints atomically: under a hidden name, with one rename."""

import contextlib
import logging
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from refocused.bucket.bucket import crc32c_of, extended_crc32c
from refocused.checkpoints.step.checkpoint_directory import PART, Checkpoint, Part, parse_name
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    FileRecord,
)
from refocused.checkpoints.step.verify import describe, require_content, verify
from refocused.system.atomic_files import fsync_directories, fsync_path, rename, write_flushed
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.locks import FileLock

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".tmp-"
REMOVAL_PREFIX = ".del-"
BAD_PREFIX = ".bad-"
FETCH_SUFFIX = "-fetch"
FETCH_LOCK = ".fetch.lock"  # held by the download that writes into a `-fetch` directory


class Staging:
    """The hidden directory that a checkpoint is written to before it is published.

    Every rank constructs it from the same arguments; one rank per disk creates and publishes it.
    """

    def __init__(
        self, checkpoints: Path, *, name: str, token: str, part: Part | None = None
    ) -> None:
        self.part = part
        self.final = checkpoints / name
        self.path = checkpoints / f"{STAGING_PREFIX}{self.final.name}-{token}"
        self._published = False

    def create(self) -> None:
        """Create the directory and its sub-folders."""
        for folder in ("zero", "ranks"):
            (self.path / folder).mkdir(parents=True)

    def describe(self, contents: Mapping[str, bytes], *, node: int) -> dict[str, FileRecord]:
        """Write the descriptions, by name; return the records of all top-level files."""
        for name, content in contents.items():
            (self.path / name).write_bytes(content)
        return self._flushed(self.path.iterdir(), node)

    def unlisted(self, listed: Collection[str], *, node: int) -> dict[str, FileRecord]:
        """Flush the files that no rank has listed; return their records."""
        paths = self.path.rglob("*")
        return self._flushed((path for path in paths if self._name(path) not in listed), node)

    def read_back(self, names: Iterable[str], *, rank: int) -> None:
        """Open the files that a rank wrote as a resume will; raise the first error."""
        try:
            for name in names:
                require_content(self.path / name, name, step=parse_name(self.final.name) or 0)
        except CheckpointError as error:
            what = f"{self.final.name} was not saved: files of rank {rank} cannot be read back"
            raise type(error)(f"{what}: {error}") from error

    def seal(self, manifest: CheckpointManifest) -> None:
        """Write the manifest and then its marker; all other files have been flushed.

        Raises CheckpointError, and keeps the staging directory, if a checkpoint of that name
        exists, or a file of the manifest is missing or has another size.
        """
        if self.final.exists():
            raise CheckpointError(
                f"{self.final} already exists, and checkpoints are never overwritten. "
                "Remove it, or give the run another name (run.name=...)."
            )
        problems = verify(Checkpoint(self.path, manifest, self.part), deep=False)
        if problems:
            raise CheckpointError(
                f"Step {manifest.step} was not saved completely: {describe(problems)}. "
                "Check the disk's space and the errors of each rank above."
            )
        if self.part is not None:
            write_flushed(self.path / PART, self.part.model_dump_json().encode())
        write_manifest(self.path, manifest)
        fsync_directories(self.path)

    def publish(self, manifest: CheckpointManifest) -> Checkpoint:
        """Rename a sealed directory to its final name."""
        install(self.path, self.final)
        self._published = True
        return Checkpoint(self.final, manifest, self.part)

    def discard(self) -> None:
        """Remove the staging directory, or the checkpoint if another machine failed to publish.

        Errors are ignored; `clean_leftovers` removes what is left.
        """
        if self._published:
            with contextlib.suppress(OSError):
                remove_checkpoint(self.final)
        shutil.rmtree(self.path, ignore_errors=True)

    def failure(self, error: OSError) -> CheckpointError:
        """Return the error for a failed write, with the free space of the disk."""
        return CheckpointError(
            f"{self.final.name} was not saved: {error.strerror or error} "
            f"({error.filename or self.path}; {_free_space(self.path.parent, besides=self.path)}). "
            "Its files are removed. Make room on that disk, or lower checkpoint.keep."
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


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, and then the marker, of a directory without a marker."""
    content = manifest.to_json()
    write_flushed(path / MANIFEST, content)
    marker = manifest.marker(extended_crc32c(0, content))
    write_flushed(path / COMMITTED, marker.to_json())


def install(path: Path, final: Path) -> None:
    """Rename a complete, flushed directory to its final name."""
    if not final.parent.exists():  # first checkpoint of a branch
        final.parent.mkdir()
        fsync_path(final.parent.parent)
    rename(path, final)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: rename it first, so that it is never seen half removed."""
    to_delete = set_aside(path, prefix=REMOVAL_PREFIX)
    with contextlib.suppress(FileNotFoundError):  # a starting run may clean up at the same time
        shutil.rmtree(to_delete)


def set_aside(path: Path, *, prefix: str = BAD_PREFIX) -> Path:
    """Rename a corrupt checkpoint so that it is not used; return its new path."""
    return rename(path, path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}"))


def leftovers(checkpoints: Path) -> list[Path]:
    """Return the directories of unfinished saves, downloads and removals."""
    return _named(checkpoints, (STAGING_PREFIX, REMOVAL_PREFIX))


def checkpoints_set_aside(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that were set aside."""
    return _named(checkpoints, (BAD_PREFIX,))


def _named(checkpoints: Path, prefixes: tuple[str, ...]) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    folders = [checkpoints, *checkpoints.glob("branch-*")]
    paths = (path for folder in folders for path in folder.iterdir())
    return sorted(path for path in paths if path.name.startswith(prefixes))


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder, of which some may be removed meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def clean_leftovers(checkpoints: Path) -> list[Path]:
    """Remove the directories of killed saves, downloads and removals; return what was removed.

    The caller holds the run's lock and no save is in progress. Downloads have their own lock.
    """
    paths, lock = leftovers(checkpoints), FileLock(checkpoints / FETCH_LOCK)
    if any(path.name.endswith(FETCH_SUFFIX) for path in paths) and not lock.acquire():
        paths = [path for path in paths if not path.name.endswith(FETCH_SUFFIX)]
    try:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.release()
    return [path for path in paths if not path.exists()]


def _free_space(checkpoints: Path, *, besides: Path | None = None) -> str:
    """Describe the free space of the disk, and the leftovers (other than `besides`) on it."""
    try:
        text = f"{shutil.disk_usage(checkpoints).free / 1e9:.2f} GB free"
    except OSError:
        return "free space unknown"
    if left := [path for path in leftovers(checkpoints) if path != besides]:
        text += (
            f"; {sum(map(bytes_below, left)) / 1e9:.2f} GB are used by killed saves and removals"
        )
        text += f" that could not be cleaned up: {', '.join(path.name for path in left)}"
    return text


def require_room(checkpoints: Path, *, needed: int, outcome: str) -> None:
    """Raise CheckpointError, which begins with `outcome`, unless a save of `needed` bytes fits."""
    if shutil.disk_usage(checkpoints).free < needed:
        raise CheckpointError(
            f"{outcome}: {checkpoints} has {_free_space(checkpoints)}, and a save needs about "
            f"{needed / 1e9:.2f} GB. Make room, lower checkpoint.keep, or set run.directory to a "
            "folder on another disk."
        )


def prepare_folder(checkpoints: Path, *, least_bytes: int) -> None:
    """Clean a folder; raise ConfigError if it is not writable or has no room for a first save.

    The caller holds the run's lock.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        removed = clean_leftovers(checkpoints)
        probe = checkpoints / ".probe"
        write_flushed(probe, b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"No checkpoint could be saved: {checkpoints} is not writable ({error.strerror}). "
            "Training has not started. Make it writable, or set run.directory to a folder on "
            "another disk."
        ) from error
    if removed:
        names = ", ".join(path.name for path in removed)
        logger.info("  removed  %s: unfinished saves, downloads or removals", names)
    has_some = any(checkpoints.glob("**/checkpoint_step_*"))
    outcome = "The next save has no room" if has_some else "Training has not started"
    try:
        require_room(checkpoints, needed=least_bytes, outcome=outcome)
    except CheckpointError as error:
        if not has_some:
            raise ConfigError(f"No checkpoint could be saved. {error}") from None
        logger.warning("%s Until then retention removes all checkpoints it can.", error)
