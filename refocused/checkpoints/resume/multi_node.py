"""Select a step where each machine has its part: rank 0 decides, and questions all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.download import fetch_step, is_copy_of
from refocused.checkpoints.step.step_directory import CHOOSE_ANOTHER, Part, StepDirectory, read_step
from refocused.checkpoints.step.verify import UNREADABLE, WHOLE, FileProblem, Found, is_part, verify
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

T = TypeVar("T")
Question = Callable[[Catalog, int], T]  # of a machine's own catalog, and its number


def decide_together(
    world: World, open_catalog: Callable[[], Catalog], decide: Callable[[Catalog], T]
) -> T:
    """Let rank 0 decide with a catalog of what all machines hold; every rank must call.

    Where all share one disk, it is the plain catalog, and no other rank is questioned. Every rank
    gets the decision or its error.
    """
    if world.storage_ranks == 1:
        return world.on_rank_0(lambda: decide(open_catalog()))
    catalog = world.on_all_ranks(lambda: open_catalog() if world.is_storage_rank else None)

    def question_and_decide() -> T:
        assert catalog is not None  # rank 0 is a storage rank
        try:
            return decide(_MachinesCatalog(catalog, world))
        finally:
            world.broadcast(None)  # there is no further question

    if not world.is_rank_0:
        while (question := world.broadcast(None)) is not None:
            _answer(world, catalog, question)
    return world.on_rank_0(question_and_decide)


class _MachinesCatalog(Catalog):
    """What all machines of a run hold together; rank 0 has it while the others answer it."""

    def __init__(self, own: Catalog, world: World) -> None:
        self.local, self.remote, self.branch = own.local, own.remote, own.branch
        self._own = own
        self._world = world

    def local_only(self) -> Catalog:
        return _MachinesCatalog(Catalog(self.local), self._world)

    def problems(self, step: StepDirectory) -> list[FileProblem]:
        """Let each machine read every byte of its part."""
        found = self._ask(functools.partial(_problems, step.name))
        return [
            FileProblem(f"node {node}: {problem.file}", problem.problem)
            for node, problems in enumerate(found)
            for problem in problems
        ]

    def fetch(self, name: str, **_options: Any) -> StepDirectory:
        self._ask(functools.partial(_fetch, name, machines=self._world.storage_ranks))
        return read_step(self.local / name)

    def here(self) -> dict[str, Found]:
        looks = self._ask(_look)
        names = {name for look in looks for name in look}
        return {name: judge_parts([look.get(name) for look in looks]) for name in names}

    def _ask(self, question: Question[T]) -> list[T]:
        self._world.broadcast(question)
        return _answer(self._world, self._own, question)


def judge_parts(parts: Sequence[Found | None]) -> Found:
    """Judge a checkpoint by what each machine found of its part; None: nothing."""
    there = [part for part in parts if part is not None]
    manifest = next((found.manifest for found in there if found.manifest is not None), None)
    for node, part in enumerate(parts):
        if part is None:
            return Found(f"broken: node {node} has no part of it", manifest)
        if part.state.startswith(UNREADABLE):
            return Found(f"{part.state} (node {node})", manifest)
        if part.state != WHOLE and not is_part(part.state):
            return Found(f"broken: node {node}: {part.state.removeprefix('broken: ')}", manifest)
    if len({found.manifest_crc32c for found in there}) > 1:
        return Found("broken: the machines hold different saves of it", manifest)
    states = {found.state for found in there}
    nodes = len(parts)
    if WHOLE in states or states == {str(Part(node=n, nodes=nodes)) for n in range(nodes)}:
        return Found(WHOLE, manifest, manifest_crc32c=there[0].manifest_crc32c)
    return Found(f"broken: the machines hold {', '.join(sorted(states))} alone", manifest)


def _answer(world: World, catalog: Catalog | None, question: Question[T]) -> list[T]:
    """Answer on every machine; return all answers on every rank, or raise the first error."""
    answer: T | None = None
    error: RefocusedError | None = None
    if catalog is not None:
        try:
            answer = question(catalog, world.storage_rank)
        except RefocusedError as raised:
            error = raised
    gathered = world.gather((world.is_storage_rank, world.storage_rank, answer, error))
    answers: list[Any] = sorted((one for one in gathered if one[0]), key=lambda one: one[1])
    for _, node, _, failed in answers if world.is_rank_0 else ():
        if failed is not None:
            raise type(failed)(f"node {node}: {failed}")
    return [found for _, _, found, _ in answers]


def _look(catalog: Catalog, _node: int) -> dict[str, Found]:
    return catalog.here()


def _problems(name: str, catalog: Catalog, _node: int) -> list[FileProblem]:
    return verify(read_step(catalog.local / name), deep=True)


def _fetch(name: str, catalog: Catalog, node: int, *, machines: int) -> None:
    """Fetch this machine's part, unless it has it, every byte right."""
    if catalog.remote is None:
        raise CheckpointError(
            f"{name} is not whole on all machines and there is no mirror that has it. "
            f"{CHOOSE_ANOTHER}"
        )
    part = Part(node=node, nodes=machines)
    if not is_copy_of(catalog.local / name, catalog.remote.marker(name)):
        fetch_step(catalog.remote, name, checkpoints=catalog.local, part=part)
