"""Select the checkpoint to resume from, and the branch to continue on."""

import dataclasses
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.checkpoints.step.branches import Branch, branch_of, recorded_branch
from refocused.checkpoints.step.step_directory import Checkpoint, read_step
from refocused.checkpoints.step.verify import ABSENT, UNREADABLE, WHOLE, describe
from refocused.system.errors import (
    BucketError,
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
    as_typed,
)

logger = logging.getLogger(__name__)

OR_START = "or-start"  # `--resume-or-start`
NEWEST = ("auto", "latest", OR_START)  # what takes the newest usable checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint and branch that training starts from."""

    step: Checkpoint | None  # local and verified; None: from scratch
    branch: Branch  # a new one unless the checkpoint is the newest of the present branch
    corrupt: tuple[Path, ...] = ()  # newer, unusable checkpoints on this disk


def select_checkpoint(catalog: Catalog, request: str) -> Selection:
    """Select a local, verified checkpoint, and the branch to continue on.

    `auto` and `latest` take the newest usable checkpoint of the present branch and skip corrupt
    ones with a warning. If the run has no checkpoint yet, `auto` selects none and `latest` raises.
    `or-start` is `auto`, but starts from scratch if all are corrupt. `none` starts from scratch;
    any other request names one checkpoint. A checkpoint that is complete only in the bucket is
    downloaded first.

    Raises:
        CheckpointError: The requested checkpoint is missing or corrupt, none is usable, or one
            cannot be read but is not proven corrupt, which is never a reason to skip it.
        BucketError: The bucket cannot be read and there is no local checkpoint.
    """
    mirror, entries = catalog.remote, list_checkpoints(catalog, request)
    present = present_branch(catalog, entries)
    step, corrupt = None, list[str]()
    if request in NEWEST:
        try:
            step = newest(catalog, entries, corrupt, must_exist=request == "latest")
        except CorruptCheckpointError as error:
            if request != OR_START or catalog.remote is not mirror:  # that may have a whole one
                raise
            logger.warning("%s Starting FROM SCRATCH beside them, by --resume-or-start.", error)
            corrupt.clear()  # they stay, on a branch that the run leaves
    elif request != "none":
        remedy = " Choose another checkpoint, or the newest usable one with --resume latest."
        step = _verified(catalog, catalog.resolve(request), remedy=remedy)
    branch = next_branch(present, entries, step, corrupt)
    return Selection(step, branch, tuple(catalog.local / name for name in corrupt))


def list_checkpoints(catalog: Catalog, request: str = "none") -> list[CatalogEntry]:
    """List the checkpoints; only the local ones if the bucket cannot be listed.

    Raises BucketError if those do not suffice for `request`.
    """
    try:
        return catalog.entries()
    except BucketError as error:
        catalog.remote = None
        here = catalog.entries()
        if not _answers(catalog, here, request):
            raise BucketError(
                f"{error} No such checkpoint is on this disk, and the mirror may have one. Start "
                "again when the mirror can be read, or from step 0 with --resume none."
            ) from error
        logger.warning("%s Using only the checkpoints on this disk.", error)
        return here


def _answers(local: Catalog, entries: Sequence[CatalogEntry], request: str) -> bool:
    """Whether the local checkpoints suffice for a request; not for `best`, which may be remote."""
    if request in NEWEST:
        return any(entry.usable for entry in entries)
    try:
        return request == "none" or (request != "best" and local.resolve(request).usable)
    except CheckpointError:
        return False


def present_branch(catalog: Catalog, entries: Sequence[CatalogEntry]) -> Branch:
    """Return the present branch of a listed catalog, with the run's id, which may be a new one.

    Raises CheckpointError if disk and mirror hold different runs, or different heads of one.
    """
    if catalog.two_heads is not None:
        raise catalog.two_heads
    known = recorded_branch(catalog.local.parent)
    here = [entry.local_run_id for entry in entries if entry.local_run_id]
    there = [entry.bucket_run_id for entry in entries if entry.bucket_run_id]
    own = (known.run_id if known is not None else "") or "".join(here[-1:])
    others = {*there} - {own}
    if own and others and catalog.remote is not None:
        raise CheckpointError(
            f"{catalog.remote.url} has checkpoints of another run of this name (id "
            f"{min(others)}; the run in {catalog.local.parent} is {own}). Start this run with "
            "another --run NAME or another checkpoint.mirror. To continue the run in the mirror "
            f"instead, move {catalog.local.parent} away."
        )
    run_id = own or "".join(there[-1:]) or secrets.token_hex(8)
    return catalog.branch.model_copy(update={"run_id": run_id})


def next_branch(
    present: Branch,
    entries: Sequence[CatalogEntry],
    step: Checkpoint | None,
    corrupt: Sequence[str] = (),
) -> Branch:
    """Return the present branch, or a new one if later checkpoints exist on it.

    Those named in `corrupt` do not count; they are replaced.
    """
    number = 0 if step is None else step.step
    on_it = step is None or present.holder(number) == step.manifest.branch
    later = [e for e in entries if step is None or (e.is_present and e.step > number)]
    completed = [  # an interrupted upload does not count
        e
        for e in later
        if (e.local != ABSENT and e.name not in corrupt)
        or (e.bucket != ABSENT and not e.bucket.endswith("%"))
    ]
    if on_it and not completed:
        return present
    highest = max([present.number, *(entry.branch for entry in entries)])
    base = present if on_it or step is None else branch_of(step.manifest)
    forked = base.fork(None if step is None else number, number=highest + 1)
    logger.info(
        "  branch   %d of this run begins at step %d; later checkpoints of other branches are kept",
        forked.number,
        number,
    )
    return forked.model_copy(update={"run_id": present.run_id})


def newest(
    catalog: Catalog, entries: Sequence[CatalogEntry], corrupt: list[str], *, must_exist: bool
) -> Checkpoint | None:
    """Return the newest usable checkpoint; append the skipped local ones to `corrupt`."""
    present = [entry for entry in entries if entry.is_present]
    for entry in reversed(present):
        notes = "; ".join(entry.notes)
        if any(state.startswith(UNREADABLE) for state in (entry.local, entry.bucket)):
            raise CheckpointUnavailableError(
                f"{entry.name} cannot be read: {notes}. It is not proven corrupt, so no earlier "
                "checkpoint is used. Repair this, or name a checkpoint with --resume."
            )
        try:
            if entry.usable:
                return _verified(catalog, entry)
            logger.warning("Skipping %s: %s. Trying the checkpoint before it.", entry.name, notes)
        except CorruptCheckpointError as error:
            logger.warning("%s Trying the checkpoint before it.", error)
        if entry.local != ABSENT:
            corrupt.append(entry.name)
    if present:
        raise CorruptCheckpointError(
            f"No usable checkpoint in {catalog.local}: all {len(present)} are corrupt (newest: "
            f"{present[-1].name}, {'; '.join(present[-1].notes) or 'corrupt'}). Inspect them with "
            f"{as_typed('checkpoints verify all')}, or start a new run with --run NAME."
        )
    if must_exist:
        raise CheckpointError(
            f"No checkpoint in {catalog.local} to resume from. Start with --resume auto or none."
        )
    return None


def _verified(catalog: Catalog, entry: CatalogEntry, *, remedy: str = "") -> Checkpoint:
    """Return a usable checkpoint, verified; download it if the disk has no intact copy."""
    if entry.local == WHOLE:
        step = read_step(catalog.local / entry.name)
        problems = catalog.problems(step)
        if not problems:
            return step
        if entry.bucket != WHOLE:
            raise CorruptCheckpointError(f"{step.path} is corrupt: {describe(problems)}.{remedy}")
        logger.warning(
            "%s is corrupt: %s. Downloading it from the bucket.", step.path, describe(problems)
        )
    logger.info("Downloading %s from the bucket", entry.name)
    return catalog.fetch(entry.name, replace=True)
