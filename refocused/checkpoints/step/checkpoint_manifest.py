"""The manifest of a checkpoint: its place in the run, why it was saved, every file's checksum."""

from __future__ import annotations

import builtins
import enum
import json
from typing import Annotated

import pydantic

from refocused.bucket.bucket import checked_name, extended_crc32c
from refocused.config.optimization import Dtype
from refocused.system.errors import BucketError, CheckpointError, CorruptCheckpointError
from refocused.system.strict_json import MalformedError, parse_json


class SaveReason(enum.StrEnum):
    """A reason to save; a step may have several. The latest and the present best are computed."""

    ROLLING = "rolling"
    """The interval was over: the newest few stay."""

    EPOCH = "epoch"
    """A pass over the data was complete: stays."""

    BEST = "best"
    """Its validation was the best so far: stays until another one is better."""

    FINAL = "final"
    """The run's last step: stays."""

    EMERGENCY = "emergency"
    """Training was stopped, and nothing else asked for this save: the newest one stays."""


MOST_RANKS = 100_000
SCHEMA_VERSION = 2
FIRST_SCHEMA = 1  # without run id and branch, and without a marker beside it on the disk
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
SUPERSEDED = "SUPERSEDED"  # of version 0.1: the checkpoint is on a branch that was left


Whole = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class FileRecord(pydantic.BaseModel):
    """One file of a step.

    Attributes:
        size: Bytes.
        crc32c: CRC-32C (Castagnoli) of the content as an unsigned integer.
        node: The machine that wrote it, where each keeps its files on its own disk.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    size: Whole
    crc32c: Annotated[int, pydantic.Field(ge=0, lt=2**32)]
    node: Annotated[int, pydantic.Field(ge=0, lt=MOST_RANKS, exclude_if=lambda node: node == 0)] = 0


def _inside(files: dict[str, FileRecord]) -> dict[str, FileRecord]:
    for name in files:
        try:
            checked_name(name, where=MANIFEST)
        except BucketError as error:
            raise ValueError(str(error)) from None
    return files


class Marker(pydantic.BaseModel):
    """The content of COMMITTED, the last file of a checkpoint on the disk and in a bucket.

    Attributes:
        files: How many files the manifest lists.
        bytes: Their bytes together.
        manifest_crc32c: CRC-32C of `manifest.json`, which holds that of every other file.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    files: Whole
    bytes: Whole
    manifest_crc32c: Annotated[int, pydantic.Field(ge=0, lt=2**32)]

    def to_json(self) -> builtins.bytes:
        """Return the content of COMMITTED."""
        return json.dumps(self.model_dump()).encode()


def parse_marker(content: bytes, *, where: str) -> Marker:
    """Read the bytes of COMMITTED that `where` (a path or an address) holds.

    Raises:
        CorruptCheckpointError: It is not a marker.
    """
    try:
        return Marker.model_validate_json(content)
    except pydantic.ValidationError:
        raise CorruptCheckpointError(
            f"{where} holds {content[:80]!r}, which is not the marker of a checkpoint. "
            "Resume from another checkpoint, or upload this one again: "
            "python launch/checkpoints.py upload"
        ) from None


class CheckpointManifest(pydantic.BaseModel):
    """Describes a checkpoint; the marker beside it, written after it, holds its checksum.

    Attributes:
        schema_version: Version of this form.
        run: Name of the run that saved the step.
        run_id: Identity of that run, random and made once; empty in the first schema.
        branch: Branch of the run that the checkpoint is on.
        ancestry: For each ancestor of that branch, oldest first: its number, and the last step
            that the branch has from it.
        name: Directory name, below the folder of the run's checkpoints.
        step: Optimizer updates done.
        epoch: Passes over the data that are complete.
        files_done: Token files of this epoch that are consumed.
        created: When it was saved.
        tiers: Why it was saved; in a manifest of an earlier version, which names none, the
            interval.
        world_size: Ranks that saved it.
        zero_stage: ZeRO stage it was saved under.
        dtype: `bf16`, `fp16` or `fp32`; DeepSpeed's file names depend on it.
        versions: Version of each package whose files these are.
        data_fingerprint: Fingerprint of the data set trained on.
        data_order: What else decides which window comes when: seed, blocks, sequence length.
        data_mixture: Shares of the sources of a mixture; empty for a single source.
        parameters: Parameters of the model.
        validation_loss: Mean loss on the validation windows, in nats a token; None: not measured
            (a loss that is not finite is written as None too, so that it is never the best).
        loss: Training loss of the step, in nats a token; None: not known.
        tokens: Tokens trained on since the run began.
        files: Each file but this one, by its path below the directory.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    run: str
    run_id: str = ""
    branch: Annotated[Whole, pydantic.Field(ge=1)] = 1
    ancestry: tuple[tuple[Whole, Whole], ...] = ()
    name: str
    step: Whole
    epoch: Whole
    files_done: Whole
    created: pydantic.AwareDatetime
    tiers: tuple[SaveReason, ...] = (SaveReason.ROLLING,)
    world_size: Annotated[int, pydantic.Field(ge=1, le=MOST_RANKS)]
    zero_stage: Annotated[int, pydantic.Field(ge=0, le=3)]
    dtype: Dtype
    versions: dict[str, str]
    data_fingerprint: str
    data_order: str
    data_mixture: str = ""
    parameters: Whole
    validation_loss: float | None
    loss: float | None
    tokens: Whole
    files: Annotated[dict[str, FileRecord], pydantic.AfterValidator(_inside)]

    @property
    def alias(self) -> str:
        """The other name the step is found by: `checkpoint-epochE-stepN-filesF`."""
        return f"checkpoint-epoch{self.epoch}-step{self.step}-files{self.files_done}"

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """The bytes of `manifest.json`."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    def marker(self, content: bytes) -> Marker:
        """Return the marker that belongs to this manifest, whose bytes are `content`."""
        return Marker(
            files=len(self.files),
            bytes=self.total_bytes,
            manifest_crc32c=extended_crc32c(0, content),
        )


def parse_manifest(content: bytes, *, where: str) -> CheckpointManifest:
    """Read the bytes of a `manifest.json` that `where` (a path or an address) holds.

    Raises:
        CorruptCheckpointError: The JSON is torn, or lacks or adds a field.
        CheckpointError: It is of a schema that this version does not read.
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
