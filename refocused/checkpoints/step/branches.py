"""Branches of a run, and the checkpoint directories of each branch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic

from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, Parent
from refocused.checkpoints.step.step_directory import name_of, parse_place, read_step
from refocused.system.atomic_files import read_regular
from refocused.system.errors import CheckpointError
from refocused.system.strict_json import parse_json_object


class Branch(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The steps that led to the present one; resuming an earlier checkpoint starts a new branch."""

    run_id: str = ""
    number: Annotated[int, pydantic.Field(ge=1)] = 1
    # (number, last step used) of each ancestor branch, oldest first.
    ancestry: tuple[tuple[int, int], ...] = ()
    parent: Parent | None = None  # where the steps before the first ancestor are from

    def __str__(self) -> str:
        """Return its number and where it began."""
        begins = f" (from step {self.ancestry[-1][1]:,})" if self.ancestry else ""
        return f"branch {self.number}{begins}"

    def holder(self, step: int) -> int:
        """Return the number of the branch whose folder holds `step` of this branch."""
        return next((number for number, last in self.ancestry if step <= last), self.number)

    def name_of(self, step: int) -> str:
        """Return the path of a checkpoint below the run's `checkpoints` folder."""
        return name_of(step, branch=self.holder(step))

    def step_of(self, name: str) -> int | None:
        """Return the step of a checkpoint's path; None if it is not on this branch."""
        place = parse_place(name)
        return place[1] if place is not None and self.holder(place[1]) == place[0] else None

    def fork(self, step: int | None, *, number: int) -> Branch:
        """Return the branch that continues from `step` of this one, or from scratch if None."""
        ancestry: tuple[tuple[int, int], ...] = ()
        if step is not None:
            older = tuple((ancestor, last) for ancestor, last in self.ancestry if last < step)
            ancestry = (*older, (self.holder(step), step))
        parent = None if step is None else self.parent
        return Branch(run_id=self.run_id, number=number, ancestry=ancestry, parent=parent)

    def as_record(self) -> dict[str, Any]:
        """Return the entries of `state.json` that `recorded_branch` reads."""
        return {
            "run_id": self.run_id,  # drawn at the run's first start
            "branch": self.number,  # that the run is on
            "ancestry": self.ancestry,  # [branch, last step taken from it], oldest first
            "parent": self.parent and self.parent.model_dump(),  # checkpoint it started from
        }


FIRST_BRANCH = Branch()


def branch_of(manifest: CheckpointManifest) -> Branch:
    """Return the branch that a checkpoint is on."""
    return Branch(
        run_id=manifest.run_id,
        number=manifest.branch,
        ancestry=manifest.ancestry,
        parent=manifest.parent,
    )


def recorded_branch(run: Path) -> Branch | None:
    """Return the branch in a run's `state.json`; None if it is unreadable or has none."""
    try:
        state = parse_json_object(read_regular(run / "state.json"))
        return Branch(
            run_id=state["run_id"],
            number=state["branch"],
            ancestry=state["ancestry"],
            parent=state.get("parent"),
        )
    except (OSError, ValueError, KeyError):
        return None


def present_branch(checkpoints: Path) -> Branch:
    """Return the recorded branch of a run, else that of its last readable checkpoint."""
    recorded = recorded_branch(checkpoints.parent)
    if recorded is not None:
        return recorded
    for path in reversed(checkpoint_paths(checkpoints).values()):
        try:
            return branch_of(read_step(path).manifest)
        except CheckpointError:
            continue
    return FIRST_BRANCH


def checkpoint_paths(checkpoints: Path) -> dict[str, Path]:
    """Return all checkpoint directories, whole or broken, by name, in order of branch and step."""
    if not checkpoints.is_dir():
        return {}
    folders = [checkpoints, *checkpoints.glob("branch-*")]
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    found = {
        place: path
        for path in paths
        if (place := parse_place(path.relative_to(checkpoints).as_posix())) and path.is_dir()
    }
    return {name_of(step, branch=branch): found[branch, step] for branch, step in sorted(found)}


def step_paths(checkpoints: Path, branch: Branch | None = None) -> dict[int, Path]:
    """Return the checkpoints of a branch (default: the present one) by step, ascending."""
    branch = present_branch(checkpoints) if branch is None else branch
    found = checkpoint_paths(checkpoints)
    steps = {step: name for name in found if (step := branch.step_of(name)) is not None}
    return {step: found[steps[step]] for step in sorted(steps)}


def saved_steps(checkpoints: Path, branch: Branch | None = None) -> list[int]:
    """Return the steps of `step_paths`."""
    return list(step_paths(checkpoints, branch))
