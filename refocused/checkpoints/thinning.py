"""Removing old steps from the disk: what retention has to know of them, and doing what it says."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from refocused.checkpoints.manifest import CheckpointManifest
from refocused.checkpoints.mirror_status import MirrorStatus
from refocused.checkpoints.retention import KeptStep, best_of, to_remove
from refocused.checkpoints.staging import remove_step
from refocused.checkpoints.step_directory import (
    is_in_use,
    name_of,
    parse_name,
    read_step,
    step_paths,
)
from refocused.checkpoints.tiers import Tier
from refocused.checkpoints.verify import verify
from refocused.errors import CheckpointError

logger = logging.getLogger(__name__)

LOW_DISK_SAVES = 2.5  # two saves, and what else the disk is used for meanwhile


def thin_out(
    checkpoints: Path,
    *,
    keep: int,
    mirrored: bool,
    status: MirrorStatus | None,
    disk_low: bool = False,
) -> list[int]:
    """Remove the local steps that retention does not keep; return those that went.

    Args:
        checkpoints: Folder of the step directories.
        keep: Newest rolling steps that stay.
        mirrored: The run has a mirror; what that lacks stays.
        status: What the mirror said last; None: nothing yet.
        disk_low: There may be no room for the next saves.
    """
    removed = []
    steps = local_steps(checkpoints, mirrored=mirrored, status=status)
    for step in to_remove(steps, keep=keep, disk_low=disk_low):
        try:
            remove_step(checkpoints / name_of(step))
            removed.append(step)
        except OSError as error:
            logger.warning("%s could not be removed: %s", name_of(step), error)
    return removed


def local_steps(
    checkpoints: Path, *, mirrored: bool, status: MirrorStatus | None
) -> list[KeptStep]:
    """Look at every step directory; arguments as of `thin_out`."""
    found = {path: _readable(path) for path in step_paths(checkpoints)}
    best = best_of(
        {
            manifest.step: manifest.validation_loss
            for manifest, whole in found.values()
            if whole and manifest is not None
        }
    )
    steps = []
    for path, (manifest, whole) in found.items():
        step = parse_name(path.name)
        assert step is not None  # step_paths yields no other names
        steps.append(
            KeptStep(
                step=step,
                verified=whole,
                tiers=frozenset(manifest.tiers if manifest else {Tier.ROLLING}),
                mirrored=_is_mirrored(step, status) if mirrored else None,
                skipped=status is not None and step in status.skipped,
                best=step == best,
                in_use=is_in_use(path),
            )
        )
    return steps


def disk_is_low(checkpoints: Path, *, saves: float = LOW_DISK_SAVES) -> bool:
    """Whether the disk has less room than so many saves like the last one; unknown before one."""
    paths = step_paths(checkpoints)
    sizes = [manifest.total_bytes for manifest, _ in map(_readable, paths[-1:]) if manifest]
    return shutil.disk_usage(checkpoints).free < saves * max(sizes, default=0)


def _is_mirrored(step: int, status: MirrorStatus | None) -> bool | None:
    if status is None:
        return False
    return None if step in status.unwanted else step in status.mirrored


def _readable(path: Path) -> tuple[CheckpointManifest | None, bool]:
    """Return a step's manifest, if it can be read, and whether its files have their sizes."""
    try:
        step = read_step(path)
    except CheckpointError:
        return None, False
    return step.manifest, not verify(step, deep=False)
