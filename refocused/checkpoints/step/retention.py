"""Retention: choose the checkpoints to remove, and remove them from the disk."""

import dataclasses
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pydantic

from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    checkpoint_paths,
    is_in_use,
    read_checkpoint,
    step_paths,
    unused,
)
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, SaveReason
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.checkpoints.step.verify import ABSENT, UNREADABLE, CheckpointState, inspect_directory
from refocused.system.errors import CheckpointError
from refocused.system.world import World

logger = logging.getLogger(__name__)

MIN_KEPT = 2
MAX_EMERGENCIES = 1
ALWAYS_KEPT = frozenset({SaveReason.EPOCH, SaveReason.FINAL})
LOW_DISK_SAVES = 2.5  # two saves, and some room for other files


def to_remove(
    states: Mapping[int, CheckpointState], *, keep: int, disk_low: bool = False
) -> list[int]:
    """Choose which checkpoints of one branch, by step, to remove, oldest first.

    Kept are the newest two whole checkpoints, the newest `keep` whole rolling ones, broken ones
    newer than the oldest of these, the newest whole emergency, all epoch, the final and the best
    checkpoint, those in use, and those not yet mirrored. If `disk_low`, a checkpoint is removed
    before it is mirrored if the mirror has a newer one or copies newer ones first.
    """
    whole = sorted((step for step, state in states.items() if state.is_whole), reverse=True)
    if len(whole) < MIN_KEPT:
        return []  # a broken checkpoint may still be of use for a manual rescue
    best = best_of({step: states[step].manifest for step in whole})
    reasons = {step: save_reasons(state.manifest) for step, state in states.items()}
    rolling = [step for step in whole if SaveReason.ROLLING in reasons[step]][:keep]
    emergencies = [step for step in whole if SaveReason.EMERGENCY in reasons[step]]
    kept = {best, *whole[:MIN_KEPT], *rolling, *emergencies[:MAX_EMERGENCIES]}
    oldest = min(*whole[:MIN_KEPT], *rolling)
    newest_mirrored = max((step for step in whole if states[step].mirrored), default=-1)
    return sorted(
        step
        for step, state in states.items()
        if step not in kept
        and (state.is_whole or step < oldest)
        and not (state.in_use or reasons[step] & ALWAYS_KEPT)
        and (
            state.mirrored is not False or (disk_low and (state.skipped or step < newest_mirrored))
        )
    )


def save_reasons(manifest: CheckpointManifest | None) -> frozenset[SaveReason]:
    """Return why a checkpoint was saved; one without a usable manifest counts as rolling."""
    return frozenset(manifest.tiers if manifest is not None else {SaveReason.ROLLING})


def best_of(manifests: Mapping[int, CheckpointManifest | None]) -> int | None:
    """Return the step with the lowest finite validation loss, the first of several, if any.

    Only losses on the validation set that was used last are compared.
    """
    losses = {
        step: (manifest.validation_loss, manifest.validation_set)
        for step, manifest in manifests.items()
        if manifest is not None
    }
    validated = [step for step, (loss, used) in losses.items() if used or loss is not None]
    present = losses[max(validated)][1] if validated else ""
    finite = {
        step: loss
        for step, (loss, used) in losses.items()
        if used == present and loss is not None and math.isfinite(loss)
    }
    return min(finite, key=lambda step: (finite[step], step), default=None)


class MirroredCheckpoints(pydantic.BaseModel, frozen=True):
    """What the mirror last reported of the local checkpoints, by step."""

    mirrored: tuple[int, ...] = ()  # committed in the bucket
    skipped: tuple[int, ...] = ()  # replaced by newer ones; not copied when draining
    unwanted: tuple[int, ...] = ()  # those that `keep_remote` would remove at once
    of_other_branches: tuple[str, ...] = ()  # names of others, committed in the bucket


def local_states(
    checkpoints: Path, branch: Branch, copies: MirroredCheckpoints | None
) -> dict[int, CheckpointState]:
    """Return the checkpoints of a branch on this disk; `copies` is None without a mirror."""
    states = {}
    for step, path in step_paths(checkpoints, branch).items():
        state = inspect_directory(path)
        states[step] = dataclasses.replace(
            state,
            in_use=state.state.startswith(UNREADABLE) or is_in_use(path),
            mirrored=None if copies is None or step in copies.unwanted else step in copies.mirrored,
            skipped=copies is not None and step in copies.skipped,
        )
    return states


def prune(
    checkpoints: Path,
    world: World,
    *,
    branch: Branch = FIRST_BRANCH,
    keep: int,
    copies: MirroredCheckpoints | None = None,
    disk_low: bool = False,
) -> list[str]:
    """Remove the checkpoints that retention does not keep; return their names.

    Checkpoints of other branches that the mirror has are removed once this branch has `keep` of
    its own, or if `disk_low`, except for epoch and final ones. No newer checkpoint replaces one of
    a branch that was left, so the only copy stays. Collective: every rank calls, rank 0's arguments
    apply, and each storage rank removes from its disk. Without a mirror `copies` is None.
    """

    def look() -> dict[int, CheckpointState]:
        try:
            states = local_states(checkpoints, branch, copies)
        except OSError as error:
            logger.warning(
                "%s cannot be read (%s). No checkpoint is removed.", checkpoints, error.strerror
            )
            return {}
        for step, state in states.items():  # lists of files are long, and of no use here
            short = state.manifest and state.manifest.model_copy(update={"files": {}})
            states[step] = dataclasses.replace(state, manifest=short)
        return states

    disks, states = world.on_storage_ranks(look), dict[int, CheckpointState]()
    for step in sorted({step for disk in disks for step in disk}):
        views = [disk.get(step, CheckpointState()) for disk in disks]
        first = next(view for view in views if view.state != ABSENT)
        # A checkpoint is whole only if it is on every disk.
        worst = next((view for view in views if not view.is_whole), first)
        in_use = any(view.in_use for view in views)
        states[step] = dataclasses.replace(first, state=worst.state, in_use=in_use)
    to_delete = [branch.name_of(step) for step in to_remove(states, keep=keep, disk_low=disk_low)]
    on_branch = [
        step
        for step, state in states.items()
        if state.is_whole and branch.holder(step) == branch.number
    ]
    if copies is not None and (disk_low or len(on_branch) >= keep):
        for name, path in checkpoint_paths(checkpoints).items():
            if name in copies.of_other_branches and not is_in_use(path):
                manifest = inspect_directory(path).manifest
                if manifest is not None and not ALWAYS_KEPT & save_reasons(manifest):
                    to_delete.append(name)
    to_delete = world.broadcast(to_delete)

    def remove() -> None:
        for name in to_delete:
            try:
                with unused(checkpoints / name):
                    remove_checkpoint(checkpoints / name)
            except (FileNotFoundError, BlockingIOError):
                continue  # not on this disk, or a reader has opened it meanwhile
            except OSError as error:
                logger.warning("Cannot remove %s: %s", name, error)

    world.on_storage_ranks(remove)
    return to_delete


def disk_is_low(
    checkpoints: Path, branch: Branch = FIRST_BRANCH, *, saves: float = LOW_DISK_SAVES
) -> bool:
    """Whether the disk has less room than `saves` times the last checkpoint; False before one."""
    newest = list(step_paths(checkpoints, branch).values())[-1:]
    try:
        size = read_checkpoint(newest[0]).bytes if newest else 0
    except CheckpointError:
        size = 0
    return shutil.disk_usage(checkpoints).free < saves * size
