"""Checkpoints on disk: names, files and branches, and a lock against removal while one is read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic

from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    Parent,
    checked_manifest,
)
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.atomic_files import read_regular
from refocused.system.errors import (
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
    as_typed,
)
from refocused.system.strict_json import MalformedError, parse_json_object

PART = "part.json"
# Present on every machine: the training state (step, position, best loss, cost), the resolved run
# file, the model's shape as a transformers config, and a `tokenizers` file if there is a tokenizer.
DESCRIPTIONS = frozenset({"trainer.json", "run.yaml", "model.json", "tokenizer.json"})
CHOOSE_ANOTHER = f"Choose another checkpoint: {as_typed('checkpoints list')}"
_INCOMPLETE = f"so this is not a complete checkpoint. {CHOOSE_ANOTHER}"
# Of a directory, and its alias.
_NAMES = re.compile(r"checkpoint_step_(\d+)|checkpoint-epoch\d+-step(\d+)-files\d+")
_PLACE = re.compile(r"(?:branch-(\d+)/)?checkpoint_step_(\d+)")


def name_of(step: int, *, branch: int = 1) -> str:
    """Return the path of a checkpoint below the run's `checkpoints` folder."""
    return f"checkpoint_step_{step}" if branch == 1 else f"branch-{branch}/checkpoint_step_{step}"


def parse_place(name: str) -> tuple[int, int] | None:
    """Return (branch, step) of a path made by `name_of`; None for any other."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    branch, step = int(match[1] or 1), int(match[2])
    return (branch, step) if name_of(step, branch=branch) == name else None


def parse_name(name: str) -> int | None:
    """Return the step in a directory name or an alias; None for any other."""
    match = _NAMES.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else None


def rank_file(rank: int) -> str:
    """Return the path of a rank's own state below a checkpoint."""
    return f"ranks/rank_{rank:05d}.pt"


class Part(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The machine whose files a directory holds, if each machine saves to its own disk."""

    node: Annotated[int, pydantic.Field(ge=0)]
    nodes: Annotated[int, pydantic.Field(ge=1)]  # files of node n belong to n % nodes

    def holds(self, name: str, record: FileRecord) -> bool:
        """Whether this machine has a file of the manifest on its disk."""
        return name in DESCRIPTIONS or self.owns(record)

    def owns(self, record: FileRecord) -> bool:
        """Whether this machine copies a file to the bucket; node 0 copies the shared files."""
        return record.node % self.nodes == self.node

    def __str__(self) -> str:
        return f"node {self.node} of {self.nodes}: its part"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, which is immutable."""

    path: Path
    manifest: CheckpointManifest  # lists the files of all machines
    part: Part | None = None  # whose files are here; None: those of all machines

    @property
    def files(self) -> dict[str, FileRecord]:
        """The manifest's files that belong in this directory."""
        part, files = self.part, self.manifest.files.items()
        return {name: record for name, record in files if part is None or part.holds(name, record)}

    @property
    def own_files(self) -> dict[str, FileRecord]:
        """The files that this machine copies to the bucket."""
        part, files = self.part, self.manifest.files.items()
        return {name: record for name, record in files if part is None or part.owns(record)}

    @property
    def name(self) -> str:
        """Its path below the run's `checkpoints` folder or prefix."""
        return name_of(self.manifest.step, branch=self.manifest.branch)

    @property
    def bytes(self) -> int:
        """Total size of `files`."""
        return sum(record.size for record in self.files.values())

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.manifest.step


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a committed checkpoint; `verify` checks the other files.

    Raises:
        CorruptCheckpointError: There is no such directory, or its manifest is missing, does not
            match its marker, or is of another step than the directory's name.
        CheckpointError: The manifest is unreadable, or its schema is unknown to this version.
    """
    contents = []
    for file in (path / MANIFEST, path / COMMITTED):
        try:
            contents.append(read_regular(file))
        except (FileNotFoundError, NotADirectoryError):
            what = f"{file} is missing" if path.is_dir() else f"{path} is not a directory"
            raise CorruptCheckpointError(f"{what}, {_INCOMPLETE}") from None
        except OSError as error:
            raise read_error(file, error) from error
    manifest = checked_manifest(*contents, where=str(path))
    if parse_name(path.name) not in (None, manifest.step):
        raise CorruptCheckpointError(
            f"{path / MANIFEST} is of step {manifest.step}, but its folder is named for another "
            f"step. Rename the folder to {name_of(manifest.step)}, or remove it."
        )
    try:
        part = Part.model_validate_json(read_regular(path / PART))
    except FileNotFoundError:
        part = None
    except (OSError, pydantic.ValidationError):
        raise CheckpointError(
            f"{path / PART} cannot be read, so it is unknown which machine's files this directory "
            "holds. Remove the directory; the other machines and the mirror keep their files."
        ) from None
    return Checkpoint(path, manifest, part)


def read_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for an unreadable file; only an I/O error of the disk means corruption."""
    kind = CorruptCheckpointError if error.errno == errno.EIO else CheckpointUnavailableError
    return kind(
        f"{path} cannot be read ({error.strerror}). Repair the disk or its permissions, or resume "
        "from another checkpoint."
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML description of a checkpoint; errors as for `parse_mapping`."""
    try:
        return parse_mapping(read_regular(path), where=str(path))
    except OSError as error:
        raise read_error(path, error) from error


def parse_mapping(content: bytes | str, *, where: str) -> dict[str, Any]:
    """Parse a JSON object, or a YAML mapping if `where` (a path or URL) ends in `.yaml`."""
    is_yaml = where.endswith(".yaml")
    try:
        return (parse_yaml_mapping if is_yaml else parse_json_object)(content)
    except MalformedError as error:
        form = "YAML" if is_yaml else "JSON"
        raise CheckpointError(f"{where} is not {form} ({error}). {CHOOSE_ANOTHER}") from None


def run_settings(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the run file of a checkpoint by section; missing sections are empty."""
    settings: collections.defaultdict[str, dict[str, Any]] = collections.defaultdict(dict)
    run = checkpoint.path / "run.yaml"
    for name, section in read_mapping(run).items():
        if not isinstance(section, dict):
            raise CheckpointError(f"{run}: {name} is not a section. {CHOOSE_ANOTHER}")
        settings[name] = section
    return settings


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Lock a checkpoint against removal while it is read.

    Raises OSError if it has no manifest.
    """
    with (path / MANIFEST).open("rb") as manifest:
        with contextlib.suppress(OSError):  # a network disk without locks
            fcntl.flock(manifest, fcntl.LOCK_SH)
        (path / MANIFEST).stat()  # fails if it was removed during the wait for the lock
        yield


@contextlib.contextmanager
def unused(path: Path) -> Iterator[None]:
    """Lock a checkpoint for its removal; raises BlockingIOError while it is read."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            manifest = stack.enter_context((path / MANIFEST).open("rb"))
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(errno.EBUSY, "another process is reading it") from None
            except OSError:
                pass  # a network disk without locks
        yield


def is_in_use(path: Path) -> bool:
    """Whether a process is reading a checkpoint."""
    try:
        with unused(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


class Branch(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The steps that led to the present one; resuming an earlier checkpoint starts a new branch."""

    run_id: str = ""
    number: Annotated[
        int, pydantic.Field(ge=1, validation_alias=pydantic.AliasChoices("number", "branch"))
    ] = 1
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
        number, step = parse_place(name) or (0, 0)
        return step if self.holder(step) == number else None

    def fork(self, step: int | None, *, number: int) -> Branch:
        """Return the branch that continues from `step` of this one, or from scratch if None."""
        ancestry: tuple[tuple[int, int], ...] = ()
        if step is not None:
            older = tuple((ancestor, last) for ancestor, last in self.ancestry if last < step)
            ancestry = (*older, (self.holder(step), step))
        parent = None if step is None else self.parent
        return Branch(run_id=self.run_id, number=number, ancestry=ancestry, parent=parent)

    def as_record(self) -> dict[str, Any]:
        """Return the fields of a manifest that name the branch, and those of `state.json`."""
        return {
            "run_id": self.run_id,  # drawn at the run's first start
            "branch": self.number,  # that the run is on
            "ancestry": self.ancestry,  # [branch, last step taken from it], oldest first
            "parent": self.parent and self.parent.model_dump(),  # checkpoint it started from
        }


FIRST_BRANCH = Branch()


def branch_of(manifest: CheckpointManifest) -> Branch:
    """Return the branch that a checkpoint is on."""
    return Branch.model_validate(manifest, from_attributes=True)


def recorded_branch(run: Path) -> Branch | None:
    """Return the branch in a run's `state.json`; None if it is unreadable or has none."""
    try:
        state = parse_json_object(read_regular(run / "state.json"))
        fields = {name: state[name] for name in ("run_id", "branch", "ancestry")}
        return Branch.model_validate({**fields, "parent": state.get("parent")})
    except (OSError, ValueError, KeyError):
        return None


def present_branch(checkpoints: Path) -> Branch:
    """Return the recorded branch of a run, else that of its last readable checkpoint."""
    recorded = recorded_branch(checkpoints.parent)
    if recorded is not None:
        return recorded
    for path in reversed(checkpoint_paths(checkpoints).values()):
        try:
            return branch_of(read_checkpoint(path).manifest)
        except CheckpointError:
            continue
    return FIRST_BRANCH


def checkpoint_paths(checkpoints: Path) -> dict[str, Path]:
    """Return all checkpoint directories, whole or broken, by name, in order of branch and step."""
    if not checkpoints.is_dir():
        return {}
    folders = [checkpoints, *checkpoints.glob("branch-*")]
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    names = {path.relative_to(checkpoints).as_posix(): path for path in paths}
    keys = {name: parse_place(name) for name in names}  # branch and step
    valid = {name: key for name, key in keys.items() if key and names[name].is_dir()}
    return {name: names[name] for name in sorted(valid, key=lambda name: valid[name])}


def step_paths(checkpoints: Path, branch: Branch | None = None) -> dict[int, Path]:
    """Return the checkpoints of a branch (default: the present one) by step, ascending."""
    branch = present_branch(checkpoints) if branch is None else branch
    paths = checkpoint_paths(checkpoints).items()
    steps = {step: path for name, path in paths if (step := branch.step_of(name)) is not None}
    return dict(sorted(steps.items()))


def saved_steps(checkpoints: Path, branch: Branch | None = None) -> list[int]:
    """Return the steps of `step_paths`."""
    return list(step_paths(checkpoints, branch))
