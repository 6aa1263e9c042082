"""Choosing a step where each machine has its part: rank 0 decides, and asks all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from refocused.bucket.checksum import crc32c_of
from refocused.bucket.transfer import Progress
from refocused.checkpoints.catalog import Catalog
from refocused.checkpoints.fetch import fetch_step
from refocused.checkpoints.manifest import MANIFEST
from refocused.checkpoints.remote_steps import Marker
from refocused.checkpoints.step_directory import (
    Part,
    StepDirectory,
    name_of,
    read_step,
    step_paths,
)
from refocused.checkpoints.step_state import WHOLE, Found, is_part
from refocused.checkpoints.verify import FileProblem, verify
from refocused.errors import CheckpointError, RefocusedError
from refocused.world import World

T = TypeVar("T")
Question = Callable[[Catalog, int], Any]  # of a machine's own catalog, and its number


def decide_together(
    world: World, open_catalog: Callable[[], Catalog], decide: Callable[[Catalog], T]
) -> T:
    """Let rank 0 decide with a catalog of what all machines hold; every rank must call.

    Where all share one disk, it is the plain catalog, and nobody else is asked.

    Args:
        world: The ranks.
        open_catalog: Opens the plain catalog of this rank's disk.
        decide: Called on rank 0 alone; every rank gets its result or its error.
    """
    if world.keepers == 1:
        return world.first_does(lambda: decide(open_catalog()))
    catalog = world.together(lambda: open_catalog() if world.keeps else None)

    def ask_and_decide() -> T:
        assert catalog is not None  # rank 0 keeps
        try:
            return decide(MachinesCatalog(catalog, world))
        finally:
            world.broadcast(None)  # there is no further question

    if not world.is_first:
        while (question := world.broadcast(None)) is not None:
            _answer(world, catalog, question)
    return world.first_does(ask_and_decide)


class MachinesCatalog(Catalog):
    """What all machines of a run hold together; rank 0 has it while the others answer it."""

    def __init__(self, own: Catalog, world: World) -> None:
        """Ask the others in place of `own`, the catalog of this machine."""
        self.local, self.remote = own.local, own.remote
        self._own = own
        self._world = world

    def local_only(self) -> Catalog:
        """The same without the bucket."""
        return MachinesCatalog(Catalog(self.local), self._world)

    def problems(self, step: StepDirectory) -> list[FileProblem]:
        """Let each machine read every byte of its part; return what is wrong with all of them."""
        found = self._ask(functools.partial(_problems, step.path.name))
        return [
            FileProblem(f"node {node}: {problem.file}", problem.problem)
            for node, problems in enumerate(found)
            for problem in problems
        ]

    def fetch(
        self,
        step: int,
        *,
        threads: int = 8,
        progress: Callable[[Progress], None] | None = None,
        replace: bool = False,
    ) -> StepDirectory:
        """Let each machine fetch its part, unless it has it; arguments as of `Catalog`."""
        keepers = self._world.keepers
        self._ask(functools.partial(_fetch, name_of(step), keepers=keepers, threads=threads))
        return read_step(self.local / name_of(step))

    def here(self) -> dict[int, Found]:
        """Judge the parts of every step together."""
        looks = self._ask(_look)
        steps = sorted({step for look in looks for step in look})
        return {step: together([look.get(step) for look in looks]) for step in steps}

    def _ask(self, question: Callable[[Catalog, int], T]) -> list[T]:
        """Return every machine's answer.

        Raises:
            RefocusedError: The first one that a machine answers with.
        """
        self._world.broadcast(question)
        return _answer(self._world, self._own, question)


def together(parts: Sequence[tuple[Found, int] | None]) -> Found:
    """Judge a step by what each machine says of its part.

    Args:
        parts: Of each machine: what it found, and the CRC-32C of its manifest; None: nothing.
    """
    there = [part for part in parts if part is not None]
    manifest = next((found.manifest for found, _ in there if found.manifest is not None), None)
    for node, part in enumerate(parts):
        if part is None:
            return Found(f"broken: node {node} has no part of it", manifest)
        state = part[0].state
        if state != WHOLE and not is_part(state):
            return Found(f"broken: node {node}: {state.removeprefix('broken: ')}", manifest)
    if len({crc32c for _, crc32c in there}) > 1:
        return Found("broken: the machines hold different saves of it", manifest)
    states = {found.state for found, _ in there}
    if WHOLE in states or states == {
        str(Part(node=n, nodes=len(parts))) for n in range(len(parts))
    }:
        return Found(WHOLE, manifest)
    return Found(f"broken: the machines hold {', '.join(sorted(states))} alone", manifest)


def _answer(world: World, catalog: Catalog | None, question: Question) -> list[Any]:
    """Answer a question on every machine; return all answers on every rank."""
    answer: Any = None
    error: RefocusedError | None = None
    if catalog is not None:
        try:
            answer = question(catalog, world.keeper)
        except RefocusedError as raised:
            error = raised
    told = world.gather((world.keeps, world.keeper, answer, error))
    answers = sorted((one for one in told if one[0]), key=lambda one: one[1])
    for _, keeper, _, failed in answers if world.is_first else ():
        if failed is not None:
            raise type(failed)(f"node {keeper}: {failed}")
    return [found for _, _, found, _ in answers]


def _look(catalog: Catalog, _node: int) -> dict[int, tuple[Found, int]]:
    """What this machine has; each with its manifest's checksum, 0 where it has none."""
    crcs = {
        path.name: crc32c_of(path / MANIFEST) if (path / MANIFEST).is_file() else 0
        for path in step_paths(catalog.local)
    }
    return {step: (found, crcs.get(name_of(step), 0)) for step, found in catalog.here().items()}


def _problems(name: str, catalog: Catalog, _node: int) -> list[FileProblem]:
    return verify(read_step(catalog.local / name), deep=True)


def _fetch(name: str, catalog: Catalog, node: int, *, keepers: int, threads: int) -> None:
    """Fetch this machine's part, unless it has it, every byte right."""
    if catalog.remote is None:
        raise CheckpointError(
            f"{name} is not whole on all machines and there is no mirror that has it. "
            "Choose another step: python launch/checkpoints.py list"
        )
    if not _has_part(name, catalog.local, catalog.remote.marker(name)):
        part = Part(node=node, nodes=keepers)
        fetch_step(catalog.remote, name, checkpoints=catalog.local, part=part, threads=threads)


def _has_part(name: str, checkpoints: Path, marker: Marker | None) -> bool:
    """Whether what is here is, every byte, of the step that the mirror has."""
    path = checkpoints / name
    try:
        step = read_step(path)
    except CheckpointError:
        return False
    same = marker is not None and marker.manifest_crc32c == crc32c_of(path / MANIFEST)
    return same and not verify(step, deep=True)
