"""Which step a run resumes from: found here or in the bucket, and verified before it is used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from refocused.checkpoints.catalog import Catalog, CatalogEntry, ResolvedStep
from refocused.checkpoints.step_directory import StepDirectory, read_step
from refocused.checkpoints.step_state import ABSENT, LEFT_BEHIND, WHOLE
from refocused.checkpoints.verify import FileProblem, describe
from refocused.errors import BucketError, CheckpointError

logger = logging.getLogger(__name__)


def choose_step(
    catalog: Catalog, request: str, *, passed_over: list[Path] | None = None
) -> StepDirectory | None:
    """Return a local, verified step to resume from; None to start from scratch.

    `auto` takes the newest good step, or none when there has never been one; `latest` insists on
    one; both go back to the one before when the newest is corrupt. Anything else names one step.
    A step that is only in the bucket, or is corrupt here and whole there, is downloaded.

    Args:
        catalog: The run's steps, here and in the bucket.
        request: `auto`, `latest`, `best`, `none`, a step, a name or a path.
        passed_over: Gets the path of each step here that is newer than the chosen one and corrupt.

    Raises:
        CheckpointError: The named step does not exist or is corrupt, or every step is.
        BucketError: The bucket cannot be read, and no step is here.
    """
    if request == "none":
        return None
    if request not in ("auto", "latest"):
        return _named(catalog, request)
    entries = _entries(catalog)
    for entry in reversed(entries):
        try:
            if entry.usable:
                return _verified(catalog, entry)
            _tell_passed_over(entry)
        except CheckpointError as error:
            logger.warning("%s The step before it is tried.", error)
        if passed_over is not None and entry.local != ABSENT:
            passed_over.append(catalog.local / entry.name)
    if entries:
        raise CheckpointError(
            f"None of the {len(entries)} checkpoints in {catalog.local} can be used (the newest: "
            f"{entries[-1].name}, {'; '.join(entries[-1].notes) or 'corrupt'}). Look at them with "
            "launch/checkpoints.py list, or start anew under another --run name."
        )
    if request == "latest":
        raise CheckpointError(
            f"There is no checkpoint in {catalog.local} to resume from. Start with --resume auto "
            "or none."
        )
    return None


def _tell_passed_over(entry: CatalogEntry) -> None:
    """Say why a step is not even tried; one that was left behind on purpose needs no word."""
    if entry.bucket != LEFT_BEHIND or entry.local != ABSENT:
        logger.warning(
            "%s cannot be used: %s. The step before it is tried.",
            entry.name,
            "; ".join(entry.notes),
        )


def _entries(catalog: Catalog) -> list[CatalogEntry]:
    """List the steps; a bucket that cannot be listed is done without when this disk has one.

    Raises:
        BucketError: It cannot be listed, and nothing here tells how far the run had come.
    """
    try:
        return catalog.entries()
    except BucketError as error:
        here = catalog.local_only().entries()
        if not any(entry.usable for entry in here):
            raise BucketError(
                f"{error} No checkpoint is on this disk, and whether the mirror has one is not "
                "known. Start again when it can be read, or from step 0 with --resume none."
            ) from error
        logger.warning("%s Only the checkpoints on this disk are looked at.", error)
        catalog.remote = None
        return here


def _named(catalog: Catalog, request: str) -> StepDirectory:
    found = _resolved(catalog, request)
    if found.path is None:
        return _fetched(catalog, found.step)
    step = read_step(found.path)
    problems = catalog.problems(step)
    if problems and "/" not in request and _in_bucket(catalog, found.step):
        return _fetched_again(catalog, step, problems)
    if problems:
        raise CheckpointError(
            f"{step.path} is corrupt: {describe(problems)}. Choose another step, or --resume "
            "latest, which goes back to the newest good one."
        )
    return step


def _resolved(catalog: Catalog, request: str) -> ResolvedStep:
    """Find what is meant; a bucket that is down does not hide a step of that number on this disk.

    Which step is the best cannot be said without it.
    """
    try:
        return catalog.resolve(request)
    except BucketError as error:
        if request == "best":
            raise
        try:
            found = catalog.local_only().resolve(request)
        except CheckpointError:
            raise error from None
        logger.warning("%s Only the checkpoints on this disk are looked at.", error)
        catalog.remote = None
        return found


def _in_bucket(catalog: Catalog, step: int) -> bool:
    return any(entry.step == step and entry.bucket == WHOLE for entry in catalog.entries())


def _verified(catalog: Catalog, entry: CatalogEntry) -> StepDirectory:
    if entry.local == WHOLE:
        step = read_step(catalog.local / entry.name)
        problems = catalog.problems(step)
        if not problems:
            return step
        if entry.bucket != WHOLE:
            raise CheckpointError(f"{step.path} is corrupt: {describe(problems)}.")
        return _fetched_again(catalog, step, problems)
    return _fetched(catalog, entry.step)


def _fetched_again(
    catalog: Catalog, step: StepDirectory, problems: Sequence[FileProblem]
) -> StepDirectory:
    logger.warning(
        "%s is corrupt: %s. It is fetched from the bucket again.", step.path, describe(problems)
    )
    return _fetched(catalog, step.step)


def _fetched(catalog: Catalog, step: int) -> StepDirectory:
    logger.info("Fetching step %s from the bucket", f"{step:,}")
    return catalog.fetch(step, replace=True)
