"""Retention: which checkpoints may go, and their removal from the disk."""

from __future__ import annotations

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
from refocused.checkpoints.step.verify import UNREADABLE, WHOLE, is_part, judge_directory
from refocused.system.errors import CheckpointError
from refocused.system.world import World

logger = logging.getLogger(__name__)

FEWEST = 2
EMERGENCIES = 1
ALWAYS_KEPT = frozenset({SaveReason.EPOCH, SaveReason.FINAL})
LOW_DISK_SAVES = 2.5  # two saves, and what else the disk is used for meanwhile


@dataclasses.dataclass(frozen=True, slots=True)
class KeptStep:
    """What retention has to know about one step in one place."""

    step: int
    verified: bool  # readable manifest, right sizes; others never count among those kept
    reasons: frozenset[SaveReason] = frozenset({SaveReason.ROLLING})
    mirrored: bool | None = None  # whole and marked in the bucket; None: no copy is wanted
    skipped: bool = False  # the mirror puts newer steps first
    best: bool = False
    in_use: bool = False  # by a resume, an export, an upload; or it cannot be read now


def to_remove(steps: Sequence[KeptStep], *, keep: int, disk_low: bool = False) -> list[int]:
    """Choose the steps to remove, oldest first, of all steps of one branch in one place.

    Kept are the newest two verified steps, the newest `keep` verified rolling ones, the newest
    verified emergency, every epoch's and the final one, the best, what is in use, what a mirror
    still has to copy, and broken steps newer than the oldest that is kept by its number. On a full
    disk (`disk_low`) a step goes before the mirror has it, if the mirror has a newer one, or puts
    newer ones first.
    """
    verified = sorted((step for step in steps if step.verified), key=lambda step: -step.step)
    if len(verified) < FEWEST:
        return []  # a broken step may still be what a person can rescue something from
    rolling = [step for step in verified if SaveReason.ROLLING in step.reasons][:keep]
    emergencies = [step for step in verified if SaveReason.EMERGENCY in step.reasons][:EMERGENCIES]
    kept = {step.step for step in (*verified[:FEWEST], *rolling, *emergencies)}
    oldest = min(step.step for step in (*verified[:FEWEST], *rolling))
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


def best_of(losses: Mapping[int, float | None]) -> int | None:
    """Return the step with the lowest finite validation loss; None: no step has one.

    Of several with the same loss it is the first, which is nearest to where that was measured.
    """
    finite = {
        step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)
    }
    return min(finite, key=lambda step: (finite[step], step)) if finite else None


def kept_steps(
    manifests: Mapping[int, CheckpointManifest | None],
    *,
    whole: Collection[int],
    in_use: Collection[int] = (),
) -> list[KeptStep]:
    """Return what retention has to know of each step; the best is one of the whole ones."""
    best = best_of({s: m.validation_loss for s, m in manifests.items() if m and s in whole})
    return [
        KeptStep(
            step=step,
            verified=step in whole,
            reasons=frozenset(found.tiers if found else {SaveReason.ROLLING}),
            best=step == best,
            in_use=step in in_use,
        )
        for step, found in manifests.items()
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """The local steps that the mirror last reported as copied, put back, and never to be copied."""

    mirrored: Collection[int] = ()
    skipped: Collection[int] = ()
    unwanted: Collection[int] = ()


def local_steps(checkpoints: Path, branch: Branch, copies: Copies | None) -> list[KeptStep]:
    """Look at every checkpoint of a branch on this disk; `copies` is None without a mirror."""
    paths = step_paths(checkpoints, branch)
    found = {step: judge_directory(path) for step, path in paths.items()}
    unreadable = {step for step, one in found.items() if one.state.startswith(UNREADABLE)}
    steps = kept_steps(
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


def thin_out(
    checkpoints: Path,
    world: World,
    *,
    branch: Branch = FIRST_BRANCH,
    keep: int,
    copies: Copies | None = None,
    disk_low: bool = False,
) -> list[str]:
    """Remove the steps that retention does not keep, from every storage rank's disk; return them.

    The checkpoints of branches that the run has left go as soon as its own branch has `keep` ones
    beyond the fork, or when the disk is low; those of epochs and the final one stay. All ranks
    call; rank 0's `keep` and `disk_low` decide. Without a mirror `copies` is None.
    """

    def look() -> list[KeptStep]:
        try:
            return local_steps(checkpoints, branch, copies)
        except OSError as error:
            logger.warning(
                "%s cannot be read (%s): no step is removed.", checkpoints, error.strerror
            )
            return []

    steps = _on_all_disks(world.on_storage_ranks(look))
    doomed = [branch.name_of(step) for step in to_remove(steps, keep=keep, disk_low=disk_low)]
    own = [step for step in steps if step.verified and branch.holder(step.step) == branch.number]
    if disk_low or len(own) >= keep:
        doomed += _left_behind(checkpoints, branch)
    doomed = world.broadcast(doomed)
    world.on_storage_ranks(lambda: _remove(checkpoints, doomed))
    return doomed


def _on_all_disks(seen: Sequence[Sequence[KeptStep]]) -> list[KeptStep]:
    """Combine what the storage ranks see of each step: it is whole only if it is on every disk."""
    disks = [{step.step: step for step in steps} for steps in seen]
    first = {number: step for disk in reversed(disks) for number, step in disk.items()}
    return [
        dataclasses.replace(
            step,
            verified=all(number in disk and disk[number].verified for disk in disks),
            in_use=any(number in disk and disk[number].in_use for disk in disks),
        )
        for number, step in sorted(first.items())
    ]


def _left_behind(checkpoints: Path, branch: Branch) -> list[str]:
    """Return the removable checkpoints on this disk of branches that the run is not on."""
    found = {
        name: judge_directory(path).manifest
        for name, path in checkpoint_paths(checkpoints).items()
        if branch.step_of(name) is None and not is_in_use(path)
    }
    return [name for name, step in found.items() if step and not ALWAYS_KEPT & {*step.tiers}]


def _remove(checkpoints: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            with unused(checkpoints / name):
                remove_step(checkpoints / name)
        except (FileNotFoundError, BlockingIOError):
            continue  # another storage rank alone has it, or a reader has come meanwhile
        except OSError as error:
            logger.warning("%s could not be removed: %s", name, error)


def disk_is_low(
    checkpoints: Path, branch: Branch = FIRST_BRANCH, *, saves: float = LOW_DISK_SAVES
) -> bool:
    """Whether the disk has less room than so many saves like the last one; unknown before one."""
    newest = list(step_paths(checkpoints, branch).values())[-1:]
    try:
        size = read_step(newest[0]).bytes if newest else 0
    except CheckpointError:
        size = 0
    return shutil.disk_usage(checkpoints).free < saves * size
