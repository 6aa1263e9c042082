"""Retention: choose the checkpoints to remove, and remove them from the disk."""

import dataclasses
import logging
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, checkpoint_paths, step_paths
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, SaveReason
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import is_in_use, read_step, unused
from refocused.checkpoints.step.verify import UNREADABLE, WHOLE, inspect_directory, is_part
from refocused.system.errors import CheckpointError
from refocused.system.world import World

logger = logging.getLogger(__name__)

MIN_KEPT = 2
MAX_EMERGENCIES = 1
ALWAYS_KEPT = frozenset({SaveReason.EPOCH, SaveReason.FINAL})
LOW_DISK_SAVES = 2.5  # two saves, and some room for other files


@dataclasses.dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """One checkpoint on the disk or in the bucket, as far as retention is concerned."""

    step: int
    verified: bool  # readable manifest, right sizes; otherwise it does not count as kept
    reasons: frozenset[SaveReason] = frozenset({SaveReason.ROLLING})
    mirrored: bool | None = None  # committed in the bucket; None: it needs no copy
    skipped: bool = False  # the mirror copies newer ones first
    best: bool = False
    in_use: bool = False  # by a resume, an export or an upload; or unreadable at the moment


def to_remove(
    steps: Sequence[RetentionCandidate], *, keep: int, disk_low: bool = False
) -> list[int]:
    """Choose which checkpoints of one branch to remove, oldest first.

    Kept are the newest two verified checkpoints, the newest `keep` verified rolling ones, broken
    ones newer than the oldest of these, the newest verified emergency, all epoch, the final and the
    best checkpoint, those in use, and those not yet mirrored. If `disk_low`, a checkpoint is
    removed before it is mirrored if the mirror has a newer one or copies newer ones first.
    """
    verified = sorted((step for step in steps if step.verified), key=lambda step: -step.step)
    if len(verified) < MIN_KEPT:
        return []  # a broken checkpoint may still be of use for a manual rescue
    rolling = [step for step in verified if SaveReason.ROLLING in step.reasons][:keep]
    emergencies = [step for step in verified if SaveReason.EMERGENCY in step.reasons][
        :MAX_EMERGENCIES
    ]
    kept = {step.step for step in (*verified[:MIN_KEPT], *rolling, *emergencies)}
    oldest = min(step.step for step in (*verified[:MIN_KEPT], *rolling))
    newest_mirrored = max((step.step for step in verified if step.mirrored), default=-1)
    return sorted(
        step.step
        for step in steps
        if step.step not in kept
        and (step.verified or step.step < oldest)
        and not (step.best or step.in_use or step.reasons & ALWAYS_KEPT)
        and (
            step.mirrored is not False
            or (disk_low and (step.skipped or step.step < newest_mirrored))
        )
    )


def best_of(losses: Mapping[int, tuple[float | None, str]]) -> int | None:
    """Return the step with the lowest finite validation loss, the first of several, if any.

    Of (loss, validation set), only those of the set are compared that was used last.
    """
    known = [step for step, (loss, of) in losses.items() if of or loss is not None]
    present = losses[max(known)][1] if known else ""
    finite = {
        step: loss
        for step, (loss, of) in losses.items()
        if of == present and loss is not None and math.isfinite(loss)
    }
    return min(finite, key=lambda step: (finite[step], step)) if finite else None


def retention_candidates(
    manifests: Mapping[int, CheckpointManifest | None],
    *,
    whole: Collection[int],
    in_use: Collection[int] = (),
) -> list[RetentionCandidate]:
    """Return the checkpoints as retention candidates; only a `whole` one is the best."""
    losses = {
        step: (found.validation_loss, found.validation_set)
        for step, found in manifests.items()
        if found and step in whole
    }
    best = best_of(losses)
    return [
        RetentionCandidate(
            step=step,
            verified=step in whole,
            reasons=frozenset(found.tiers if found else {SaveReason.ROLLING}),
            best=step == best,
            in_use=step in in_use,
        )
        for step, found in manifests.items()
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class MirroredSteps:
    """The local checkpoints that the mirror last reported, by step; of other branches by name."""

    mirrored: Collection[int] = ()
    skipped: Collection[int] = ()
    unwanted: Collection[int] = ()
    of_other_branches: Collection[str] = ()  # mirrored, too


def local_steps(
    checkpoints: Path, branch: Branch, copies: MirroredSteps | None
) -> list[RetentionCandidate]:
    """Return the checkpoints of a branch on this disk; `copies` is None without a mirror."""
    paths = step_paths(checkpoints, branch)
    found = {step: inspect_directory(path) for step, path in paths.items()}
    unreadable = {step for step, one in found.items() if one.state.startswith(UNREADABLE)}
    steps = retention_candidates(
        {step: one.manifest for step, one in found.items()},
        whole={step for step, one in found.items() if one.state == WHOLE or is_part(one.state)},
        in_use=unreadable | {step for step, path in paths.items() if is_in_use(path)},
    )
    if copies is None:
        return steps
    return [
        dataclasses.replace(
            step,
            mirrored=None if step.step in copies.unwanted else step.step in copies.mirrored,
            skipped=step.step in copies.skipped,
        )
        for step in steps
    ]


def prune(
    checkpoints: Path,
    world: World,
    *,
    branch: Branch = FIRST_BRANCH,
    keep: int,
    copies: MirroredSteps | None = None,
    disk_low: bool = False,
) -> list[str]:
    """Remove the checkpoints that retention does not keep; return their names.

    Checkpoints of other branches that the mirror has are removed once this branch has `keep` of
    its own, or if `disk_low`, except for epoch and final ones. No newer checkpoint replaces one of
    a branch that was left, so the only copy stays. Collective: every rank calls, rank 0's arguments
    apply, and each storage rank removes from its disk. Without a mirror `copies` is None.
    """

    def look() -> list[RetentionCandidate]:
        try:
            return local_steps(checkpoints, branch, copies)
        except OSError as error:
            logger.warning(
                "%s cannot be read (%s). No checkpoint is removed.", checkpoints, error.strerror
            )
            return []

    # Of the storage ranks' views: a checkpoint is verified only if it is on every disk.
    disks = [{step.step: step for step in steps} for steps in world.on_storage_ranks(look)]
    first = {number: step for disk in reversed(disks) for number, step in disk.items()}
    steps = [
        dataclasses.replace(
            step,
            verified=all(number in disk and disk[number].verified for disk in disks),
            in_use=any(number in disk and disk[number].in_use for disk in disks),
        )
        for number, step in sorted(first.items())
    ]
    to_delete = [branch.name_of(step) for step in to_remove(steps, keep=keep, disk_low=disk_low)]
    own = [step for step in steps if step.verified and branch.holder(step.step) == branch.number]
    if copies is not None and (disk_low or len(own) >= keep):
        others = {
            name: inspect_directory(path).manifest
            for name, path in checkpoint_paths(checkpoints).items()
            if name in copies.of_other_branches and not is_in_use(path)
        }
        to_delete += [
            name for name, one in others.items() if one and not ALWAYS_KEPT & {*one.tiers}
        ]
    to_delete = world.broadcast(to_delete)
    world.on_storage_ranks(lambda: _remove(checkpoints, to_delete))
    return to_delete


def _remove(checkpoints: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            with unused(checkpoints / name):
                remove_step(checkpoints / name)
        except (FileNotFoundError, BlockingIOError):
            continue  # not on this disk, or a reader has opened it meanwhile
        except OSError as error:
            logger.warning("Cannot remove %s: %s", name, error)


def disk_is_low(
    checkpoints: Path, branch: Branch = FIRST_BRANCH, *, saves: float = LOW_DISK_SAVES
) -> bool:
    """Whether the disk has less room than `saves` times the last checkpoint; False before one."""
    newest = list(step_paths(checkpoints, branch).values())[-1:]
    try:
        size = read_step(newest[0]).bytes if newest else 0
    except CheckpointError:
        size = 0
    return shutil.disk_usage(checkpoints).free < saves * size
