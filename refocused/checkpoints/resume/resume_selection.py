"""Select the checkpoint to resume from, and the branch to continue on.

If the machines have disks of their own, rank 0 decides for all: it queries the others.
"""

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.checkpoints.step.checkpoint_directory import (
    Branch,
    Checkpoint,
    Part,
    branch_of,
    read_checkpoint,
    recorded_branch,
)
from refocused.checkpoints.step.verify import (
    ABSENT,
    UNREADABLE,
    WHOLE,
    CheckpointState,
    FileProblem,
    describe,
)
from refocused.system.errors import (
    BucketError,
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
    RefocusedError,
    as_typed,
)
from refocused.system.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")
Query = Callable[[Catalog], T]  # runs on each machine, with its catalog

OR_START = "or-start"  # `--resume-or-start`
NEWEST = ("auto", "latest", OR_START)  # what takes the newest usable checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint and branch that training starts from."""

    checkpoint: Checkpoint | None  # local and verified; None: from scratch
    branch: Branch  # a new one unless the checkpoint is the newest of the present branch
    corrupt: tuple[Path, ...] = ()  # unusable checkpoints on this disk, to set aside


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
    checkpoint, corrupt = None, list[str]()
    if request in NEWEST:
        try:
            checkpoint = newest(catalog, entries, corrupt, must_exist=request == "latest")
        except CorruptCheckpointError as error:
            if request != OR_START or catalog.remote is not mirror:  # that may have a whole one
                raise
            logger.warning("%s Starting FROM SCRATCH beside them, by --resume-or-start.", error)
            corrupt.clear()  # they stay, on a branch that the run leaves
    elif request != "none":
        remedy = " Choose another checkpoint, or the newest usable one with --resume latest."
        checkpoint = _verified(catalog, catalog.resolve(request), remedy=remedy)
    corrupt += [name for name in catalog.left_behind if name not in corrupt]
    if checkpoint is not None and checkpoint.name in corrupt:
        corrupt.remove(checkpoint.name)  # it has been downloaded
    branch = next_branch(present, entries, checkpoint, corrupt)
    return Selection(checkpoint, branch, tuple(catalog.local / name for name in corrupt))


def list_checkpoints(catalog: Catalog, request: str = "none") -> list[CatalogEntry]:
    """List the checkpoints; only the local ones if the bucket cannot be listed.

    Raises BucketError if those do not suffice for `request`.
    """
    try:
        return catalog.entries()
    except BucketError as error:
        catalog.remote = None
        local = catalog.entries()
        if request in NEWEST:
            suffice = any(entry.usable for entry in local)
        else:  # the best one may be remote
            suffice = request == "none"
            with contextlib.suppress(CheckpointError):
                suffice = suffice or (request != "best" and catalog.resolve(request).usable)
        if not suffice:
            raise BucketError(
                f"{error} No such checkpoint is on this disk, and the mirror may have one. Start "
                "again when the mirror can be read, or from step 0 with --resume none."
            ) from error
        logger.warning("%s Using only the checkpoints on this disk.", error)
        return local


def present_branch(catalog: Catalog, entries: Sequence[CatalogEntry]) -> Branch:
    """Return the present branch of a listed catalog, with the run's id, which may be a new one.

    Raises CheckpointError if disk and mirror hold different runs, or different heads of one.
    """
    if catalog.two_heads is not None:
        raise catalog.two_heads
    recorded = recorded_branch(catalog.local.parent)
    local = [entry.local_run_id for entry in entries if entry.local_run_id]
    remote = [entry.bucket_run_id for entry in entries if entry.bucket_run_id]
    run_id = (recorded.run_id if recorded is not None else "") or "".join(local[-1:])
    others = {*remote} - {run_id}
    if run_id and others and catalog.remote is not None:
        raise CheckpointError(
            f"{catalog.remote.url} has checkpoints of another run of this name (id "
            f"{min(others)}; the run in {catalog.local.parent} is {run_id}). Start this run with "
            "another --run NAME or another checkpoint.mirror. To continue the run in the mirror "
            f"instead, move {catalog.local.parent} away."
        )
    run_id = run_id or "".join(remote[-1:]) or secrets.token_hex(8)
    return catalog.branch.model_copy(update={"run_id": run_id})


def next_branch(
    present: Branch,
    entries: Sequence[CatalogEntry],
    checkpoint: Checkpoint | None,
    corrupt: Sequence[str] = (),
) -> Branch:
    """Return the present branch, or a new one if later checkpoints exist or were on it.

    Those named in `corrupt` do not count; they are replaced, but for those of an ancestor: its
    folder must not get steps of another branch.
    """
    number = 0 if checkpoint is None else checkpoint.step
    on_it = checkpoint is None or present.holder(number) == checkpoint.manifest.branch
    continues = on_it and present.holder(number + 1) == present.number  # not from an ancestor
    later = [e for e in entries if checkpoint is None or (e.is_present and e.step > number)]
    if continues and not any(  # an interrupted upload does not count
        (entry.local != ABSENT and entry.name not in corrupt)
        or (entry.bucket != ABSENT and not entry.bucket.endswith("%"))
        for entry in later
    ):
        return present
    highest = max([present.number, *(entry.branch for entry in entries)])
    base = present if on_it or checkpoint is None else branch_of(checkpoint.manifest)
    forked = base.fork(None if checkpoint is None else number, number=highest + 1)
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
        checkpoint = read_checkpoint(catalog.local / entry.name)
        problems = catalog.problems(entry.name)
        if not problems:
            return checkpoint
        if entry.bucket != WHOLE:
            raise CorruptCheckpointError(
                f"{checkpoint.path} is corrupt: {describe(problems)}.{remedy}"
            )
        logger.warning(
            "%s is corrupt: %s. Downloading it from the bucket.",
            checkpoint.path,
            describe(problems),
        )
    logger.info("Downloading %s from the bucket", entry.name)
    return catalog.fetch(entry.name, replace=True)


def decide_together(
    world: World, open_catalog: Callable[[], Catalog], decide: Callable[[Catalog], T]
) -> T:
    """Run `decide` on rank 0 with a catalog of all machines; return its result on every rank.

    If all machines share one disk, this is the plain catalog. Collective: every rank calls, and
    an error is raised on every rank.
    """
    if world.storage_ranks == 1:
        return world.on_rank_0(lambda: decide(open_catalog()))
    catalog = world.on_all_ranks(lambda: open_catalog() if world.is_storage_rank else None)
    if catalog is not None:
        catalog.part = Part(node=world.storage_rank, nodes=world.storage_ranks)

    def query_and_decide() -> T:
        assert catalog is not None  # rank 0 is a storage rank
        try:
            return decide(_MachinesCatalog(catalog, world))
        finally:
            world.broadcast(None)  # no further query

    if not world.is_rank_0:
        while (query := world.broadcast(None)) is not None:
            _answer(world, catalog, query)
    return world.on_rank_0(query_and_decide)


class _MachinesCatalog(Catalog):
    """The checkpoints of all machines together; used on rank 0 while the others answer queries."""

    def __init__(self, own: Catalog, world: World) -> None:
        self.local, self.remote, self.branch = own.local, own.remote, own.branch
        self.part, self.two_heads = own.part, own.two_heads
        self._own = own
        self._world = world

    def problems(self, name: str) -> list[FileProblem]:
        """Verify each machine's part by its checksums."""
        machines: list[list[FileProblem]] = self._query(methodcaller("problems", name))
        return [
            FileProblem(f"node {node}: {problem.file}", problem.problem)
            for node, problems in enumerate(machines)
            for problem in problems
        ]

    def fetch(self, name: str, **_options: Any) -> Checkpoint:
        self._query(methodcaller("fetch", name, replace=True))
        return read_checkpoint(self.local / name)

    def local_states(self) -> Mapping[str, CheckpointState]:
        machines: list[Mapping[str, CheckpointState]] = self._query(methodcaller("local_states"))
        names = {name for states in machines for name in states}
        return {n: combine_parts([states.get(n) for states in machines]) for n in names}

    def _query(self, query: Query[T]) -> list[T]:
        self._world.broadcast(query)
        return _answer(self._world, self._own, query)


def combine_parts(parts: Sequence[CheckpointState | None]) -> CheckpointState:
    """Combine the states of a checkpoint's parts, one per machine; None: it has no part."""
    present = [part for part in parts if part is not None]
    manifest = next((part.manifest for part in present if part.manifest is not None), None)
    for node, part in enumerate(parts):
        if part is None:
            return CheckpointState(f"broken: the part of node {node} is missing", manifest)
        if part.state.startswith(UNREADABLE):
            return CheckpointState(f"{part.state} (node {node})", manifest)
        if not part.is_whole:
            what = f"broken: node {node}: {part.state.removeprefix('broken: ')}"
            return CheckpointState(what, manifest)
    if len({part.manifest_crc32c for part in present}) > 1:
        return CheckpointState("broken: the machines have parts of different saves", manifest)
    states = {part.state for part in present}
    nodes = len(parts)
    if WHOLE in states or states == {str(Part(node=n, nodes=nodes)) for n in range(nodes)}:
        return CheckpointState(WHOLE, manifest, present[0].manifest_crc32c)
    return CheckpointState(f"broken: the machines have only {', '.join(sorted(states))}", manifest)


def _answer(world: World, catalog: Catalog | None, query: Query[T]) -> list[T]:
    """Run a query on every storage rank; return all answers; rank 0 raises the first error."""
    answer: T | None = None
    error: RefocusedError | None = None
    if catalog is not None:
        try:
            answer = query(catalog)
        except RefocusedError as raised:
            error = raised
    gathered = world.gather((world.is_storage_rank, world.storage_rank, answer, error))
    by_node: dict[int, Any] = {n: (a, e) for is_storage, n, a, e in gathered if is_storage}
    for node in sorted(by_node) if world.is_rank_0 else ():
        if (failed := by_node[node][1]) is not None:
            raise type(failed)(f"node {node}: {failed}")
    return [by_node[node][0] for node in sorted(by_node)]
