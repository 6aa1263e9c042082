"""Whether a step directory is what its manifest says, and whether a resume can load it."""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refocused.bucket.bucket import crc32c_of
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    SUPERSEDED,
    CheckpointManifest,
    FileRecord,
)
from refocused.checkpoints.step.step_directory import (
    PART,
    StepDirectory,
    rank_file,
    read_error,
    read_mapping,
)
from refocused.engine.zero_layout import OPTIMIZER, model_file_rank, optimizer_file_rank
from refocused.system.errors import CheckpointError, CheckpointUnavailableError

READERS = 4  # files read at once: one stream does not keep a fast disk busy
_CHOOSE_ANOTHER = "Choose another checkpoint: python launch/checkpoints.py list"
# Beside the files of the manifest: itself, and what a copy taken from a bucket brings along.
_BESIDE = frozenset({MANIFEST, COMMITTED, SUPERSEDED, PART})


@dataclasses.dataclass(frozen=True, slots=True)
class FileProblem:
    """One file that is not as it should be.

    Attributes:
        file: Path below the step directory.
        problem: What is wrong with it.
    """

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


def describe(problems: Sequence[FileProblem]) -> str:
    """The first problem, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def verify(
    step: StepDirectory, *, deep: bool, files: Iterable[str] | None = None
) -> list[FileProblem]:
    """Compare a step directory with its manifest.

    Args:
        step: The directory and its manifest.
        deep: Read every byte and compare CRC-32C, and open the files as a resume does; otherwise
            only sizes are compared, which does not find a flipped bit.
        files: Look at the bytes of these files of the manifest only, so that the ranks can share
            the work; None: at all that belong into the directory, at the structure, and at files
            that should not be there.

    Returns:
        Every problem found, by file name; empty when all is well.

    Raises:
        CheckpointUnavailableError: A file cannot be read for a reason that proves no damage.
    """
    if files is not None:
        return _check_files(step, sorted(files), deep=deep)
    problems = _missing_from_manifest(step.manifest) + _not_in_manifest(step)
    problems += _check_files(step, list(step.files), deep=deep)
    if deep:
        problems += unreadable(step, set(step.files) - {problem.file for problem in problems})
    return sorted(problems, key=lambda problem: problem.file)


def unreadable(step: StepDirectory, files: Iterable[str] | None = None) -> list[FileProblem]:
    """Open files as a resume does, leaving tensors on the disk; return what it could not use.

    Checksums do not find this: a file may be what was written and still be of no use.

    Args:
        step: The directory and its manifest.
        files: Of the manifest; None: all that belong into the directory.
    """
    problems = []
    for name in sorted(step.files if files is None else files):
        path = step.path / name
        try:
            require_content(path, name, step=step.step)
        except CheckpointUnavailableError:
            raise
        except CheckpointError as error:
            what = str(error).partition(". ")[0].removeprefix(f"{path} ")
            problems.append(FileProblem(name, what))
    return problems


def require_content(path: Path, name: str, *, step: int) -> None:
    """Open one file as a resume does: its structure, not its tensors.

    Args:
        path: The file.
        name: Its path below the step directory; says what it has to hold.
        step: The step that it has to be of.

    Raises:
        CheckpointError: It cannot be loaded, or is of another step.
    """
    if name == "trainer.json":
        _require_step(path, read_mapping(path).get("step"), step)
    elif name.endswith(".pt"):
        from refocused.engine.state_files import UnreadableFileError, read_state  # loads torch

        content = read_state(path, mapped=True)
        wanted = [OPTIMIZER] if optimizer_file_rank(name) is not None else []
        if not isinstance(content, dict) or not all(content.get(key) for key in wanted):
            what = " ".join(["no mapping", *(f"with {key}" for key in wanted)])
            raise UnreadableFileError(f"{path} holds {what}. {_CHOOSE_ANOTHER}")
        if model_file_rank(name) is not None:
            _require_step(path, content.get("global_steps"), step)


def _require_step(path: Path, found: object, step: int) -> None:
    if found != step:
        raise CheckpointError(f"{path} is of step {found}, not of step {step}. {_CHOOSE_ANOTHER}")


def _check_files(step: StepDirectory, names: Sequence[str], *, deep: bool) -> list[FileProblem]:
    check = functools.partial(_check_file, step, deep=deep)
    if not deep:
        return [problem for problem in map(check, names) if problem]
    with ThreadPoolExecutor(READERS) as threads:  # reading and hashing release the interpreter
        return [problem for problem in threads.map(check, names) if problem]


def _check_file(step: StepDirectory, name: str, *, deep: bool) -> FileProblem | None:
    record = step.manifest.files.get(name)
    if record is None:
        return FileProblem(name, "is not in the manifest")
    try:
        problem = _compare(step.path / name, record, deep=deep)
    except (FileNotFoundError, NotADirectoryError):
        problem = "is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise read_error(step.path / name, error) from error
        problem = f"cannot be read ({error.strerror})"
    return FileProblem(name, problem) if problem else None


def _compare(path: Path, record: FileRecord, *, deep: bool) -> str | None:
    size = path.stat().st_size
    if size != record.size:
        return f"has {size:,} bytes, not {record.size:,}"
    if deep and (found := crc32c_of(path)) != record.crc32c:
        return f"has CRC-32C {found:08x}, not {record.crc32c:08x}"
    return None


def _missing_from_manifest(manifest: CheckpointManifest) -> list[FileProblem]:
    """What every step has to have: DeepSpeed's files, each rank's state, the three descriptions."""
    ranks = [rank_file(rank) for rank in range(manifest.world_size)]
    required = ["trainer.json", "run.yaml", "model.json", *ranks]
    absent = [name for name in required if name not in manifest.files]
    if not any(name.startswith("zero/") for name in manifest.files):
        absent.append("zero/")
    return [FileProblem(name, "is not in the manifest") for name in absent]


def _not_in_manifest(step: StepDirectory) -> list[FileProblem]:
    """Files nobody vouches for; DeepSpeed counts a stray one in zero/ as another rank's."""
    found = (path for path in step.path.rglob("*") if path.is_file())
    names = (path.relative_to(step.path).as_posix() for path in found)
    return [
        FileProblem(name, "is there but not in the manifest")
        for name in names
        if name not in step.manifest.files and name not in _BESIDE and not _is_hidden(name)
    ]


def _is_hidden(name: str) -> bool:
    """File browsers and network disks leave such names (.DS_Store, .nfs...); nothing reads them."""
    return any(part.startswith(".") for part in name.split("/"))
