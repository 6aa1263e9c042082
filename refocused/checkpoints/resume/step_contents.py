"""What a step says of itself in its small files: manifest, training state, settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from refocused.bucket.bucket import extended_crc32c
from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.checkpoints.resume.step_state import LEFT_BEHIND, WHOLE
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest
from refocused.checkpoints.step.step_directory import parse_mapping, read_step
from refocused.system.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class StepContents:
    """A step without its tensors.

    Attributes:
        where: Path or address it was read from.
        manifest: Its place in the run, and its files.
        trainer: The training state: losses, position, time and money spent.
        settings: The run file it was trained under, by dotted name.
    """

    where: str
    manifest: CheckpointManifest
    trainer: dict[str, Any]
    settings: dict[str, Any]


def read_contents(catalog: Catalog, entry: CatalogEntry) -> StepContents:
    """Read a step's small files, from the disk when it is whole there, else from the bucket.

    Raises:
        CheckpointError: It is whole in neither place, or one of these files is corrupt.
        BucketError: The bucket cannot be read.
    """
    if entry.local == WHOLE:
        step = read_step(catalog.local / entry.name)
        return _contents(
            str(step.path), step.manifest, lambda file: (step.path / file).read_bytes()
        )
    remote = catalog.remote
    if remote is None or entry.bucket not in (WHOLE, LEFT_BEHIND):
        raise CheckpointError(
            f"{entry.name} cannot be read: {'; '.join(entry.notes)}. "
            "Choose another: python launch/checkpoints.py list"
        )
    return _contents(
        f"{remote.url}/{entry.name}",
        remote.manifest(entry.name),
        lambda file: remote.bucket.read(remote.object_name(entry.name, file)),
    )


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name: `{"run": {"name": 1}}` becomes `{"run.name": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{below}": inner for below, inner in dotted(value).items()}
        else:
            flat[str(name)] = value
    return flat


def checked_trainer(trainer: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a training state whose figures, which commands print, are numbers.

    Raises:
        CheckpointError: One is missing, or something else.
    """
    unknown = () if isinstance(trainer.get("seconds"), int | float) else ("seconds",)
    names = ("best_loss", "best_step", "cost_usd")
    odd = [*unknown, *(n for n in names if not isinstance(trainer.get(n, ""), int | float | None))]
    if odd:
        raise CheckpointError(
            f"{where}: {odd[0]} of its trainer.json is {trainer.get(odd[0], 'missing')!r:.80}, and "
            "a number is wanted. Choose another: python launch/checkpoints.py list"
        )
    return trainer


def _contents(
    where: str, manifest: CheckpointManifest, read: Callable[[str], bytes]
) -> StepContents:
    def verified(file: str) -> dict[str, Any]:
        content = read(file)
        found, wanted = extended_crc32c(0, content), manifest.files[file].crc32c
        if found != wanted:
            raise CheckpointError(
                f"{where}/{file} has CRC-32C {found:08x}, not {wanted:08x}: it is corrupt. "
                "See what else is: python launch/checkpoints.py verify --deep "
                f"{manifest.step}"
            )
        return parse_mapping(content, where=f"{where}/{file}")

    return StepContents(
        where,
        manifest,
        trainer=checked_trainer(verified("trainer.json"), where=where),
        settings=dotted(verified("run.yaml")),
    )
