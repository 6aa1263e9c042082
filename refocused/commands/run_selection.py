"""Find a run, checkpoint or model by its name; download it if needed."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials, open_bucket
from refocused.commands.arguments import Parser, add_credentials, add_json, credentials_of
from refocused.commands.output import progress_line
from refocused.system.errors import (
    BucketError,
    CheckpointError,
    ConfigError,
    ExitCode,
    as_typed,
    local_path,
)
from refocused.system.logs import print_message

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.checkpoint_directory import Checkpoint

RUNS = Path("runs")


@dataclasses.dataclass(frozen=True, slots=True)
class RunChoice:
    """A run, and where its checkpoints may be read."""

    run: str | None = None  # its folder or name; None: the newest
    bucket: str | None = None  # None: that of the run's mirror
    credentials: Credentials = BY_ENVIRONMENT
    reads: Literal["both", "local", "remote"] = "both"

    @property
    def folder(self) -> Path:
        """The run's folder, which may be missing if a bucket is named."""
        return find_run(self.run, must_exist=self.bucket is None)


def run_choice(arguments: argparse.Namespace) -> RunChoice:
    """Return what the options of `add_run_options` choose."""
    reads: Literal["both", "local", "remote"] = "both"
    if getattr(arguments, "local", False):
        reads = "local"
        if arguments.bucket is not None:
            raise ConfigError("--bucket has no effect with --local, which reads no bucket.")
    elif getattr(arguments, "remote", False):
        reads = "remote"
    return RunChoice(arguments.run, arguments.bucket, credentials_of(arguments), reads)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """A run's checkpoints, ascending by step, or one of them.

    `outcome` is OK, or the exit code of the failure if the bucket could not be read.
    """

    run: Path
    catalog: Catalog
    entries: list[CatalogEntry]
    outcome: ExitCode


def add_run_options(parser: Parser, *, local: bool = True) -> None:
    """Add the options that name a run and its bucket, `--json`, and, if `local`, `--local`."""
    add = parser.group("storage")
    add("--run NAME", "a run's folder or name (default: the newest in runs/)")
    add("--bucket URL", "gs://bucket/prefix or folder (default: the run's mirror)")
    if local:
        add("--local", "do not read the bucket")
    add_credentials(parser)
    add_json(parser)


def find_run(request: str | None, *, must_exist: bool = True, option: str | None = "--run") -> Path:
    """Return the folder of a run, given by its path or its name in `runs/`; None: the newest.

    `option` names the run on this command line (None: a positional argument). `must_exist=False`
    allows a run that exists only in a bucket.
    """
    runs = [path for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    # A save changes only its checkpoints folder.
    parts = {run: (run, run / "checkpoints") for run in runs}
    runs.sort(
        key=lambda run: max(part.stat().st_mtime for part in parts[run] if part.exists()),
        reverse=True,
    )
    if request is None:
        if runs:
            return runs[0]
        named = "Name a run's folder." if option is None else f"Name one: {option} FOLDER"
        if option == "--run":
            named += ", or for a run that is only in a bucket: --run NAME --bucket gs://..."
        raise ConfigError(f"No run in {RUNS.absolute()}. {named}")
    for folder in (local_path(request), RUNS / request):
        if folder.is_dir():
            return folder
    if not must_exist:
        return local_path(request) if "/" in request else RUNS / request
    names = [path.name for path in runs]
    near = ", ".join(difflib.get_close_matches(request, names, n=3, cutoff=0.4))
    newest = f"The newest of {len(runs)} runs: {', '.join(names[:3]) or 'none'}."
    raise ConfigError(
        f"{option or ''} {request}: no such folder, and no {RUNS / request}. ".lstrip()
        + (f"Did you mean {near}?" if near else newest)
    )


def whole_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the committed checkpoints in a folder: those with a manifest."""
    from refocused.checkpoints.step.checkpoint_directory import step_paths
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST

    paths = step_paths(checkpoints).items()
    return [step for step, path in paths if (path / MANIFEST).is_file()]


def catalog_of(run: Path, choice: RunChoice, *, checkpoints: Path | None = None) -> Catalog:
    """Return a run's catalog, with its bucket unless none is known or only the disk is read.

    The bucket is the one named, or recorded by the run's mirror, or set in the run file.
    `checkpoints` is the folder of the local checkpoints; None: the run's.
    """
    from refocused.checkpoints.mirror.mirror import MirrorFiles
    from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
    from refocused.checkpoints.resume.catalog import Catalog
    from refocused.config.yaml_source import read_document

    files, bucket, prefix = MirrorFiles(run), choice.bucket, prefix_of(run.absolute().name)
    local = checkpoints or files.checkpoints
    if choice.reads == "local":
        return Catalog(local)
    if bucket is None and (status := files.read_status()) is not None:
        bucket, prefix = status.bucket, status.prefix
    elif bucket is None and (run / "run.yaml").is_file():
        settings = read_document(run / "run.yaml").settings
        mirror, name = settings.get(("checkpoint", "mirror")), settings.get(("run", "name"))
        bucket = mirror.value if mirror else None
        prefix = prefix_of(name.value) if name else prefix
    if bucket is None:
        return Catalog(local)
    return Catalog(local, open_bucket(bucket, choice.credentials), prefix)


def with_bucket(
    run: Path, choice: RunChoice, *, checkpoints: Path | None = None
) -> tuple[Catalog, RemoteCheckpoints]:
    """Return a run's catalog and its bucket; raise ConfigError without a bucket."""
    catalog = catalog_of(run, choice, checkpoints=checkpoints)
    if catalog.remote is None:
        raise ConfigError(f"{run} has no mirror. Name the bucket: --bucket gs://bucket/prefix")
    return catalog, catalog.remote


def list_steps(choice: RunChoice) -> Listing:
    """List a run's checkpoints; if the bucket cannot be read, only the local ones.

    Raises:
        BucketError: The bucket cannot be read, and only its checkpoints are wanted.
    """
    run, only_remote = choice.folder, choice.reads == "remote"
    catalog = with_bucket(run, choice)[0] if only_remote else catalog_of(run, choice)
    try:
        entries = catalog.entries()
    except BucketError as error:
        if only_remote:
            raise
        print_message("warning", f"{error}\nUsing only the local checkpoints.")
        catalog.remote = None
        return Listing(run, catalog, catalog.entries(), error.exit_code)
    if only_remote:
        entries = [entry for entry in entries if entry.bucket != "-"]
    return Listing(run, catalog, entries, ExitCode.OK)


def find_steps(requests: Sequence[str], choice: RunChoice) -> list[Listing]:
    """Return a listing of one checkpoint, which may be corrupt, for each request.

    `latest`, `best`, numbers and names are those of the run; paths and addresses may be anywhere.
    """
    from refocused.checkpoints.resume.catalog import Catalog
    from refocused.checkpoints.resume.import_checkpoint import split_address

    listing, listings = None, []
    for request in requests:
        if "/" in request and not request.startswith("branch-"):
            parent, name = split_address(request)
            if name is None:
                parent, _, name = parent.rpartition("/")
            catalog = Catalog(local_path(parent or "/"))
            if "://" in request:  # the local copy is where `download` puts it
                run = parent.removesuffix("/checkpoints").rpartition("/")[2]
                bucket = open_bucket(parent, choice.credentials)
                catalog = Catalog(RUNS / run / "checkpoints", bucket)
            entry = catalog.find(name, catalog.entries())
            listings.append(Listing(catalog.local.parent, catalog, [entry], ExitCode.OK))
            continue
        listing = listing or list_steps(choice)
        entry = listing.catalog.find(request, listing.entries)
        listings.append(dataclasses.replace(listing, entries=[entry]))
    return listings


def local_step(request: str, choice: RunChoice) -> Checkpoint:
    """Return the checkpoint that `request` names; download it if the local copy is not whole.

    If `request` is an address, a local checkpoint of that name must be a copy of it.
    """
    from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
    from refocused.checkpoints.step.verify import WHOLE

    (listing,) = find_steps([request], choice)
    catalog, (entry,) = listing.catalog, listing.entries
    path = catalog.local / entry.name
    if "://" in request and catalog.remote is not None:
        refuse_another(catalog.remote, path, entry.name)
    if entry.local == WHOLE:
        return read_checkpoint(path)
    if entry.bucket != WHOLE:
        raise CheckpointError(
            f"{entry.name} cannot be read: {'; '.join(entry.notes)}. "
            f"Choose another: {as_typed('checkpoints list')}"
        )
    return fetch_shown(catalog, entry.name)


def fetch_shown(catalog: Catalog, name: str, *, threads: int = 8) -> Checkpoint:
    """Download a checkpoint in place of the local copy, and show the progress."""
    marker = catalog.remote.marker(name) if catalog.remote else None
    with progress_line(f"download {name}") as show:
        if marker is not None:
            show(0, marker.bytes)
        return catalog.fetch(name, threads=threads, progress=show, replace=True)


def refuse_another(remote: RemoteCheckpoints, path: Path, name: str) -> None:
    """Raise CheckpointError if `path` exists and is not a copy (whole or not) of `name`."""
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


def model_source(request: str, choice: RunChoice) -> Path:
    """Return the folder of a model: a checkpoint or a transformers folder.

    `request` is such a folder, the `gs://` address of an export, a run's folder or name (its
    latest checkpoint), or what `local_step` takes.
    """
    folder = local_path(request)
    if (folder / "config.json").is_file():
        return folder
    if choice.run is None and "://" not in request:
        for run in (folder, RUNS / request):
            if (run / "checkpoints").is_dir():
                return local_step("latest", dataclasses.replace(choice, run=str(run))).path
    if "://" in request:
        from refocused.bucket.bucket import checked_name
        from refocused.checkpoints.resume.import_checkpoint import split_address
        from refocused.evaluate.export_copy import CONFIG, FOLDER, MODELS, fetch_folder

        path = request.partition("://")[2].strip("/")
        name = path.rpartition("/")[2]
        if split_address(request)[1] is None:
            bucket = open_bucket(request, choice.credentials)
            if name == FOLDER or bucket.info(CONFIG) is not None:  # an export
                with progress_line(f"download {name}") as show:
                    target = MODELS / checked_name(path, where=request)
                    return fetch_folder(bucket, target, progress=show)
    return local_step(request, choice).path
