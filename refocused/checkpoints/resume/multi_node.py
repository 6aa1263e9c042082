"""Select a checkpoint across machines with own disks: rank 0 decides, the others answer it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.download import fetch_step, is_copy_of
from refocused.checkpoints.step.step_directory import CHOOSE_ANOTHER, Checkpoint, Part, read_step
from refocused.checkpoints.step.verify import UNREADABLE, WHOLE, FileProblem, Found, is_part, verify
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

T = TypeVar("T")
Query = Callable[[Catalog, int], T]  # runs on each machine, with its catalog and node number


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
        self.two_heads = own.two_heads
        self._own = own
        self._world = world

    def problems(self, step: Checkpoint) -> list[FileProblem]:
        """Verify each machine's part by its checksums."""
        found = self._query(functools.partial(_problems, step.name))
        return [
            FileProblem(f"node {node}: {problem.file}", problem.problem)
            for node, problems in enumerate(found)
            for problem in problems
        ]

    def fetch(self, name: str, **_options: Any) -> Checkpoint:
        self._query(functools.partial(_fetch, name, machines=self._world.storage_ranks))
        return read_step(self.local / name)

    def here(self) -> dict[str, Found]:
        found = self._query(_here)
        names = {name for here in found for name in here}
        return {name: combine_parts([here.get(name) for here in found]) for name in names}

    def _query(self, query: Query[T]) -> list[T]:
        self._world.broadcast(query)
        return _answer(self._world, self._own, query)


def combine_parts(parts: Sequence[Found | None]) -> Found:
    """Combine the states of a checkpoint's parts, one per machine; None: it has no part."""
    there = [part for part in parts if part is not None]
    manifest = next((found.manifest for found in there if found.manifest is not None), None)
    for node, part in enumerate(parts):
        if part is None:
            return Found(f"broken: the part of node {node} is missing", manifest)
        if part.state.startswith(UNREADABLE):
            return Found(f"{part.state} (node {node})", manifest)
        if part.state != WHOLE and not is_part(part.state):
            return Found(f"broken: node {node}: {part.state.removeprefix('broken: ')}", manifest)
    if len({found.manifest_crc32c for found in there}) > 1:
        return Found("broken: the machines have parts of different saves", manifest)
    states = {found.state for found in there}
    nodes = len(parts)
    if WHOLE in states or states == {str(Part(node=n, nodes=nodes)) for n in range(nodes)}:
        return Found(WHOLE, manifest, manifest_crc32c=there[0].manifest_crc32c)
    return Found(f"broken: the machines have only {', '.join(sorted(states))}", manifest)


def _answer(world: World, catalog: Catalog | None, query: Query[T]) -> list[T]:
    """Run a query on every storage rank; return all answers; rank 0 raises the first error."""
    answer: T | None = None
    error: RefocusedError | None = None
    if catalog is not None:
        try:
            answer = query(catalog, world.storage_rank)
        except RefocusedError as raised:
            error = raised
    gathered = world.gather((world.is_storage_rank, world.storage_rank, answer, error))
    answers: list[Any] = sorted((one for one in gathered if one[0]), key=lambda one: one[1])
    for _, node, _, failed in answers if world.is_rank_0 else ():
        if failed is not None:
            raise type(failed)(f"node {node}: {failed}")
    return [found for _, _, found, _ in answers]


def _here(catalog: Catalog, _node: int) -> dict[str, Found]:
    return catalog.here()


def _problems(name: str, catalog: Catalog, _node: int) -> list[FileProblem]:
    return verify(read_step(catalog.local / name), deep=True)


def _fetch(name: str, catalog: Catalog, node: int, *, machines: int) -> None:
    """Download this machine's part, unless it has an intact one."""
    if catalog.remote is None:
        raise CheckpointError(
            f"{name} is incomplete on some machine, and the run has no mirror. {CHOOSE_ANOTHER}"
        )
    part = Part(node=node, nodes=machines)
    if not is_copy_of(catalog.local / name, catalog.remote.marker(name)):
        fetch_step(catalog.remote, name, checkpoints=catalog.local, part=part)
