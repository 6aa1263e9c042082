"""The manifest of a checkpoint: its step, save reasons and file checksums."""

import builtins
import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Annotated

import pydantic

from refocused.bucket.bucket import checked_name, extended_crc32c
from refocused.config.optimization import Dtype
from refocused.system.errors import BucketError, CheckpointError, CorruptCheckpointError, as_typed
from refocused.system.strict_json import MalformedError, parse_json


class SaveReason(enum.StrEnum):
    """Why a checkpoint was saved; it may have several reasons."""

    ROLLING = "rolling"  # at the save interval; the newest few are kept
    EPOCH = "epoch"  # at the end of a pass over the data; kept
    BEST = "best"  # lowest validation loss so far; kept while it is the lowest
    FINAL = "final"  # the run's last step; kept
    EMERGENCY = "emergency"  # training was stopped; the newest one is kept


MAX_RANKS = 100_000
SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"

Whole = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Crc32c = Annotated[int, pydantic.Field(ge=0, lt=2**32)]  # Castagnoli, unsigned


class FileRecord(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Size, checksum and machine (`node`) of one file."""

    size: Whole
    crc32c: Crc32c
    node: Annotated[int, pydantic.Field(ge=0, lt=MAX_RANKS, exclude_if=lambda node: node == 0)] = 0

    def difference(self, size: int, crc32c: int | None) -> str | None:
        """Describe how a file or object differs from this record; None if it does not."""
        if size != self.size:
            return f"has {size:,} bytes, not {self.size:,}"
        if crc32c not in (None, self.crc32c):
            return f"has CRC-32C {crc32c:08x}, not {self.crc32c:08x}"
        return None


class Marker(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The content of COMMITTED, the last file written to a checkpoint, on disk and in a bucket."""

    files: Whole  # number of files in the manifest
    bytes: Whole  # their total size
    manifest_crc32c: Crc32c

    def to_json(self) -> builtins.bytes:
        """Return the content of COMMITTED."""
        return json.dumps(self.model_dump()).encode()


def parse_marker(content: bytes, *, where: str) -> Marker:
    """Parse COMMITTED from `where` (a path or URL); raises CorruptCheckpointError."""
    try:
        return Marker.model_validate_json(content.partition(b"\n")[0])
    except pydantic.ValidationError:
        raise CorruptCheckpointError(
            f"{where} holds {content[:80]!r}, which is not the marker of a checkpoint. "
            "Resume from another checkpoint, or upload this one again: "
            f"{as_typed('checkpoints upload')}"
        ) from None


def add_validation(
    committed: bytes, loss: float, validation_set: str, bits_per_byte: float | None
) -> bytes:
    """Return COMMITTED with a second line: a validation made after the save, in place of its own.

    A checkpoint never changes, but a stop may cut its validation short, and a later session may
    validate on another set.
    """
    content = json.dumps([loss, validation_set, bits_per_byte]).encode()
    return b"%b\n%08x %b" % (committed.partition(b"\n")[0], extended_crc32c(0, content), content)


class Origin(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Where the weights came from that a run started with."""

    address: str  # `model.start_from`
    revision: str  # commit on the hub, or run and step; empty for a folder
    weights: str  # fingerprint of their files

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.address} ({self.revision or 'folder'}, {self.weights})"


def _inside(files: dict[str, FileRecord]) -> dict[str, FileRecord]:
    for name in files:
        try:
            checked_name(name, where=MANIFEST)
        except BucketError as error:
            raise ValueError(str(error)) from None
    return files


class Parent(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The checkpoint of another run that a run started from."""

    run: str
    run_id: str
    branch: Whole
    step: Whole


class CheckpointManifest(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Contents and origin of a checkpoint. The marker, written after it, holds its checksum."""

    schema_version: int = SCHEMA_VERSION
    run: str
    run_id: str = ""  # random, generated once per run
    branch: Annotated[Whole, pydantic.Field(ge=1)] = 1
    ancestry: tuple[tuple[Whole, Whole], ...] = ()  # see `Branch`
    parent: Annotated[Parent | None, pydantic.Field(exclude_if=lambda parent: parent is None)] = (
        None
    )
    name: str  # path below the run's `checkpoints` folder
    step: Whole
    total_steps: Annotated[Whole | None, pydantic.Field(exclude_if=lambda steps: steps is None)] = (
        None  # of the whole run, as planned then; None: unknown
    )
    epoch: Whole  # complete passes over the data
    files_done: Whole  # token files consumed in this epoch
    created: pydantic.AwareDatetime
    tiers: tuple[SaveReason, ...] = (SaveReason.ROLLING,)  # the save reasons
    world_size: Annotated[int, pydantic.Field(ge=1, le=MAX_RANKS)]
    zero_stage: Annotated[int, pydantic.Field(ge=0, le=3)]
    dtype: Dtype  # DeepSpeed's file names depend on it
    versions: dict[str, str]  # of the packages that wrote the files
    data_fingerprint: str
    data_order: str  # determines the order of sequences: seed, blocks, sequence length
    data_mixture: str = ""  # weights of the sources; empty for a single source
    parameters: Whole
    validation_loss: float | None  # nats per token; None if unknown or not finite
    validation_set: str = ""  # fingerprint of what it was measured on; others are not comparable
    bits_per_byte: float | None = None  # of that validation; None if unknown or not finite
    loss: float | None
    tokens: Whole  # trained on since the run began
    origin: Annotated[Origin | None, pydantic.Field(exclude_if=lambda origin: origin is None)] = (
        None
    )
    files: Annotated[dict[str, FileRecord], pydantic.AfterValidator(_inside)]

    @property
    def alias(self) -> str:
        """An alternative name: `checkpoint-epochE-stepN-filesF`."""
        return f"checkpoint-epoch{self.epoch}-step{self.step}-files{self.files_done}"

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    def marker(self, crc32c: int) -> Marker:
        """Return the marker of this manifest, given the checksum of its file."""
        return Marker(files=len(self.files), bytes=self.total_bytes, manifest_crc32c=crc32c)


@dataclasses.dataclass(frozen=True, slots=True)
class RunMetadata:
    """The fields that all checkpoints of a run share; see `CheckpointManifest`."""

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
    total_steps: int | None = None
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # its files
    origin: Origin | None = None  # None: the run started with random weights

    def files(self) -> dict[str, bytes]:
        """Return the files that describe the run in each checkpoint, by name."""
        files = {"run.yaml": self.run_yaml.encode(), "model.json": self.model_json.encode()}
        return {**files, **self.tokenizer}


def checked_manifest(content: bytes, committed: bytes | None, *, where: str) -> CheckpointManifest:
    """Compare the bytes of `manifest.json` in `where` with COMMITTED, and only then parse them.

    What a damaged manifest says, such as an unknown schema, means nothing. Without a marker
    (`committed` is None) a copy is unfinished, and its manifest says only what belongs to it.

    Raises:
        CorruptCheckpointError: The two do not belong together, or cannot be parsed.
        CheckpointError: The manifest is intact, and its schema is unknown to this version.
    """
    if committed is None:
        return parse_manifest(content, where=f"{where}/{MANIFEST}")
    marker = parse_marker(committed, where=f"{where}/{COMMITTED}")
    crc32c = extended_crc32c(0, content)
    if crc32c != marker.manifest_crc32c:
        raise CorruptCheckpointError(
            f"{where}/{MANIFEST} has CRC-32C {crc32c:08x}, but {COMMITTED} says "
            f"{marker.manifest_crc32c:08x}. Resume from another checkpoint, or download this one "
            "from the bucket."
        )
    manifest = parse_manifest(content, where=f"{where}/{MANIFEST}")
    if marker != manifest.marker(crc32c):
        raise CorruptCheckpointError(
            f"{where}/{COMMITTED} does not match the files in {MANIFEST}. Choose another "
            f"checkpoint: {as_typed('checkpoints list')}"
        )
    if not (later := committed.partition(b"\n")[2]):
        return manifest
    if later[:8] != b"%08x" % extended_crc32c(0, later[9:]):
        raise CorruptCheckpointError(
            f"{where}/{COMMITTED} holds a damaged validation loss. Remove its second line."
        )
    names = "validation_loss", "validation_set", "bits_per_byte"
    return manifest.model_copy(update=dict(zip(names, json.loads(later[9:]), strict=True)))


def parse_manifest(content: bytes, *, where: str) -> CheckpointManifest:
    """Parse `manifest.json` from `where` (a path or URL).

    Raises:
        CorruptCheckpointError: It is truncated, or has missing or unknown fields.
        CheckpointError: Its schema is unknown to this version.
    """
    try:
        fields = parse_json(content)
    except MalformedError as error:
        raise CorruptCheckpointError(
            f"{where} is not valid JSON ({len(content)} bytes: {error}). "
            "Resume from another checkpoint, or download this one from the bucket."
        ) from None
    schema = fields.get("schema_version") if isinstance(fields, dict) else None
    if schema != SCHEMA_VERSION:
        raise CheckpointError(
            f"{where} has schema_version {schema!r}; this version of refocused reads "
            f"{SCHEMA_VERSION}. Use the version that wrote the checkpoint."
        )
    try:
        return CheckpointManifest.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CorruptCheckpointError(
            f"{where}: {field}: {first['msg']} (found {first['input']!r:.80}). "
            "The file was changed after it was written. Resume from another checkpoint."
        ) from None
