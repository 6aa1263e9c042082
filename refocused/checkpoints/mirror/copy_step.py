"""Copy a checkpoint to the bucket, verify the copy, and write its marker last."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator

from refocused.bucket.bucket import BlobInfo, crc32c_of, extended_crc32c, stored_crc32c
from refocused.checkpoints.mirror.remote_steps import RemoteSteps, missing_files, object_problem
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, Marker
from refocused.checkpoints.step.step_directory import Checkpoint, in_use
from refocused.checkpoints.step.verify import FileProblem, describe, verify
from refocused.system.errors import BucketError, CheckpointError, CorruptCheckpointError

REPORT_SECONDS = 1.0


def verify_remote(remote: RemoteSteps, name: str, *, deep: bool) -> list[FileProblem]:
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


def marker_of(step: Checkpoint) -> Marker:
    """Return the marker of a local checkpoint."""
    return step.manifest.marker(crc32c_of(step.path / MANIFEST))


@dataclasses.dataclass(frozen=True, slots=True)
class StepCopier:
    """Copies checkpoints to a bucket, several files in parallel."""

    remote: RemoteSteps
    stopping: Callable[[], bool]  # once it returns True, no further upload is started
    report: Callable[[int, int], None]  # called every second: bytes in the bucket, bytes in all
    threads: int = 4

    def copy(self, step: Checkpoint) -> bool:
        """Copy a checkpoint unless the bucket has it; return whether the bucket has all of it.

        The manifest is written first, so that an interrupted copy can be continued. The marker is
        written last, if a new listing is complete and the checkpoint has not been removed.

        If each machine has a part, node 0 writes the manifest and the marker, and the others copy
        their parts in between. Returns False instead of waiting for another machine; call again.

        Raises:
            CheckpointError: The checkpoint is corrupt or removed here, or the bucket has another
                one of this name.
            BucketError: The bucket cannot be read or written.
        """
        with _held(step):
            name, content = step.name, (step.path / MANIFEST).read_bytes()
            objects = self.remote.objects(name)
            marker = step.manifest.marker(extended_crc32c(0, content))
            if COMMITTED in objects and (there := self.remote.marker(name)) is not None:
                if there == marker:
                    committed = (step.path / COMMITTED).read_bytes()
                    # A validation may have been added to the local marker since the copy.
                    if b"\n" in committed and committed != self.remote.committed(name):
                        self.remote.commit(name, committed, overwrite=True)
                    return True
                raise self._another(step)
            is_first = step.part is None or step.part.node == 0
            if not self._is_started(objects, content):
                if not is_first:
                    return False
                objects = self._start(step, objects, content)
            if not self._send_missing(step, objects) or not is_first:
                return False
            return self._commit(step, marker)

    def repair(self, step: Checkpoint, damaged: Collection[str]) -> bool:
        """Delete the `damaged` files of a copy, which `verify_remote` found, and `copy` again."""
        name, remote = step.name, self.remote
        if self._is_ours(step):
            remote.unmark(name)
            for file in set(damaged) & {*step.manifest.files, MANIFEST}:
                remote.bucket.delete(remote.object_name(name, file))
            content = (step.path / MANIFEST).read_bytes()
            remote.bucket.write(remote.object_name(name, MANIFEST), content, overwrite=True)
        return self.copy(step)

    def _is_ours(self, step: Checkpoint) -> bool:
        """Whether the objects are a copy of this save; marker or manifest may be damaged."""
        with contextlib.suppress(CheckpointError):
            if (there := self.remote.marker(step.name)) is not None:
                return there == marker_of(step)
        manifest, bucket = self.remote.object_name(step.name, MANIFEST), self.remote.bucket
        own = (step.path / MANIFEST).read_bytes()
        return bucket.info(manifest) is not None and bucket.read(manifest) == own

    def _another(self, step: Checkpoint) -> CheckpointError:
        """Return the error for another checkpoint of this name in the bucket."""
        theirs = self.remote.manifest(step.name)
        return CheckpointError(
            f"{self.remote.url}/{step.name} is another checkpoint, of run {theirs.run} "
            f"{theirs.run_id}, saved {theirs.created.isoformat()}. It is not overwritten. Set "
            "another run.name or checkpoint.mirror, or remove that one."
        )

    def _is_started(self, objects: dict[str, BlobInfo], content: bytes) -> bool:
        """Whether the bucket has the manifest of this save."""
        listed = objects.get(MANIFEST)
        if listed is None or listed.crc32c not in (None, extended_crc32c(0, content)):
            return False
        return self.remote.bucket.read(listed.name) == content

    def _start(
        self, step: Checkpoint, objects: dict[str, BlobInfo], content: bytes
    ) -> dict[str, BlobInfo]:
        """Remove an interrupted copy of another save, and write the manifest."""
        name, run_id = step.name, step.manifest.run_id
        if objects:
            with contextlib.suppress(CorruptCheckpointError):
                if MANIFEST in objects and self.remote.manifest(name).run_id not in ("", run_id):
                    raise self._another(step)
            self.remote.retract(name, also=step.manifest.files)
        self.remote.bucket.write(self.remote.object_name(name, MANIFEST), content)
        return {}

    def _send_missing(self, step: Checkpoint, objects: dict[str, BlobInfo]) -> bool:
        """Upload this machine's files that the bucket lacks; return False if stopped."""
        files = step.own_files
        missing = missing_files(files, objects)
        for file in missing:
            if file in objects:
                self.remote.bucket.delete(objects[file].name)
        total = sum(record.size for record in files.values())
        done = total - sum(files[file].size for file in missing)
        self.report(done, total)
        pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        sending = {pool.submit(self._send, step, file): file for file in missing}
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

    def _send(self, step: Checkpoint, file: str) -> bool:
        if self.stopping():
            return False
        problems = verify(step, deep=True, files=[file])
        if problems:
            if not step.path.exists():
                raise _removed(step)
            raise CheckpointError(
                f"{step.path} is corrupt: {describe(problems)}. It is not copied to the bucket. "
                "Remove it, or check the disk."
            )
        name = self.remote.object_name(step.name, file)
        self.remote.bucket.upload(step.path / file, name, crc32c=step.manifest.files[file].crc32c)
        return True

    def _commit(self, step: Checkpoint, marker: Marker) -> bool:
        """Write the marker if a new listing is complete; return False while parts are missing."""
        name, files = step.name, step.manifest.files
        objects = self.remote.objects(name)
        wrong = missing_files(files, objects)
        if set(wrong) - set(step.own_files):
            return False
        listed = objects.get(MANIFEST)
        if wrong or listed is None or listed.crc32c not in (None, marker.manifest_crc32c):
            what = sorted(wrong)[0] if wrong else MANIFEST
            raise BucketError(
                f"{self.remote.url}/{name}/{what} was changed or removed after its upload "
                f"({max(len(wrong), 1):,} such objects). Another program writes to this prefix. "
                "The objects are uploaded again."
            )
        if not step.path.exists():
            raise _removed(step)
        self.remote.commit(name, (step.path / COMMITTED).read_bytes())
        return True


@contextlib.contextmanager
def _held(step: Checkpoint) -> Iterator[None]:
    """Lock a checkpoint against removal while it is copied."""
    try:
        with in_use(step.path):
            yield
    except FileNotFoundError:
        raise _removed(step) from None


def _removed(step: Checkpoint) -> CheckpointError:
    text = f"{step.path} was removed while it was copied. The copy is not committed."
    return CheckpointError(text)
