"""Verify that a checkpoint matches its manifest and can be loaded."""

import dataclasses
import errno
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refocused.bucket.bucket import crc32c_of
from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    PART,
    Checkpoint,
    rank_file,
    read_checkpoint,
    read_error,
    read_mapping,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, CheckpointManifest
from refocused.engine.zero_layout import OPTIMIZER, model_file_rank, optimizer_file_rank
from refocused.system import errors

ABSENT = "-"
WHOLE = "ok"
UNREADABLE = "unreadable"  # not proven corrupt
READERS = 4  # parallel reads; one stream does not saturate a fast disk


@dataclasses.dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with one file; `file` is its path below the checkpoint."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


def describe(problems: Sequence[FileProblem]) -> str:
    """Return the first problem, and how many more there are."""
    return f"{problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint on a disk or in a bucket, as far as its structure and its sizes show it."""

    # `ok`, `node N of M: its part`, `NN %` (of its bytes are in the bucket, uncommitted),
    # `broken: ...`, `unreadable: ...` (now; not proven corrupt) or `-` (absent).
    state: str = ABSENT
    manifest: CheckpointManifest | None = None  # None: unusable
    manifest_crc32c: int | None = None  # of the local manifest
    in_use: bool = False  # by a resume, an export or an upload; or unreadable now
    mirrored: bool | None = None  # committed in the bucket; None: it needs no copy
    skipped: bool = False  # the mirror copies newer ones first

    @property
    def is_whole(self) -> bool:
        """Whether all its files, or those of one machine's part, have their sizes."""
        return is_whole(self.state)


def is_whole(state: str) -> bool:
    """Whether a state is that of a whole checkpoint, or of one machine's whole part."""
    return state == WHOLE or state.startswith("node ")


def inspect_directory(path: Path) -> CheckpointState:
    """Determine the state of a local checkpoint from its structure and file sizes."""
    try:
        checkpoint = read_checkpoint(path)
        problems = verify(checkpoint, deep=False)
    except errors.CheckpointError as error:
        return CheckpointState(state_of(error, where=str(path)))
    state = WHOLE if checkpoint.part is None else str(checkpoint.part)
    state = f"broken: {describe(problems)}" if problems else state
    return CheckpointState(state, checkpoint.manifest, crc32c_of(path / MANIFEST))


def state_of(error: errors.CheckpointError, *, where: str) -> str:
    """Return the state of the checkpoint at a path or URL that raised an error."""
    kind = "broken" if isinstance(error, errors.CorruptCheckpointError) else UNREADABLE
    return f"{kind}: {str(error).split('. ')[0].replace(f'{where}/', '')}"


def require_intact(checkpoint: Checkpoint) -> None:
    """Read every byte of a checkpoint; raise CorruptCheckpointError if it is damaged."""
    if problems := verify(checkpoint, deep=True):
        what = f"{checkpoint.path} is corrupt: {describe(problems)}"
        raise errors.CorruptCheckpointError(f"{what}. {CHOOSE_ANOTHER}")


def verify(
    checkpoint: Checkpoint,
    *,
    deep: bool,
    files: Iterable[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[FileProblem]:
    """Compare a checkpoint with its manifest; return all problems, by file name.

    Args:
        checkpoint: The checkpoint.
        deep: Compare the CRC-32C of every file, and open them as a resume does; otherwise compare
            sizes only.
        files: Check only the sizes and checksums of these files; default: all of them, the
            manifest's completeness, and unlisted files.
        progress: Called with the size of each file that was checked.

    Raises:
        CheckpointUnavailableError: A file cannot be read, but is not proven corrupt.
    """
    if files is not None:
        return _check_files(checkpoint, sorted(files), deep=deep, progress=progress)
    listed, ranks = checkpoint.manifest.files, range(checkpoint.manifest.world_size)
    required = ["trainer.json", "run.yaml", "model.json", *map(rank_file, ranks)]
    missing = [name for name in required if name not in listed]
    if not any(name.startswith("zero/") for name in listed):
        missing.append("zero/")
    problems = [FileProblem(name, "is missing from the manifest") for name in missing]
    # DeepSpeed would take a stray file in zero/ for another rank's. Hidden files of file browsers
    # and network disks (.DS_Store, .nfs...) are harmless.
    known = {*listed, MANIFEST, COMMITTED, PART}
    paths = (
        path.relative_to(checkpoint.path) for path in checkpoint.path.rglob("*") if path.is_file()
    )
    problems += [
        FileProblem(path.as_posix(), "exists but is not in the manifest")
        for path in paths
        if path.as_posix() not in known and not any(part.startswith(".") for part in path.parts)
    ]
    problems += _check_files(checkpoint, list(checkpoint.files), deep=deep, progress=progress)
    if deep:
        problems += unreadable(
            checkpoint, set(checkpoint.files) - {problem.file for problem in problems}
        )
    return sorted(problems, key=lambda problem: problem.file)


def unreadable(checkpoint: Checkpoint, files: Iterable[str]) -> list[FileProblem]:
    """Open files as a resume does, since a file with the right checksum may be unusable."""
    problems = []
    for name in sorted(files):
        path = checkpoint.path / name
        try:
            require_content(path, name, step=checkpoint.step)
        except errors.CheckpointUnavailableError:
            raise
        except errors.CheckpointError as error:
            what = str(error).partition(". ")[0].removeprefix(f"{path} ")
            problems.append(FileProblem(name, what))
    return problems


def require_content(path: Path, name: str, *, step: int) -> None:
    """Open a file as a resume does; raise CheckpointError if it is unusable or of another step."""
    saved_step: object = step
    if name == "trainer.json":
        saved_step = read_mapping(path).get("step")
    elif name.endswith(".pt"):
        from refocused.engine.state_files import UnreadableFileError, read_state  # loads torch

        content = read_state(path, mapped=True)
        is_optimizer = optimizer_file_rank(name) is not None
        if not isinstance(content, dict) or (is_optimizer and not content.get(OPTIMIZER)):
            what = f"a mapping with {OPTIMIZER}" if is_optimizer else "a mapping"
            raise UnreadableFileError(f"{path} is not {what}. {CHOOSE_ANOTHER}")
        if model_file_rank(name) is not None:
            saved_step = content.get("global_steps")
    if saved_step != step:
        raise errors.CheckpointError(
            f"{path} is of step {saved_step}, not of step {step}. {CHOOSE_ANOTHER}"
        )


def _check_files(
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    deep: bool,
    progress: Callable[[int], None] | None,
) -> list[FileProblem]:
    def check(name: str) -> FileProblem | None:
        record, path = checkpoint.manifest.files[name], checkpoint.path / name
        try:
            size = path.stat().st_size
            problem = record.difference(size, None)
            if deep and problem is None:
                problem = record.difference(size, crc32c_of(path))
        except (FileNotFoundError, NotADirectoryError):
            problem = "is missing"
        except OSError as error:
            if error.errno != errno.EIO:
                raise read_error(path, error) from error
            problem = f"cannot be read ({error.strerror})"
        return None if problem is None else FileProblem(name, problem)

    problems = []
    with ThreadPoolExecutor(READERS) as threads:  # reading and hashing release the GIL
        checked = threads.map(check, names) if deep else map(check, names)
        for name, problem in zip(names, checked, strict=True):
            problems += [problem] if problem is not None else []
            if progress is not None:
                progress(checkpoint.manifest.files[name].size)
    return problems
