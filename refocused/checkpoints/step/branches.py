"""Branches of a run: which checkpoints led to the present one, and where each of them lies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic

from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest
from refocused.checkpoints.step.step_directory import name_of, parse_place, read_step
from refocused.system.errors import CheckpointError
from refocused.system.strict_json import parse_json_object


class Branch(pydantic.BaseModel):
    """The steps that led to the present one; going back to an earlier one starts a new branch."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run_id: str = ""  # empty in the first schema
    number: Annotated[int, pydantic.Field(ge=1)] = 1
    # For each ancestor, oldest first, its number and the last step taken from it.
    ancestry: tuple[tuple[int, int], ...] = ()

    def holder(self, step: int) -> int:
        """Return the number of the branch whose folder has a step of this branch."""
        return next((number for number, last in self.ancestry if step <= last), self.number)

    def name_of(self, step: int) -> str:
        """Return the name of a step's directory below the folder of the checkpoints."""
        return name_of(step, branch=self.holder(step))

    def step_of(self, name: str) -> int | None:
        """Return the step of a directory name; None: it is not on this branch."""
        place = parse_place(name)
        return place[1] if place is not None and self.holder(place[1]) == place[0] else None

    def fork(self, step: int | None, *, number: int) -> Branch:
        """Return the branch that continues from a step of this one; None: it starts anew."""
        ancestry: tuple[tuple[int, int], ...] = ()
        if step is not None:
            older = tuple((ancestor, last) for ancestor, last in self.ancestry if last < step)
            ancestry = (*older, (self.holder(step), step))
        return Branch(run_id=self.run_id, number=number, ancestry=ancestry)

    def as_record(self) -> dict[str, Any]:
        """Return the entries of `state.json` that `recorded_branch` reads."""
        return {"run_id": self.run_id, "branch": self.number, "ancestry": self.ancestry}


FIRST_BRANCH = Branch()


def branch_of(manifest: CheckpointManifest) -> Branch:
    """Return the branch that a checkpoint is on."""
    return Branch(run_id=manifest.run_id, number=manifest.branch, ancestry=manifest.ancestry)


def recorded_branch(run: Path) -> Branch | None:
    """Return the branch that a run's `state.json` names; None: it cannot be read, or names none."""
    try:
        state = parse_json_object((run / "state.json").read_bytes())
        return Branch(run_id=state["run_id"], number=state["branch"], ancestry=state["ancestry"])
    except (OSError, ValueError, KeyError):
        return None


def present_branch(checkpoints: Path) -> Branch:
    """Return a run's present branch: the recorded one, else that of the last readable step."""
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
    """Return every checkpoint directory, whole or broken, by name; by branch and step ascending."""
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
    """Return the directories of a branch (None: the present one) by step, ascending."""
    branch = present_branch(checkpoints) if branch is None else branch
    found = checkpoint_paths(checkpoints)
    steps = {step: name for name in found if (step := branch.step_of(name)) is not None}
    return {step: found[steps[step]] for step in sorted(steps)}


def saved_steps(checkpoints: Path, branch: Branch | None = None) -> list[int]:
    """Return the steps of `step_paths`."""
    return list(step_paths(checkpoints, branch))
