"""The manifest of a checkpoint: its place in the run, why it was saved, every file's checksum."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Annotated

import pydantic

from refocused.bucket.bucket import checked_name
from refocused.config.optimization import Dtype
from refocused.system.errors import BucketError, CheckpointError, CorruptCheckpointError
from refocused.system.strict_json import MalformedError, parse_json


class SaveReason(enum.StrEnum):
    """A reason to save; a step may have several. `latest` and the current best are computed."""

    ROLLING = "rolling"  # the save interval passed: the newest few stay
    EPOCH = "epoch"  # a pass over the data was complete: stays
    BEST = "best"  # the best validation so far: stays until another one is better
    FINAL = "final"  # the run's last step: stays
    EMERGENCY = "emergency"  # training was stopped: the newest one stays


MOST_RANKS = 100_000
SCHEMA_VERSION = 2
FIRST_SCHEMA = 1  # without run id and branch, and without a marker beside it on the disk
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
SUPERSEDED = "SUPERSEDED"  # of version 0.1: the checkpoint is on a branch that was left

Whole = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Crc32c = Annotated[int, pydantic.Field(ge=0, lt=2**32)]  # Castagnoli, unsigned
_STRICT = pydantic.ConfigDict(frozen=True, extra="forbid")


class FileRecord(pydantic.BaseModel):
    """Size in bytes and checksum of one file, and the machine that wrote it to its own disk."""

    model_config = _STRICT

    size: Whole
    crc32c: Crc32c
    node: Annotated[int, pydantic.Field(ge=0, lt=MOST_RANKS, exclude_if=lambda node: node == 0)] = 0


class Marker(pydantic.BaseModel):
    """The content of COMMITTED, the last file of a checkpoint on the disk and in a bucket."""

    model_config = _STRICT

    files: Whole  # that the manifest lists
    bytes: Whole  # of them together
    manifest_crc32c: Crc32c

    def to_json(self) -> builtins.bytes:
        """Return the content of COMMITTED."""
        return json.dumps(self.model_dump()).encode()


def parse_marker(content: bytes, *, where: str) -> Marker:
    """Parse COMMITTED; `where` (a path or an address) is for the CorruptCheckpointError."""
    try:
        return Marker.model_validate_json(content)
    except pydantic.ValidationError:
        raise CorruptCheckpointError(
            f"{where} holds {content[:80]!r}, which is not the marker of a checkpoint. "
            "Resume from another checkpoint, or upload this one again: "
            "python launch/checkpoints.py upload"
        ) from None


def _inside(files: dict[str, FileRecord]) -> dict[str, FileRecord]:
    for name in files:
        try:
            checked_name(name, where=MANIFEST)
        except BucketError as error:
            raise ValueError(str(error)) from None
    return files


class CheckpointManifest(pydantic.BaseModel):
    """Describes a checkpoint; the marker beside it, written after it, holds its checksum."""

    model_config = _STRICT

    schema_version: int = SCHEMA_VERSION
    run: str
    run_id: str = ""  # random and made once; empty in the first schema
    branch: Annotated[Whole, pydantic.Field(ge=1)] = 1
    ancestry: tuple[tuple[Whole, Whole], ...] = ()  # see `Branch`
    name: str  # of the directory, below the folder of the run's checkpoints
    step: Whole  # optimizer updates done
    epoch: Whole  # complete passes over the data
    files_done: Whole  # token files of this epoch that are consumed
    created: pydantic.AwareDatetime
    tiers: tuple[SaveReason, ...] = (SaveReason.ROLLING,)  # why it was saved
    world_size: Annotated[int, pydantic.Field(ge=1, le=MOST_RANKS)]
    zero_stage: Annotated[int, pydantic.Field(ge=0, le=3)]
    dtype: Dtype  # DeepSpeed's file names depend on it
    versions: dict[str, str]  # of each package whose files these are
    data_fingerprint: str
    data_order: str  # decides which window comes when: seed, blocks, sequence length
    data_mixture: str = ""  # shares of the sources of a mixture; empty for a single source
    parameters: Whole
    # In nats a token; None: not known, or not finite, so that it is never the best.
    validation_loss: float | None
    loss: float | None
    tokens: Whole  # trained on since the run began
    files: Annotated[dict[str, FileRecord], pydantic.AfterValidator(_inside)]

    @property
    def alias(self) -> str:
        """The other name the checkpoint is found by: `checkpoint-epochE-stepN-filesF`."""
        return f"checkpoint-epoch{self.epoch}-step{self.step}-files{self.files_done}"

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    def marker(self, crc32c: int) -> Marker:
        """Return the marker of this manifest, whose file has that checksum."""
        return Marker(files=len(self.files), bytes=self.total_bytes, manifest_crc32c=crc32c)


@dataclasses.dataclass(frozen=True, slots=True)
class RunFacts:
    """What all checkpoints of a run have in common; see `CheckpointManifest`."""

    run: str
    zero_stage: int
    dtype: str
    versions: Mapping[str, str]
    data_fingerprint: str
    data_order: str
    parameters: int
    run_yaml: str
    model_json: str
    data_mixture: str = ""
    tokenizer_json: bytes | None = None  # None: no tokenizer is saved
    data_fingerprint_by_size: str | None = None  # as earlier versions made it: names and sizes

    def files(self) -> dict[str, bytes]:
        """Return the files that describe the run in every step, by name."""
        files = {"run.yaml": self.run_yaml.encode(), "model.json": self.model_json.encode()}
        tokenizer = self.tokenizer_json
        return files if tokenizer is None else {**files, "tokenizer.json": tokenizer}


def parse_manifest(content: bytes, *, where: str) -> CheckpointManifest:
    """Parse a `manifest.json` that `where` (a path or an address) holds.

    Raises CorruptCheckpointError when it is torn, or lacks or adds a field, and CheckpointError
    when its schema is unknown to this version.
    """
    try:
        fields = parse_json(content)
    except MalformedError as error:
        raise CorruptCheckpointError(
            f"{where} is not whole JSON ({len(content)} bytes: {error}). "
            "Resume from another step, or fetch this one from the bucket."
        ) from None
    found = fields.get("schema_version") if isinstance(fields, dict) else None
    if found not in (FIRST_SCHEMA, SCHEMA_VERSION):
        raise CheckpointError(
            f"{where} has schema_version {found!r}; this program reads {FIRST_SCHEMA} and "
            f"{SCHEMA_VERSION}. Use the version of refocused that wrote the checkpoint."
        )
    try:
        return CheckpointManifest.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CorruptCheckpointError(
            f"{where}: {field}: {first['msg']} (found {first['input']!r:.80}). "
            "The file was changed after it was written; resume from another step."
        ) from None
