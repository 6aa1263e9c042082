"""Whether a step's copy in a bucket is what its marker and its manifest say."""

from __future__ import annotations

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c
from refocused.bucket.stored import stored_crc32c
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    SUPERSEDED,
    CheckpointManifest,
    FileRecord,
    parse_manifest,
)
from refocused.checkpoints.step.verify import FileProblem
from refocused.system.errors import CheckpointError


def verify_remote(remote: RemoteSteps, name: str, *, deep: bool) -> list[FileProblem]:
    """Compare the objects of a step with its marker and its manifest.

    A listing gives sizes, and checksums where the store keeps them; only the marker and the
    manifest are read. What an upload has not sent yet is no problem before the marker is there.

    Args:
        remote: The steps of the run.
        name: The step's directory name.
        deep: Read the objects that the store keeps no checksum of (those of a folder).

    Returns:
        Every problem found, by file name; empty when all is well.

    Raises:
        BucketError: The bucket cannot be read.
    """
    objects = remote.objects(name)
    committed = COMMITTED in objects
    if MANIFEST not in objects:
        return [FileProblem(MANIFEST, "is missing")] if committed else []
    content = remote.bucket.read(objects[MANIFEST].name)
    try:
        manifest = parse_manifest(content, where=f"{remote.url}/{name}/{MANIFEST}")
    except CheckpointError as error:
        return [FileProblem(MANIFEST, f"cannot be used: {error}")]
    problems = _marker_problems(remote, name, manifest, content) if committed else []
    for file, record in manifest.files.items():
        if file in objects:
            problem = _compare(remote.bucket, objects[file], record, deep=deep)
        else:
            problem = "is missing" if committed else None
        if problem is not None:
            problems.append(FileProblem(file, problem))
    expected = {*manifest.files, MANIFEST, COMMITTED, SUPERSEDED}
    foreign = [file for file in objects if file not in expected]
    problems += [FileProblem(file, "is there but not in the manifest") for file in foreign]
    return sorted(problems, key=lambda problem: problem.file)


def _marker_problems(
    remote: RemoteSteps, name: str, manifest: CheckpointManifest, content: bytes
) -> list[FileProblem]:
    try:
        marker = remote.marker(name)
    except CheckpointError as error:
        return [FileProblem(COMMITTED, f"cannot be used: {error}")]
    if marker is None:
        return []  # taken away since the listing: an upload is at work
    found = extended_crc32c(0, content)
    if found != marker.manifest_crc32c:
        return [
            FileProblem(
                MANIFEST,
                f"has CRC-32C {found:08x}, but {COMMITTED} says {marker.manifest_crc32c:08x}",
            )
        ]
    if (len(manifest.files), manifest.total_bytes) != (marker.files, marker.bytes):
        return [FileProblem(COMMITTED, f"counts other files than {MANIFEST} lists")]
    return []


def _compare(bucket: Bucket, blob: BlobInfo, record: FileRecord, *, deep: bool) -> str | None:
    if blob.size != record.size:
        return f"has {blob.size:,} bytes, not {record.size:,}"
    found = stored_crc32c(bucket, blob) if deep else blob.crc32c
    if found not in (None, record.crc32c):
        return f"has CRC-32C {found:08x}, not {record.crc32c:08x}"
    return None
