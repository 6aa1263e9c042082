"""Retention: which checkpoints may go, and their removal from the disk."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, checkpoint_paths, step_paths
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import StepDirectory, is_in_use, read_step, unused
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import CheckpointError
from refocused.system.world import World

FEWEST = 2
EMERGENCIES = 1
_ALWAYS = {SaveReason.EPOCH, SaveReason.FINAL}


@dataclasses.dataclass(frozen=True, slots=True)
class KeptStep:
    """What retention has to know about one step in one place.

    Attributes:
        step: Optimizer updates done.
        verified: Its manifest can be read and its files have their sizes; a step that is not
            verified never counts among those kept.
        tiers: Why it was saved.
        mirrored: The bucket holds all of it, with its marker; None: no copy of it is wanted.
        skipped: The mirror puts newer steps first.
        best: It has the lowest validation loss.
        in_use: Something is reading it: a resume, an export, an upload.
    """

    step: int
    verified: bool
    tiers: frozenset[SaveReason] = frozenset({SaveReason.ROLLING})
    mirrored: bool | None = None
    skipped: bool = False
    best: bool = False
    in_use: bool = False


def to_remove(steps: Sequence[KeptStep], *, keep: int, disk_low: bool = False) -> list[int]:
    """Choose the steps to remove, oldest first.

    Kept are the newest two verified steps, the newest `keep` verified rolling ones, the newest
    verified emergency, every epoch's and the final one, the best, what is in use, what a mirror
    still has to copy, and broken steps newer than the oldest that is kept by its number. On a full
    disk a step goes before the mirror has it, if the mirror has a newer one, or puts newer ones
    first.

    Args:
        steps: All steps of one run in one place, in any order.
        keep: How many of the newest verified rolling ones stay.
        disk_low: There may be no room for the next saves.
    """
    verified = sorted((step for step in steps if step.verified), key=lambda step: -step.step)
    if len(verified) < FEWEST:
        return []  # a broken step may still be what a person can rescue something from
    rolling = [step for step in verified if SaveReason.ROLLING in step.tiers][:keep]
    emergencies = [step for step in verified if SaveReason.EMERGENCY in step.tiers][:EMERGENCIES]
    kept = {step.step for step in (*verified[:FEWEST], *rolling, *emergencies)}
    oldest = min(step.step for step in (*verified[:FEWEST], *rolling))
    newest_mirrored = max((step.step for step in verified if step.mirrored), default=-1)
    return sorted(
        step.step
        for step in steps
        if step.step not in kept
        and (step.verified or step.step < oldest)
        and not (step.best or step.in_use or step.tiers & _ALWAYS)
        and (
            step.mirrored is not False
            or (disk_low and (step.skipped or step.step < newest_mirrored))
        )
    )


def best_of(losses: Mapping[int, float | None]) -> int | None:
    """Return the step with the lowest validation loss; None: no step has one that is finite.

    Of several with the same loss it is the first, which is nearest to where that was measured.
    """
    finite = {
        step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)
    }
    return min(finite, key=lambda step: (finite[step], step)) if finite else None


logger = logging.getLogger(__name__)

LOW_DISK_SAVES = 2.5  # two saves, and what else the disk is used for meanwhile


class Mirrored(Protocol):
    """What the mirror last reported: steps it has copied, left out, and will never copy."""

    @property
    def mirrored(self) -> Collection[int]:
        """Steps that the bucket has."""

    @property
    def skipped(self) -> Collection[int]:
        """Steps that newer ones replace there."""

    @property
    def unwanted(self) -> Collection[int]:
        """Steps that will never be copied."""


def thin_out(
    checkpoints: Path,
    world: World,
    *,
    branch: Branch = FIRST_BRANCH,
    keep: int,
    mirrored: bool,
    status: Mirrored | None,
    disk_low: bool = False,
) -> list[str]:
    """Remove the steps that retention does not keep, from every storage rank's disk.

    The checkpoints of branches that the run has left go as soon as its own branch has `keep` ones
    beyond the fork, or when the disk is low; those of epochs and the final one stay.

    Args:
        checkpoints: Folder of the step directories.
        branch: The branch that the run is on.
        world: The ranks, all of which must call; rank 0's answers to the next decide.
        keep: Newest rolling steps that stay.
        mirrored: The run has a mirror; what that lacks stays.
        status: What the mirror said last; None: nothing yet.
        disk_low: There may be no room for the next saves.

    Returns:
        Names of the checkpoints that went.
    """
    seen = world.on_storage_ranks(
        lambda: _seen(checkpoints, branch, mirrored=mirrored, status=status)
    )
    steps = in_all_places(seen)
    doomed = [branch.name_of(step) for step in to_remove(steps, keep=keep, disk_low=disk_low)]
    own = [step for step in steps if step.verified and branch.holder(step.step) == branch.number]
    if disk_low or len(own) >= keep:
        doomed += _left_behind(checkpoints, branch)
    doomed = world.broadcast(doomed)
    world.on_storage_ranks(lambda: _remove(checkpoints, doomed))
    return doomed


def _left_behind(checkpoints: Path, branch: Branch) -> list[str]:
    """Return the removable checkpoints here of branches that the run is not on."""
    others = {
        name: path
        for name, path in checkpoint_paths(checkpoints).items()
        if branch.step_of(name) is None and not is_in_use(path)
    }
    read = {name: _readable(path)[0] for name, path in others.items()}
    kept = {SaveReason.EPOCH, SaveReason.FINAL}
    return [name for name, step in read.items() if step and not kept & {*step.manifest.tiers}]


def in_all_places(seen: Sequence[Sequence[KeptStep]]) -> list[KeptStep]:
    """Say of each step what holds for all storage ranks together; the first one's word on the rest.

    A step that one of them lacks, or has not whole, is whole nowhere.
    """
    places = [{step.step: step for step in steps} for steps in seen]
    first = {number: step for place in reversed(places) for number, step in place.items()}
    return [
        dataclasses.replace(
            step,
            verified=all(number in place and place[number].verified for place in places),
            in_use=any(number in place and place[number].in_use for place in places),
        )
        for number, step in sorted(first.items())
    ]


def _seen(
    checkpoints: Path, branch: Branch, *, mirrored: bool, status: Mirrored | None
) -> list[KeptStep]:
    """Look at the steps here; a disk that cannot be read has none, so that nothing is removed."""
    try:
        return local_steps(checkpoints, branch, mirrored=mirrored, status=status)
    except OSError as error:
        logger.warning("%s cannot be read (%s): no step is removed.", checkpoints, error.strerror)
        return []


def _remove(checkpoints: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            with unused(checkpoints / name):
                remove_step(checkpoints / name)
        except (FileNotFoundError, BlockingIOError):
            continue  # another storage rank alone has it, or a reader has come meanwhile
        except OSError as error:
            logger.warning("%s could not be removed: %s", name, error)


def local_steps(
    checkpoints: Path, branch: Branch = FIRST_BRANCH, *, mirrored: bool, status: Mirrored | None
) -> list[KeptStep]:
    """Look at every checkpoint of a branch here; arguments as of `thin_out`."""
    paths = step_paths(checkpoints, branch)
    found = {step: _readable(path) for step, path in paths.items()}
    best = best_of(
        {
            read.step: read.manifest.validation_loss
            for read, whole in found.values()
            if whole and read is not None
        }
    )
    steps = []
    for step, (read, whole) in found.items():
        steps.append(
            KeptStep(
                step=step,
                verified=whole,
                tiers=frozenset(read.manifest.tiers if read else {SaveReason.ROLLING}),
                mirrored=_is_mirrored(step, status) if mirrored else None,
                skipped=status is not None and step in status.skipped,
                best=step == best,
                in_use=is_in_use(paths[step]),
            )
        )
    return steps


def disk_is_low(
    checkpoints: Path, branch: Branch = FIRST_BRANCH, *, saves: float = LOW_DISK_SAVES
) -> bool:
    """Whether the disk has less room than so many saves like the last one; unknown before one."""
    paths = list(step_paths(checkpoints, branch).values())
    sizes = [step.bytes for step, _ in map(_readable, paths[-1:]) if step]
    return shutil.disk_usage(checkpoints).free < saves * max(sizes, default=0)


def _is_mirrored(step: int, status: Mirrored | None) -> bool | None:
    if status is None:
        return False
    return None if step in status.unwanted else step in status.mirrored


def _readable(path: Path) -> tuple[StepDirectory | None, bool]:
    """Return a step, if its manifest can be read, and whether its files have their sizes."""
    try:
        step = read_step(path)
    except CheckpointError:
        return None, False
    return step, not verify(step, deep=False)
