"""One saved step on disk: its names, its layout, how it is read, and the lock of its readers."""

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

from refocused.bucket.bucket import extended_crc32c
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    FIRST_SCHEMA,
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    parse_manifest,
    parse_marker,
)
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.errors import (
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
)
from refocused.system.strict_json import MalformedError, parse_json_object

PART = "part.json"
# These files describe a step and lie in every part of it.
DESCRIPTIONS = frozenset(
    {
        "trainer.json",  # the training state: step, position, best loss, money
        "run.yaml",  # the resolved run file
        "model.json",  # the model's shape in the transformers config form
        "tokenizer.json",  # the data's, as a `tokenizers` file; absent where the run had none
    }
)
CHOOSE_ANOTHER = "Choose another checkpoint: python launch/checkpoints.py list"
_INCOMPLETE = f"so this is not a complete checkpoint. {CHOOSE_ANOTHER}"
# The directory's own name, and the names that other trainers give to the same thing.
_NAMES = re.compile(
    r"checkpoint_step_(\d+)|checkpoint-epoch\d+-step(\d+)-files\d+"
    r"|final_checkpoint_step_(\d+)|rolling_step_(\d+)"
)
_PLACE = re.compile(r"(?:branch-(\d+)/)?checkpoint_step_(\d+)")


def name_of(step: int, *, branch: int = 1) -> str:
    """Return the directory name of a checkpoint, below the folder of the run's checkpoints."""
    return f"checkpoint_step_{step}" if branch == 1 else f"branch-{branch}/checkpoint_step_{step}"


def parse_place(name: str) -> tuple[int, int] | None:
    """Return branch and step of a directory name; None: `name_of` gives no such name."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    branch, step = int(match[1] or 1), int(match[2])
    return (branch, step) if name_of(step, branch=branch) == name else None


def parse_name(name: str) -> int | None:
    """Return the step in a directory name or an alias; None: it is neither."""
    match = _NAMES.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else None


def rank_file(rank: int) -> str:
    """Return the path of a rank's own state below a step directory."""
    return f"ranks/rank_{rank:05d}.pt"


class Part(pydantic.BaseModel):
    """The machine whose files a directory holds, where each machine keeps its own ranks' files."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    node: Annotated[int, pydantic.Field(ge=0)]
    nodes: Annotated[int, pydantic.Field(ge=1)]  # files of machines beyond are divided among them

    def holds(self, name: str, record: FileRecord) -> bool:
        """Whether a file of the manifest belongs here."""
        return name in DESCRIPTIONS or self.owns(record)

    def owns(self, record: FileRecord) -> bool:
        """Whether this machine copies a file to the bucket: the first one does for shared files."""
        return record.node % self.nodes == self.node

    def __str__(self) -> str:
        return f"node {self.node} of {self.nodes}: its part"


@dataclasses.dataclass(frozen=True, slots=True)
class StepDirectory:
    """One committed step, which never changes."""

    path: Path
    manifest: CheckpointManifest  # of the files of all machines
    part: Part | None = None  # the machine whose files are here; None: all machines

    @property
    def files(self) -> dict[str, FileRecord]:
        """The manifest's files that belong into this directory."""
        part, files = self.part, self.manifest.files
        return {name: one for name, one in files.items() if part is None or part.holds(name, one)}

    @property
    def own_files(self) -> dict[str, FileRecord]:
        """The files that this machine copies to the bucket."""
        part, files = self.part, self.manifest.files
        return {name: one for name, one in files.items() if part is None or part.owns(one)}

    @property
    def name(self) -> str:
        """Its name among the checkpoints of its run, here and in the bucket."""
        return name_of(self.manifest.step, branch=self.manifest.branch)

    @property
    def bytes(self) -> int:
        """Bytes of `files`."""
        return sum(record.size for record in self.files.values())

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self.manifest.step


def read_step(path: Path) -> StepDirectory:
    """Read the manifest of a committed step; `verify` looks at its files.

    Raises CorruptCheckpointError when there is no such directory, or its manifest is missing,
    differs from its marker, or is of another step than the directory's name; CheckpointError when
    it cannot be read, or its schema is of a later version.
    """
    manifest_path = path / MANIFEST
    try:
        content = manifest_path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = f"{manifest_path} is missing" if path.is_dir() else f"{path} is not a directory"
        raise CorruptCheckpointError(f"{what}, {_INCOMPLETE}") from None
    except OSError as error:
        raise read_error(manifest_path, error) from error
    manifest = _marked_manifest(path, content)
    if parse_name(path.name) not in (None, manifest.step):
        raise CorruptCheckpointError(
            f"{manifest_path} is of step {manifest.step}, not of the step in its folder's name. "
            f"Rename the folder to {name_of(manifest.step)}, or remove it."
        )
    return StepDirectory(path, manifest, _read_part(path / PART))


def _marked_manifest(path: Path, content: bytes) -> CheckpointManifest:
    """Parse a manifest and compare it with its marker; the first schema has none on a disk."""
    where, marker_path = str(path / MANIFEST), path / COMMITTED
    marker, found = None, extended_crc32c(0, content)
    if marker_path.exists():
        try:
            marker = parse_marker(marker_path.read_bytes(), where=str(marker_path))
        except OSError as error:
            raise read_error(marker_path, error) from error
        if found != marker.manifest_crc32c:
            raise CorruptCheckpointError(
                f"{where} has CRC-32C {found:08x}, but {COMMITTED} says "
                f"{marker.manifest_crc32c:08x}. Resume from another checkpoint, or fetch this one "
                "from the bucket."
            )
    manifest = parse_manifest(content, where=where)
    if marker is None and manifest.schema_version != FIRST_SCHEMA:
        raise CorruptCheckpointError(f"{marker_path} is missing, {_INCOMPLETE}")
    if marker is not None and marker != manifest.marker(found):
        raise CorruptCheckpointError(
            f"{marker_path} counts other files than {MANIFEST} lists. {CHOOSE_ANOTHER}"
        )
    return manifest


def _read_part(path: Path) -> Part | None:
    try:
        return Part.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, pydantic.ValidationError):
        raise CheckpointError(
            f"{path} cannot be read, so whose files this directory holds is not known. Remove the "
            "directory; the other machines and the mirror keep theirs."
        ) from None


def read_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for an unreadable file: only a failing disk proves damage."""
    kind = CorruptCheckpointError if error.errno == errno.EIO else CheckpointUnavailableError
    return kind(
        f"{path} cannot be read ({error.strerror}). Repair the disk or its permissions, or resume "
        "from another checkpoint."
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Read one of a checkpoint's descriptions: a JSON object, or a YAML mapping."""
    try:
        return parse_mapping(path.read_bytes(), where=str(path))
    except OSError as error:
        raise read_error(path, error) from error


def parse_mapping(content: bytes | str, *, where: str) -> dict[str, Any]:
    """Parse what `read_mapping` reads; the suffix of `where`, a path or an address, is the form."""
    is_yaml = where.endswith(".yaml")
    try:
        return (parse_yaml_mapping if is_yaml else parse_json_object)(content)
    except MalformedError as error:
        form = "YAML" if is_yaml else "JSON"
        raise CheckpointError(f"{where} is no {form} ({error}). {CHOOSE_ANOTHER}") from None


def run_settings(step: StepDirectory) -> dict[str, dict[str, Any]]:
    """Return the run file of a step by section; sections that it lacks are empty."""
    settings: collections.defaultdict[str, dict[str, Any]] = collections.defaultdict(dict)
    run = step.path / "run.yaml"
    for name, section in read_mapping(run).items():
        if not isinstance(section, dict):
            raise CheckpointError(f"{run}: {name} is no section of settings. {CHOOSE_ANOTHER}")
        settings[name] = section
    return settings


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Keep every process from removing a step while it is read; a lock ends with its process.

    Raises OSError when the step has no manifest (any more).
    """
    with (path / MANIFEST).open("rb") as manifest:
        with contextlib.suppress(OSError):  # a network disk without locks
            fcntl.flock(manifest, fcntl.LOCK_SH)
        (path / MANIFEST).stat()  # it may have been removed while the lock was waited for
        yield


@contextlib.contextmanager
def unused(path: Path) -> Iterator[None]:
    """Keep readers away from a step while it is removed; BlockingIOError: something holds it."""
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
    """Whether something is reading a step."""
    try:
        with unused(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
