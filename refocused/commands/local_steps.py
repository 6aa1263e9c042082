"""Bringing the step, or the model, that a command line names to this disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import place
from refocused.commands.output import ProgressLine
from refocused.commands.run_selection import RUNS, FoundStep, find_step
from refocused.system.errors import CheckpointError

MODELS = Path("data/models")  # those that came from buckets, each below its address

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.remote_steps import RemoteSteps
    from refocused.checkpoints.resume.catalog import Catalog
    from refocused.checkpoints.step.step_directory import StepDirectory


def local_step(request: str, arguments: argparse.Namespace) -> StepDirectory:
    """Return the step that is meant, fetched from the bucket when it is not here.

    Args:
        request: `latest`, `best`, a number, a name, a path or a `gs://` address.
        arguments: With the options of `add_run_options`, and perhaps `--local`.

    Raises:
        CheckpointError: There is no such step, or it is whole in neither place.
        ConfigError: There is no such run.
        BucketError: The bucket cannot be read, or the disk has no room.
    """
    return brought_here(find_step(request, arguments), must_be_copy="://" in request)


def brought_here(found: FoundStep, *, must_be_copy: bool = False) -> StepDirectory:
    """Return a found step's directory, fetched from the bucket when it is not whole here.

    Args:
        found: The step.
        must_be_copy: What is here under its name has to be a copy of the bucket's.

    Raises:
        CheckpointError: It is whole in neither place, or another is here under its name.
        BucketError: The bucket cannot be read, or the disk has no room.
    """
    from refocused.checkpoints.resume.step_state import LEFT_BEHIND, WHOLE
    from refocused.checkpoints.step.step_directory import read_step

    catalog, entry = found.catalog, found.entry
    path = catalog.local / entry.name
    if must_be_copy and catalog.remote is not None:
        refuse_another(catalog.remote, path, entry.name)
    if entry.local == WHOLE:
        return read_step(path)
    if entry.bucket not in (WHOLE, LEFT_BEHIND):
        raise CheckpointError(
            f"{entry.name} cannot be read: {'; '.join(entry.notes)}. "
            "Choose another: python launch/checkpoints.py list"
        )
    return fetch_shown(catalog, entry.name)


def fetch_shown(catalog: Catalog, name: str, *, threads: int = 8) -> StepDirectory:
    """Fetch a step from the bucket, in place of what is here, and show how far it is."""
    line = ProgressLine(f"download {name}")
    marker = catalog.remote.marker(name) if catalog.remote else None
    if marker is not None:
        line.show(0, marker.bytes)
    try:
        return catalog.fetch(
            name,
            threads=threads,
            progress=lambda progress: line.show(progress.done_bytes, progress.total_bytes),
            replace=True,
        )
    finally:
        line.end()


def refuse_another(remote: RemoteSteps, path: Path, name: str) -> None:
    """Keep a directory, unless it is a copy, perhaps damaged, of the bucket's step of a name.

    Raises:
        CheckpointError: It is none.
    """
    from refocused.bucket.bucket import crc32c_of
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST

    if not path.exists():
        return
    marker, manifest = remote.marker(name), path / MANIFEST
    same = manifest.is_file() and marker and crc32c_of(manifest) == marker.manifest_crc32c
    if not same:
        raise CheckpointError(
            f"{path} exists and is not a copy of {remote.url}/{name}. Remove it, or name "
            "another folder: checkpoints download --to FOLDER"
        )


def model_source(request: str, arguments: argparse.Namespace) -> Path:
    """Return the folder of the model that is meant: a step directory or a transformers folder.

    Args:
        request: A folder of either kind, the `gs://` address of an export, a run's folder or name
            (its latest step), or what `local_step` takes.
        arguments: As for `local_step`; `arguments.run` names the run of a step.

    Raises:
        CheckpointError: There is no such step, or it is whole nowhere.
        ConfigError: There is no such run.
        BucketError: The bucket cannot be read, or the disk has no room.
    """
    folder = Path(request).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if arguments.run is None and "://" not in request:
        for run in (folder, RUNS / request):
            if (run / "checkpoints").is_dir():
                named = argparse.Namespace(**{**vars(arguments), "run": str(run)})
                return local_step("latest", named).path
    if "://" in request and (exported := _brought_export(request, arguments)) is not None:
        return exported
    return local_step(request, arguments).path


def _brought_export(address: str, arguments: argparse.Namespace) -> Path | None:
    """Return the copy here of the exported model at an address; None: no export is there."""
    from refocused.bucket.bucket import checked_name
    from refocused.checkpoints.resume.import_checkpoint import split_address
    from refocused.evaluate.export_copy import CONFIG, FOLDER, fetch_folder

    place_name = address.partition("://")[2].strip("/")
    last = place_name.rpartition("/")[2]
    if split_address(address)[1] is not None:
        return None
    bucket = place(address, arguments)
    if last != FOLDER and bucket.info(CONFIG) is None:
        return None
    line = ProgressLine(f"download {last}")
    try:
        return fetch_folder(
            bucket,
            MODELS / checked_name(place_name, where=address),
            progress=lambda progress: line.show(progress.done_bytes, progress.total_bytes),
        )
    finally:
        line.end()
