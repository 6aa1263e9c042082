"""Download a committed checkpoint from a bucket, verified and all or nothing."""

import logging
import shutil
import time
from pathlib import Path

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.transfer import Progress, download_many
from refocused.checkpoints.mirror.remote_steps import RemoteSteps, missing_files
from refocused.checkpoints.step import staging
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, Marker, parse_marker
from refocused.checkpoints.step.step_directory import (
    CHOOSE_ANOTHER,
    PART,
    Checkpoint,
    Part,
    read_step,
)
from refocused.checkpoints.step.verify import describe, verify
from refocused.system import errors
from refocused.system.atomic_files import fsync_directories, replace_file
from refocused.system.errors import counted
from refocused.system.locks import FileLock

logger = logging.getLogger(__name__)

LOCK_SECONDS = 900.0  # longest wait for another process's download into the same folder
POLL_SECONDS = 0.5


def fetch_step(
    remote: RemoteSteps,
    name: str,
    *,
    checkpoints: Path,
    part: Part | None = None,
    threads: int = 8,
    progress: Progress | None = None,
) -> Checkpoint:
    """Download a committed checkpoint, or a part of it; replace a directory of that name.

    Files of an interrupted download are reused if their checksums are right. The directory gets
    its final name once every file matches the manifest.

    Raises:
        CorruptCheckpointError: Its marker or its objects do not match its manifest.
        CheckpointError: It is not committed, or another process has been downloading into the same
            folder for `LOCK_SECONDS`.
        BucketError: The bucket cannot be read, or the disk has no room.
    """
    committed = remote.committed(name)
    if committed is None:
        raise errors.CheckpointError(
            f"{remote.url}/{name} has no {COMMITTED} object: its upload never finished. "
            f"{CHOOSE_ANOTHER}"
        )
    marker = parse_marker(committed, where=f"{remote.url}/{name}/{COMMITTED}")
    checkpoints.mkdir(parents=True, exist_ok=True)
    lock, final = FileLock(checkpoints / staging.FETCH_LOCK), checkpoints / name
    waited = _wait_for(lock, checkpoints)
    try:
        if waited and is_copy_of(final, marker):
            return read_step(final)
        stage = (
            checkpoints / f"{staging.STAGING_PREFIX}{name.replace('/', '-')}{staging.FETCH_SUFFIX}"
        )
        objects = remote.objects(name)
        if MANIFEST not in objects:
            raise _broken(remote, name, f"{MANIFEST} is missing")
        inner, crc32c = stage / remote.object_name(name, ""), marker.manifest_crc32c
        inner.mkdir(parents=True, exist_ok=True)
        manifest = inner / MANIFEST
        if not manifest.exists() or crc32c_of(manifest) != crc32c:
            found = remote.bucket.download(objects[MANIFEST], manifest)
            if found != crc32c:
                manifest.unlink()
                raise errors.CorruptCheckpointError(
                    f"{remote.url}: {objects[MANIFEST].name} has CRC-32C {found:08x}, but "
                    f"{COMMITTED} says {crc32c:08x}: the marker belongs to other files. "
                    f"{CHOOSE_ANOTHER}"
                )
        replace_file(inner / COMMITTED, committed, durable=True)
        if part is None:
            (inner / PART).unlink(missing_ok=True)
        else:
            replace_file(inner / PART, part.model_dump_json().encode(), durable=True)
        step = read_step(inner)
        if lost := sorted(missing_files(step.manifest.files, objects)):
            what = f"{lost[0]} is missing, truncated or changed ({counted(len(lost), 'such file')})"
            raise _broken(remote, name, what)
        wanted = [objects[problem.file] for problem in verify(step, deep=True, files=step.files)]
        download_many(remote.bucket, wanted, stage, threads=threads, progress=progress)
        if problems := verify(step, deep=True):
            for problem in problems:
                if (step.path / problem.file).is_file():
                    (step.path / problem.file).unlink()
            raise _broken(remote, name, describe(problems))
        fsync_directories(stage)
        if final.exists():  # an intact one, of other bytes, may be the only copy of its save
            (staging.set_aside if _is_intact(final) else staging.remove_step)(final)
        staging.install(step.path, final)
        shutil.rmtree(stage)
        return Checkpoint(final, step.manifest, step.part)
    finally:
        lock.release()


def _wait_for(lock: FileLock, checkpoints: Path) -> bool:
    """Acquire a lock; return whether another process held it."""
    if lock.acquire():
        return False
    logger.warning(
        "Another process is downloading a checkpoint into %s. Waiting up to %.0f min.",
        checkpoints,
        LOCK_SECONDS / 60,
    )
    until = time.monotonic() + LOCK_SECONDS
    while not lock.acquire():
        if time.monotonic() >= until:
            raise errors.CheckpointUnavailableError(
                f"Another process has been downloading a checkpoint into {checkpoints} for "
                f"{LOCK_SECONDS / 60:.0f} min. Start again when it has finished, or stop it."
            )
        time.sleep(POLL_SECONDS)
    return True


def is_copy_of(path: Path, marker: Marker | None) -> bool:
    """Whether a directory is an intact copy, or part, of the checkpoint with this marker."""
    if marker is None or not (path / MANIFEST).exists():
        return False
    return crc32c_of(path / MANIFEST) == marker.manifest_crc32c and _is_intact(path)


def _is_intact(path: Path) -> bool:
    try:
        return not verify(read_step(path), deep=True)
    except errors.CorruptCheckpointError:
        return False


def _broken(remote: RemoteSteps, name: str, what: str) -> errors.CheckpointError:
    return errors.CorruptCheckpointError(
        f"{remote.url}/{name} is marked {COMMITTED} but corrupt: {what}. {CHOOSE_ANOTHER}"
    )
