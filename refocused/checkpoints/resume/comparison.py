"""Read two checkpoints for a comparison: manifests, losses and settings."""

import dataclasses
from typing import Any

from refocused.bucket.bucket import extended_crc32c
from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest
from refocused.checkpoints.step.step_directory import CHOOSE_ANOTHER, parse_mapping, read_step
from refocused.checkpoints.step.verify import WHOLE
from refocused.metrics.jsonl import dotted
from refocused.system.atomic_files import read_regular
from refocused.system.errors import CheckpointError, as_typed

# Fields of a manifest that are shown elsewhere (losses) or not useful to a reader.
_NOT_SHOWN = {"schema_version", "name", "files", "loss", "validation_loss"}


@dataclasses.dataclass(frozen=True, slots=True)
class StepContents:
    """A checkpoint without its tensors."""

    where: str
    manifest: CheckpointManifest
    trainer: dict[str, Any]  # the training state
    settings: dict[str, Any]  # the run file, by dotted name


def read_contents(catalog: Catalog, entry: CatalogEntry) -> StepContents:
    """Read a checkpoint's small files, from the disk if it is complete there, else from the bucket.

    Raises CheckpointError if it is complete in neither, or one of these files is corrupt.
    """
    remote, name, path = catalog.remote, entry.name, catalog.local / entry.name
    if entry.local == WHOLE:
        where, manifest = str(path), read_step(path).manifest
    elif remote is not None and entry.bucket == WHOLE:
        where, manifest = f"{remote.url}/{name}", remote.manifest(name)
    else:
        raise CheckpointError(f"{name} cannot be read: {'; '.join(entry.notes)}. {CHOOSE_ANOTHER}")

    def verified(file: str) -> dict[str, Any]:
        if entry.local == WHOLE or remote is None:
            content = read_regular(path / file)
        else:
            content = remote.bucket.read(remote.object_name(name, file))
        found, wanted = extended_crc32c(0, content), manifest.files[file].crc32c
        if found != wanted:
            raise CheckpointError(
                f"{where}/{file} is corrupt: it has CRC-32C {found:08x}, not {wanted:08x}. Check "
                f"the other files with: {as_typed('checkpoints verify --deep')} {manifest.step}"
            )
        return parse_mapping(content, where=f"{where}/{file}")

    trainer = checked_trainer(verified("trainer.json"), where=where)
    return StepContents(where, manifest, trainer, settings=dotted(verified("run.yaml")))


def checked_trainer(trainer: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a training state; raises CheckpointError if a figure in it is not a number."""
    names = ["best_loss", "best_step", "cost_usd"]  # may be null
    odd = [name for name in names if not isinstance(trainer.get(name, ""), int | float | None)]
    if not isinstance(trainer.get("seconds"), int | float):
        odd.insert(0, "seconds")
    if odd:
        raise CheckpointError(
            f"{where}/trainer.json: {odd[0]} is {trainer.get(odd[0], 'missing')!r:.80}, not a "
            f"number. {CHOOSE_ANOTHER}"
        )
    return trainer


def facts_of(step: StepContents) -> dict[str, Any]:
    """Return the manifest without files and losses, by dotted name, with size, time and cost."""
    manifest = dotted(step.manifest.model_dump(mode="json", exclude=_NOT_SHOWN))
    spent = {name: step.trainer[name] for name in ("seconds", "cost_usd", "best_step")}
    return {**manifest, "bytes": step.manifest.total_bytes, **spent}
