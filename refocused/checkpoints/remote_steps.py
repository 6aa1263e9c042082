"""The steps of one run in a bucket: a step exists there when its COMMITTED object does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import pydantic

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.checksum import extended_crc32c
from refocused.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    parse_manifest,
)
from refocused.checkpoints.step_directory import name_of, parse_name
from refocused.errors import CheckpointError

COMMITTED = "COMMITTED"
SUPERSEDED = "SUPERSEDED"
POINTER = "latest/pointer.json"
_ABOUT = b"""Checkpoints of one training run, copied here by refocused.
A folder checkpoint_step_N without an object COMMITTED is incomplete: nothing reads it.
One with an object SUPERSEDED was left behind when training went on from an earlier step: remove
that object to use it again.
latest/pointer.json names the newest step that was copied. It is a hint and comes last in a listing:
--resume gs://.../latest/ looks for the newest whole step by itself.
"""


class Marker(pydantic.BaseModel):
    """The content of COMMITTED, the last object of a step in a bucket.

    Attributes:
        files: How many files the manifest lists.
        bytes: Their bytes together.
        manifest_crc32c: CRC-32C of `manifest.json`, which holds that of every other file.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    files: Annotated[int, pydantic.Field(ge=0)]
    bytes: Annotated[int, pydantic.Field(ge=0)]
    manifest_crc32c: Annotated[int, pydantic.Field(ge=0, lt=2**32)]


def content_of(marker: Marker) -> bytes:
    """Return the bytes of COMMITTED."""
    return json.dumps(marker.model_dump()).encode()


def prefix_of(run: str) -> str:
    """Where a run's steps are below the address in `checkpoint.mirror`: as in the runs folder."""
    return f"{run}/checkpoints"


def is_copy(blob: BlobInfo, record: FileRecord) -> bool:
    """Whether an object is the file of a manifest, as far as a listing can tell."""
    return blob.size == record.size and blob.crc32c in (None, record.crc32c)


class RemoteSteps:
    """The step directories below one prefix of a bucket.

    Attributes:
        bucket: The object store.
        url: Address of the prefix, for messages.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        """Look at `prefix` (with or without a slash at its end; empty is the bucket's root)."""
        prefix = prefix.strip("/")
        self.bucket = bucket
        self._below = f"{prefix}/" if prefix else ""
        self.url = f"{bucket.url.rstrip('/')}/{prefix}".rstrip("/")

    def object_name(self, name: str, file: str) -> str:
        """The bucket's name of one file of the step directory `name`."""
        return f"{self._below}{name}/{file}"

    def introduce(self) -> None:
        """Write a word about the prefix beside the steps; fails where nothing can be written."""
        self.bucket.write(f"{self._below}README.txt", _ABOUT)

    def scan(self) -> dict[int, dict[str, BlobInfo]]:
        """List all steps at once: for each step its objects by their path below it."""
        steps: dict[int, dict[str, BlobInfo]] = {}
        for blob in self.bucket.list(f"{self._below}checkpoint_step_"):
            name, _, file = blob.name.removeprefix(self._below).partition("/")
            step = parse_name(name)
            if step is not None and name == name_of(step) and file:
                steps.setdefault(step, {})[file] = blob
        return steps

    def objects(self, name: str) -> dict[str, BlobInfo]:
        """List one step: its objects by their path below it, the marker among them."""
        folder = self.object_name(name, "")
        return {blob.name.removeprefix(folder): blob for blob in self.bucket.list(folder)}

    def marker(self, name: str) -> Marker | None:
        """Read a step's marker; None when the step is not committed.

        Raises:
            CheckpointError: The object is there but is no marker.
        """
        address = self.object_name(name, COMMITTED)
        if self.bucket.info(address) is None:
            return None
        content = self.bucket.read(address)
        try:
            return Marker.model_validate_json(content)
        except pydantic.ValidationError:
            raise CheckpointError(
                f"{self.url}/{name}/{COMMITTED} holds {content[:80]!r}, which is no marker of a "
                "whole checkpoint. Remove the object; the mirror writes it again."
            ) from None

    def manifest(self, name: str) -> CheckpointManifest:
        """Read a step's manifest out of the bucket.

        Raises:
            CheckpointError: It is torn, or of another schema.
        """
        content = self.bucket.read(self.object_name(name, MANIFEST))
        return parse_manifest(content, where=f"{self.url}/{name}/{MANIFEST}")

    def commit(self, name: str, marker: Marker) -> None:
        """Write the marker: from now on the step exists."""
        self.bucket.write(self.object_name(name, COMMITTED), content_of(marker))

    def marks_other_files(
        self, name: str, objects: Mapping[str, BlobInfo], manifest: CheckpointManifest
    ) -> bool:
        """Whether a listed step's marker is of another manifest than the one beside it.

        Two runs that meet under one name can leave that. A folder keeps no checksums to tell it by;
        there a download tells. The marker is read only where its checksum is not the expected one.

        Raises:
            CheckpointError: The object is no marker.
        """
        marker, listed = objects[COMMITTED], objects[MANIFEST]
        if marker.crc32c is None or listed.crc32c is None:
            return False
        expected = Marker(
            files=len(manifest.files),
            bytes=manifest.total_bytes,
            manifest_crc32c=listed.crc32c,
        )
        if marker.crc32c == extended_crc32c(0, content_of(expected)):
            return False
        return self.marker(name) != expected

    def point_to(self, name: str) -> None:
        """Name a step as the newest, for those who look for it with a listing; only a hint.

        The prefix `latest/` is the last of a listing, where `checkpoint_step_9500` comes behind
        `checkpoint_step_10000`.
        """
        content = json.dumps({"name": name, "step": parse_name(name)}).encode()
        self.bucket.write(f"{self._below}{POINTER}", content, overwrite=True)

    def unmark(self, name: str) -> None:
        """Take the marker away: nothing reads the step until it is committed again."""
        self.bucket.delete(self.object_name(name, COMMITTED))

    def supersede(self, name: str) -> None:
        """Mark a step as left behind: no resume takes it, and nothing of it is lost."""
        self.bucket.write(self.object_name(name, SUPERSEDED), b"", overwrite=True)

    def reinstate(self, name: str) -> None:
        """Take `supersede` back."""
        self.bucket.delete(self.object_name(name, SUPERSEDED))

    def retract(self, name: str) -> None:
        """Remove a step: its marker first, so that no reader takes it for whole."""
        self.bucket.delete(self.object_name(name, COMMITTED))
        for blob in self.objects(name).values():
            self.bucket.delete(blob.name)
