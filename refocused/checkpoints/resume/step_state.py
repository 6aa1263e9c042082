"""What one place, the disk or the bucket, holds of one step of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, crc32c_of
from refocused.checkpoints.mirror.remote_steps import RemoteSteps, missing_files
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    SUPERSEDED,
    CheckpointManifest,
)
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import describe, verify
from refocused.system.errors import CheckpointError, CorruptCheckpointError

ABSENT = "-"
WHOLE = "ok"
LEFT_BEHIND = "superseded"  # by a mark of version 0.1
UNREADABLE = "unreadable"  # which proves no damage


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What one place holds of one step; `state` is as in CatalogEntry.

    The bytes are those of its objects in the bucket, the CRC-32C that of the local manifest.
    """

    state: str = ABSENT
    manifest: CheckpointManifest | None = None
    objects_bytes: int = 0
    manifest_crc32c: int | None = None


def is_part(state: str) -> bool:
    """Whether a local state is that of one machine's part of a step."""
    return state.startswith("node ")


def judge_directory(path: Path) -> Found:
    """Judge a local step directory by its structure and sizes."""
    try:
        directory = read_step(path)
        problems = verify(directory, deep=False)
    except CheckpointError as error:
        return Found(f"{_kind(error)}: {str(error).split('. ')[0].replace(f'{path}/', '')}")
    state = WHOLE if directory.part is None else str(directory.part)
    crc32c = crc32c_of(path / MANIFEST)
    state = f"broken: {describe(problems)}" if problems else state
    return Found(state, directory.manifest, manifest_crc32c=crc32c)


def judge_objects(
    remote: RemoteSteps, name: str, objects: Mapping[str, BlobInfo], local: Found
) -> Found:
    """Compare the objects of one step, by path below it, with the manifest among them.

    The local manifest saves reading the one in the bucket where the listing shows that they are
    the same.
    """
    if MANIFEST not in objects:
        return Found(f"broken: {MANIFEST} is missing" if COMMITTED in objects else "0 %")
    try:
        crc32c, manifest = objects[MANIFEST].crc32c, local.manifest
        if manifest is None or crc32c is None or crc32c != local.manifest_crc32c:
            manifest = remote.manifest(name)
        if SUPERSEDED in objects:
            return Found(LEFT_BEHIND, manifest)
        is_foreign = COMMITTED in objects and remote.marks_other_files(name, objects, manifest)
    except CheckpointError as error:
        return Found(f"{_kind(error)}: {error}")
    missing, files = missing_files(manifest.files, objects), manifest.files
    if COMMITTED not in objects:
        there = manifest.total_bytes - sum(files[file].size for file in missing)
        return Found(f"{min(100 * there // max(manifest.total_bytes, 1), 99)} %", manifest)
    if missing:
        return Found(f"broken: {len(missing)} of {len(files)} files are lost", manifest)
    if is_foreign:
        return Found(f"broken: {COMMITTED} belongs to other files", manifest)
    return Found(WHOLE, manifest)


def _kind(error: CheckpointError) -> str:
    return "broken" if isinstance(error, CorruptCheckpointError) else UNREADABLE
