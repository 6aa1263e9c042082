"""Copy a checkpoint to the bucket or from it: verified, and visible only once it is whole."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, crc32c_of, extended_crc32c, stored_crc32c
from refocused.bucket.transfer import Progress, download_many
from refocused.checkpoints.mirror.remote_checkpoints import (
    RemoteCheckpoints,
    missing_files,
    object_problem,
)
from refocused.checkpoints.step import staging
from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    PART,
    Checkpoint,
    Part,
    in_use,
    read_checkpoint,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, Marker, parse_marker
from refocused.checkpoints.step.verify import FileProblem, describe, verify
from refocused.system.atomic_files import fsync_directories, replace_file
from refocused.system.errors import (
    BucketError,
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
    counted,
)
from refocused.system.locks import FileLock

logger = logging.getLogger(__name__)

LOCK_SECONDS = 900.0  # longest wait for another process's download into the same folder
POLL_SECONDS = 0.5
REPORT_SECONDS = 1.0


def verify_remote(remote: RemoteCheckpoints, name: str, *, deep: bool) -> list[FileProblem]:
    """Compare the objects of a checkpoint with its marker and manifest; return all problems.

    Sizes come from the listing, and so do checksums in stores that keep them. In a folder, which
    keeps none, the objects are read if `deep`. Before the marker is written, objects may be
    missing.
    """
    objects = remote.objects(name)
    committed = COMMITTED in objects
    if MANIFEST not in objects:
        return [FileProblem(MANIFEST, "is missing")] if committed else []
    problems, read_last = list[FileProblem](), COMMITTED
    try:
        remote.marker(name)
        read_last = MANIFEST
        manifest = remote.manifest(name)
    except CheckpointError as error:
        return [FileProblem(read_last, f"is unusable: {error}")]
    for file, record in manifest.files.items():
        if (blob := objects.get(file)) is not None and deep and blob.size == record.size:
            blob = dataclasses.replace(blob, crc32c=stored_crc32c(remote.bucket, blob))
        problem = object_problem(blob, record)
        if problem is not None and (committed or blob is not None):
            problems.append(FileProblem(file, problem))
    foreign = set(objects) - {*manifest.files, MANIFEST, COMMITTED}
    problems += [FileProblem(file, "exists but is not in the manifest") for file in foreign]
    return sorted(problems, key=lambda problem: problem.file)


def marker_of(checkpoint: Checkpoint) -> Marker:
    """Return the marker of a local checkpoint."""
    return checkpoint.manifest.marker(crc32c_of(checkpoint.path / MANIFEST))


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointCopier:
    """Copies checkpoints to a bucket, several files in parallel."""

    remote: RemoteCheckpoints
    stopping: Callable[[], bool]  # once it returns True, no further upload is started
    report: Callable[[int, int], None]  # called every second: bytes in the bucket, bytes in all
    threads: int = 4

    def copy(self, checkpoint: Checkpoint) -> bool:
        """Copy a checkpoint unless the bucket has it; return whether the bucket has all of it.

        The manifest is written first, so that an interrupted copy can be continued. The marker is
        written last, if a new listing is complete and the checkpoint has not been removed.

        If each machine has a part, node 0 writes the manifest and the marker, and the others copy
        their parts in between. Returns False instead of waiting for another machine; call again.

        Raises:
            CheckpointError: The local checkpoint is corrupt or removed, or the bucket has another
                one of this name.
            BucketError: The bucket cannot be read or written.
        """
        name, is_first = checkpoint.name, checkpoint.part is None or checkpoint.part.node == 0
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(in_use(checkpoint.path))
            except FileNotFoundError:
                raise _removed(checkpoint) from None
            content, objects = (checkpoint.path / MANIFEST).read_bytes(), self.remote.objects(name)
            crc32c = extended_crc32c(0, content)
            if COMMITTED in objects and (marker := self.remote.marker(name)) is not None:
                if marker != checkpoint.manifest.marker(crc32c):
                    raise self._another(checkpoint)
                committed = (checkpoint.path / COMMITTED).read_bytes()
                # A validation may have been added to the local marker since the copy.
                if b"\n" in committed and committed != self.remote.committed(name):
                    self.remote.commit(name, committed, overwrite=True)
                return True
            listed = objects.get(MANIFEST)
            is_started = (
                listed is not None
                and listed.crc32c in (None, crc32c)
                and self.remote.bucket.read(listed.name) == content
            )
            if not is_started:
                if not is_first:
                    return False
                if objects:  # of an interrupted copy of another save
                    with contextlib.suppress(CorruptCheckpointError):
                        run_ids = "", checkpoint.manifest.run_id
                        if listed and self.remote.manifest(name).run_id not in run_ids:
                            raise self._another(checkpoint)
                    self.remote.retract(name, also=checkpoint.manifest.files)
                    objects = {}
                self.remote.bucket.write(self.remote.object_name(name, MANIFEST), content)
            if not self._send_missing(checkpoint, objects) or not is_first:
                return False
            files, objects = checkpoint.manifest.files, self.remote.objects(name)
            missing, listed = sorted(missing_files(files, objects)), objects.get(MANIFEST)
            if set(missing) - set(checkpoint.own_files):
                return False
            if missing or listed is None or listed.crc32c not in (None, crc32c):
                raise BucketError(
                    f"{self.remote.url}/{name}/{[*missing, MANIFEST][0]} was changed or removed "
                    f"after its upload ({max(len(missing), 1):,} such objects). Another program "
                    "writes to this prefix. The objects are uploaded again."
                )
            if not checkpoint.path.exists():
                raise _removed(checkpoint)
            self.remote.commit(name, (checkpoint.path / COMMITTED).read_bytes())
            return True

    def repair(self, checkpoint: Checkpoint, damaged: Collection[str]) -> bool:
        """Delete the `damaged` files of a copy, which `verify_remote` found, and `copy` again."""
        name, remote = checkpoint.name, self.remote
        content = (checkpoint.path / MANIFEST).read_bytes()
        address = remote.object_name(name, MANIFEST)
        # Marker or manifest may be damaged, but the copy must be one of this save.
        marker = None
        with contextlib.suppress(CheckpointError):
            marker = remote.marker(name)
        if marker is not None:
            is_this_save = marker == marker_of(checkpoint)
        else:
            is_listed = remote.bucket.info(address) is not None
            is_this_save = is_listed and remote.bucket.read(address) == content
        if is_this_save:
            remote.unmark(name)
            for file in set(damaged) & {*checkpoint.manifest.files, MANIFEST}:
                remote.bucket.delete(remote.object_name(name, file))
            remote.bucket.write(address, content, overwrite=True)
        return self.copy(checkpoint)

    def _another(self, checkpoint: Checkpoint) -> CheckpointError:
        """Return the error for another checkpoint of this name in the bucket."""
        other = self.remote.manifest(checkpoint.name)
        return CheckpointError(
            f"{self.remote.url}/{checkpoint.name} is another checkpoint, of run {other.run} "
            f"{other.run_id}, saved {other.created.isoformat()}. It is not overwritten. Set "
            "another run.name or checkpoint.mirror, or remove that one."
        )

    def _send_missing(self, checkpoint: Checkpoint, objects: dict[str, BlobInfo]) -> bool:
        """Upload this machine's files that the bucket lacks; return False if stopped."""
        files = checkpoint.own_files
        missing = missing_files(files, objects)
        for file in missing:
            if file in objects:
                self.remote.bucket.delete(objects[file].name)
        total = sum(record.size for record in files.values())
        done = total - sum(files[file].size for file in missing)
        self.report(done, total)
        pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        sending = {pool.submit(self._send, checkpoint, file): file for file in missing}
        complete = True
        try:
            while sending:
                ready, _ = concurrent.futures.wait(sending, timeout=REPORT_SECONDS)
                for future in ready:
                    size, sent = files[sending.pop(future)].size, future.result()
                    done += size if sent else 0
                    complete = complete and sent
                self.report(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
        return complete

    def _send(self, checkpoint: Checkpoint, file: str) -> bool:
        if self.stopping():
            return False
        problems = verify(checkpoint, deep=True, files=[file])
        if problems:
            if not checkpoint.path.exists():
                raise _removed(checkpoint)
            raise CheckpointError(
                f"{checkpoint.path} is corrupt: {describe(problems)}. It is not copied to the "
                "bucket. Remove it, or check the disk."
            )
        name = self.remote.object_name(checkpoint.name, file)
        self.remote.bucket.upload(
            checkpoint.path / file, name, crc32c=checkpoint.manifest.files[file].crc32c
        )
        return True


def _removed(checkpoint: Checkpoint) -> CheckpointError:
    text = f"{checkpoint.path} was removed while it was copied. The copy is not committed."
    return CheckpointError(text)


def fetch_checkpoint(
    remote: RemoteCheckpoints,
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
        raise CheckpointError(
            f"{remote.url}/{name} has no {COMMITTED} object: its upload never finished. "
            f"{CHOOSE_ANOTHER}"
        )
    marker = parse_marker(committed, where=f"{remote.url}/{name}/{COMMITTED}")

    def corrupt(what: str) -> CorruptCheckpointError:
        text = f"{remote.url}/{name} is marked {COMMITTED} but corrupt: {what}. {CHOOSE_ANOTHER}"
        return CorruptCheckpointError(text)

    checkpoints.mkdir(parents=True, exist_ok=True)
    lock, final = FileLock(checkpoints / staging.FETCH_LOCK), checkpoints / name
    began, waited = time.monotonic(), False
    while not lock.acquire():
        if not waited:
            text = "Another process is downloading a checkpoint into %s. Waiting up to %.0f min."
            logger.warning(text, checkpoints, LOCK_SECONDS / 60)
        waited = True
        if time.monotonic() >= began + LOCK_SECONDS:
            raise CheckpointUnavailableError(
                f"Another process has been downloading a checkpoint into {checkpoints} for "
                f"{LOCK_SECONDS / 60:.0f} min. Start again when it has finished, or stop it."
            )
        time.sleep(POLL_SECONDS)
    try:
        if waited and is_copy_of(final, marker):
            return read_checkpoint(final)
        hidden = f"{staging.STAGING_PREFIX}{name.replace('/', '-')}{staging.FETCH_SUFFIX}"
        stage = checkpoints / hidden
        objects = remote.objects(name)
        if MANIFEST not in objects:
            raise corrupt(f"{MANIFEST} is missing")
        inner, crc32c = stage / remote.object_name(name, ""), marker.manifest_crc32c
        inner.mkdir(parents=True, exist_ok=True)
        manifest = inner / MANIFEST
        if not manifest.exists() or crc32c_of(manifest) != crc32c:
            downloaded = remote.bucket.download(objects[MANIFEST], manifest)
            if downloaded != crc32c:
                manifest.unlink()
                raise corrupt(
                    f"{MANIFEST} has CRC-32C {downloaded:08x}, but {COMMITTED} says "
                    f"{crc32c:08x}: the marker belongs to other files"
                )
        replace_file(inner / COMMITTED, committed, durable=True)
        if part is None:
            (inner / PART).unlink(missing_ok=True)
        else:
            replace_file(inner / PART, part.model_dump_json().encode(), durable=True)
        checkpoint = read_checkpoint(inner)
        if missing := sorted(missing_files(checkpoint.manifest.files, objects)):
            count = counted(len(missing), "such file")
            raise corrupt(f"{missing[0]} is missing, truncated or changed ({count})")
        blobs = [
            objects[problem.file]
            for problem in verify(checkpoint, deep=True, files=checkpoint.files)
        ]
        download_many(remote.bucket, blobs, stage, threads=threads, progress=progress)
        if problems := verify(checkpoint, deep=True):
            for problem in problems:
                if (checkpoint.path / problem.file).is_file():
                    (checkpoint.path / problem.file).unlink()
            raise corrupt(describe(problems))
        fsync_directories(stage)
        if final.exists():  # an intact one, of other bytes, may be the only copy of its save
            (staging.set_aside if _is_intact(final) else staging.remove_checkpoint)(final)
        staging.install(checkpoint.path, final)
        shutil.rmtree(stage)
        return Checkpoint(final, checkpoint.manifest, checkpoint.part)
    finally:
        lock.release()


def is_copy_of(path: Path, marker: Marker | None) -> bool:
    """Whether a directory is an intact copy, or part, of the checkpoint with this marker."""
    if marker is None or not (path / MANIFEST).exists():
        return False
    return crc32c_of(path / MANIFEST) == marker.manifest_crc32c and _is_intact(path)


def _is_intact(path: Path) -> bool:
    try:
        return not verify(read_checkpoint(path), deep=True)
    except CorruptCheckpointError:
        return False
