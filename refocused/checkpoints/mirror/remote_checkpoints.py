"""The checkpoints of a run in a bucket: list, inspect, commit and remove them."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c, with_checksum
from refocused.checkpoints.mirror.lease import LEASE_FILE
from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    parse_name,
    parse_place,
)
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    Marker,
    checked_manifest,
    parse_marker,
)
from refocused.checkpoints.step.retention import to_remove
from refocused.checkpoints.step.verify import WHOLE, CheckpointState, state_of
from refocused.system.errors import BucketError, CheckpointError, CorruptCheckpointError

Objects = Mapping[str, BlobInfo]  # of one checkpoint, by path below it
POINTER = "latest/pointer.json"
_ABOUT = b"""Checkpoints of one training run, copied here by refocused.
A folder checkpoint_step_N without an object COMMITTED is incomplete: nothing reads it.
The first branch of the run is in checkpoint_step_N. Going back to an earlier checkpoint starts
another: branch-2/checkpoint_step_N, and so on.
latest/pointer.json names the newest checkpoint that was copied. It is a hint and comes last in a
listing: --resume gs://.../latest/ looks for the newest whole checkpoint by itself.
"""


def prefix_of(run: str) -> str:
    """Return the prefix of a run's checkpoints below `checkpoint.mirror`."""
    return f"{run}/checkpoints"


def object_problem(blob: BlobInfo | None, record: FileRecord) -> str | None:
    """Describe how a listed object differs from its record in the manifest; None if it does not."""
    return "is missing" if blob is None else record.difference(blob.size, blob.crc32c)


def missing_files(files: Mapping[str, FileRecord], objects: Objects) -> list[str]:
    """Return the files without an object of their size and (if listed) checksum."""
    return [file for file, record in files.items() if object_problem(objects.get(file), record)]


class RemoteCheckpoints:
    """The checkpoints below one prefix of a bucket; an empty prefix is the bucket's root."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        prefix = prefix.strip("/")
        self.bucket = bucket
        self._below = f"{prefix}/" if prefix else ""
        self.lease_name = f"{self._below}{LEASE_FILE}"
        self.url = f"{bucket.url.rstrip('/')}/{prefix}".rstrip("/")
        # Manifests of listed checkpoints, each with the objects that it and its marker were.
        self._manifests: dict[str, tuple[list[BlobInfo | None], CheckpointManifest]] = {}

    def object_name(self, name: str, file: str) -> str:
        """Return the object name of a file of checkpoint `name`."""
        return f"{self._below}{name}/{file}"

    def write_readme(self) -> None:
        """Write a README.txt unless it exists; raises BucketError if the prefix is read-only."""
        address = f"{self._below}README.txt"
        try:
            self.bucket.write(address, _ABOUT)
        except BucketError as error:
            if not error.transient or self.bucket.info(address) is None:
                raise

    def scan(self) -> dict[str, dict[str, BlobInfo]]:
        """List the objects of all checkpoints by name, in order of branch and step."""
        checkpoints: dict[tuple[int, int], tuple[str, dict[str, BlobInfo]]] = {}
        for prefix in ("checkpoint_step_", "branch-"):
            for blob in self.bucket.list(f"{self._below}{prefix}"):
                path = blob.name.removeprefix(self._below)
                parts = path.split("/", 2 if prefix == "branch-" else 1)
                name = "/".join(parts[:-1])
                key = parse_place(name)
                if key is not None and parts[-1]:
                    checkpoints.setdefault(key, (name, {}))[1][parts[-1]] = blob
        return dict(checkpoints[key] for key in sorted(checkpoints))

    def objects(self, name: str) -> dict[str, BlobInfo]:
        """List the objects of a checkpoint, with their checksums."""
        folder = self.object_name(name, "")
        blobs = [with_checksum(self.bucket, blob) for blob in self.bucket.list(folder)]
        return {blob.name.removeprefix(folder): blob for blob in blobs}

    def committed(self, name: str, listed: Objects = MappingProxyType({})) -> bytes | None:
        """Read a checkpoint's COMMITTED; None if it is not committed. See `_read`."""
        return self._read(name, COMMITTED, listed)

    def _read(self, name: str, file: str, listed: Objects) -> bytes | None:
        """Read a small file, in one request if it is still as `listed`; None if it is missing."""
        address, blob = self.object_name(name, file), listed.get(file)
        if blob is not None and blob.crc32c is not None:
            content = self.bucket.read(address, length=blob.size)
            if extended_crc32c(0, content) == blob.crc32c:
                return content
        return None if self.bucket.info(address) is None else self.bucket.read(address)

    def marker(self, name: str) -> Marker | None:
        """Read a checkpoint's marker; None if it is not committed."""
        content = self.committed(name)
        where = f"{self.url}/{name}/{COMMITTED}"
        return None if content is None else parse_marker(content, where=where)

    def manifest(self, name: str, listed: Objects = MappingProxyType({})) -> CheckpointManifest:
        """Read a checkpoint's manifest and marker, once if they stay as `listed`.

        Errors as `checked_manifest`.
        """
        blobs, known = [listed.get(MANIFEST), listed.get(COMMITTED)], self._manifests.get(name)
        if listed and known is not None and known[0] == blobs:
            return known[1]
        content, committed = self._read(name, MANIFEST, listed), self.committed(name, listed)
        if content is None:
            raise CorruptCheckpointError(f"{self.url}/{name}/{MANIFEST} is missing.")
        manifest = checked_manifest(content, committed, where=f"{self.url}/{name}")
        self._manifests[name] = blobs, manifest
        return manifest

    def commit(self, name: str, committed: bytes, *, overwrite: bool = False) -> None:
        """Write COMMITTED, which makes the checkpoint visible."""
        self.bucket.write(self.object_name(name, COMMITTED), committed, overwrite=overwrite)

    def unmark(self, name: str) -> None:
        """Remove the marker; the checkpoint is ignored until it is committed again."""
        self.bucket.delete(self.object_name(name, COMMITTED))

    def write_pointer(self, name: str) -> None:
        """Write `latest/pointer.json`, a hint for people who browse the bucket.

        A listing is in alphabetical order, so its last checkpoint need not be the newest.
        """
        content = json.dumps({"name": name, "step": parse_name(name.rpartition("/")[2])}).encode()
        self.bucket.write(f"{self._below}{POINTER}", content, overwrite=True)

    def retract(self, name: str, *, also: Collection[str] = ()) -> None:
        """Remove a checkpoint, its marker first, and the files `also`; other objects stay.

        Raises CheckpointError if its manifest is unusable, so that its files are unknown.
        """
        self.unmark(name)
        objects, listed = self.objects(name), {*also}
        try:
            listed |= {*(self.manifest(name).files if MANIFEST in objects else ())}
        except CorruptCheckpointError:
            if not also:
                raise
        for file in sorted(listed & set(objects)):
            self.bucket.delete(objects[file].name)
        self.bucket.delete(self.object_name(name, MANIFEST))


def inspect_objects(remote: RemoteCheckpoints, name: str, objects: Objects) -> CheckpointState:
    """Compare the objects of a checkpoint with its manifest, and that with its marker."""
    is_committed = COMMITTED in objects
    if MANIFEST not in objects:
        return CheckpointState(f"broken: {MANIFEST} is missing" if is_committed else "0 %")
    try:
        manifest = remote.manifest(name, objects)
    except CheckpointError as error:
        where = f"{remote.url}/{name}"
        return CheckpointState(state_of(error, where=where) if is_committed else "0 %")
    missing, files = missing_files(manifest.files, objects), manifest.files
    if not is_committed:
        total = manifest.total_bytes
        copied = total - sum(files[file].size for file in missing)
        return CheckpointState(f"{min(100 * copied // max(total, 1), 99)} %", manifest)
    if missing:
        what = f"broken: {len(missing)} of {len(files)} files are missing"
        return CheckpointState(what, manifest)
    return CheckpointState(WHOLE, manifest)


class RemoteRetention:
    """Removes old checkpoints of one branch from a bucket; keeps `keep` rolling ones (`to_remove`).

    Checkpoints of other branches and those with an unreadable manifest are neither counted nor
    removed.
    """

    def __init__(
        self, remote: RemoteCheckpoints, branch: Branch = FIRST_BRANCH, *, keep: int
    ) -> None:
        self._remote = remote
        self._branch = branch
        self._keep = keep
        self._states: dict[int, CheckpointState] = {}  # at the last listing

    def states(self, *, in_use: Collection[int] = ()) -> dict[int, CheckpointState]:
        """List the checkpoints of the branch by step."""
        self._states = {}
        for name, objects in self._remote.scan().items():
            if (step := self._branch.step_of(name)) is not None:
                state = inspect_objects(self._remote, name, objects)
                if state.manifest is not None:
                    self._states[step] = dataclasses.replace(state, in_use=step in in_use)
        return self._states

    def prune(self, *, in_use: Collection[int] = ()) -> list[int]:
        """Remove the checkpoints that retention does not keep; return their steps."""
        to_delete = to_remove(self.states(in_use=in_use), keep=self._keep)
        for step in to_delete:
            self._remote.retract(self._branch.name_of(step))
            del self._states[step]
        return to_delete

    def unwanted(self, missing: Mapping[int, CheckpointManifest]) -> set[int]:
        """Return the steps of `missing`, which the bucket lacks, that `prune` would remove at once.

        Uses the last listing by `states` or `prune`.
        """
        together = {step: state for step, state in self._states.items() if state.is_whole}
        together |= {step: CheckpointState(WHOLE, manifest) for step, manifest in missing.items()}
        return set(to_remove(together, keep=self._keep)) & set(missing)
