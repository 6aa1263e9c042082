"""The run, checkpoint or model that a command line names, fetched from the bucket if needed."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place
from refocused.commands.output import progress_line
from refocused.system.errors import BucketError, CheckpointError, ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.remote_steps import RemoteSteps
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.step_directory import StepDirectory

RUNS = Path("runs")
MODELS = Path("data/models")  # those fetched from buckets, each below its address


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """A run's checkpoints, ascending by step, as far as they can be seen; or one of them.

    `outcome` is OK, or the exit code of the failure that left the bucket's out.
    """

    run: Path
    catalog: Catalog
    entries: list[CatalogEntry]
    outcome: ExitCode


def add_run_options(parser: Parser, *, local: bool = True) -> None:
    """Add what names a run and its bucket, `--json`, and `--local` unless it makes no sense."""
    add = parser.add_argument
    add("--run", help="a run's folder or name (default: the newest below runs/)")
    add("--bucket", metavar="URL", help="gs://bucket/prefix or a folder (default: the run's own)")
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)
    if local:
        add("--local", action="store_true", help="do not read the bucket")


def find_run(request: str | None, *, must_exist: bool = True, option: str | None = "--run") -> Path:
    """Return the folder of a run, named by its path or its name below `runs/`; None: the newest.

    `option` is what names a run on this command line; None: a word without an option. A run that is
    only in a bucket has no folder, which `must_exist=False` allows.
    """
    runs = [path for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    runs.sort(key=_last_change, reverse=True)
    if request is None:
        if runs:
            return runs[0]
        named = "Name a run's folder." if option is None else f"Name one: {option} FOLDER"
        if option == "--run":
            named += (
                ", or for a run that is only in a bucket: --run NAME --bucket gs://bucket/prefix"
            )
        raise ConfigError(f"There is no run below {RUNS.absolute()}. {named}")
    for folder in (Path(request).expanduser(), RUNS / request):
        if folder.is_dir():
            return folder
    if not must_exist:
        return RUNS / request
    names = [path.name for path in runs]
    near = ", ".join(difflib.get_close_matches(request, names, n=3, cutoff=0.4))
    newest = f"The newest of {len(runs)} runs: {', '.join(names[:3]) or 'none'}."
    raise ConfigError(
        f"{option or ''} {request}: there is no such folder, nor {RUNS / request}. ".lstrip()
        + (f"Near: {near}." if near else newest)
    )


def _last_change(run: Path) -> float:
    """When a run last changed; saving changes only the folder of its checkpoints."""
    return max(path.stat().st_mtime for path in (run, run / "checkpoints") if path.exists())


def whole_steps(checkpoints: Path) -> list[int]:
    """Return the committed steps in a folder: those with a manifest."""
    from refocused.checkpoints.step.branches import step_paths
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST

    paths = step_paths(checkpoints).items()
    return [step for step, path in paths if (path / MANIFEST).is_file()]


def run_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that the command line names; `--bucket` may hold it alone."""
    return find_run(arguments.run, must_exist=arguments.bucket is None)


def catalog_of(
    run: Path, arguments: argparse.Namespace, *, checkpoints: Path | None = None
) -> Catalog:
    """Return a run's catalog, with its bucket unless none is known or `--local` excludes it.

    `checkpoints` is the folder of the local steps; None: that of the run.
    """
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.checkpoints.mirror.remote_steps import prefix_of
    from refocused.checkpoints.resume.catalog import Catalog

    local = checkpoints or MirrorFiles(run).checkpoints
    if getattr(arguments, "local", False):
        return Catalog(local)
    if arguments.bucket is not None:
        return Catalog(local, place(arguments.bucket, arguments), prefix_of(run.absolute().name))
    known = _own_mirror(run)
    if known is not None:
        return Catalog(local, place(known[0], arguments), known[1])
    return Catalog(local)


def with_bucket(
    run: Path, arguments: argparse.Namespace, *, checkpoints: Path | None = None
) -> tuple[Catalog, RemoteSteps]:
    """Return a run's catalog as `catalog_of`, and its bucket; raise ConfigError without one."""
    catalog = catalog_of(run, arguments, checkpoints=checkpoints)
    if catalog.remote is None:
        raise ConfigError(f"{run} has no mirror. Name the bucket: --bucket gs://bucket/prefix")
    return catalog, catalog.remote


def _own_mirror(run: Path) -> tuple[str, str] | None:
    """Address and prefix as the mirror recorded them, or as the run file sets them."""
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.checkpoints.mirror.remote_steps import prefix_of
    from refocused.config.yaml_source import read_document

    if (status := MirrorFiles(run).read_status()) is not None:
        return status.bucket, status.prefix
    if not (run / "run.yaml").is_file():
        return None
    settings = read_document(run / "run.yaml").settings
    mirror, name = settings.get(("checkpoint", "mirror")), settings.get(("run", "name"))
    if mirror is None or mirror.value is None:
        return None
    return mirror.plain, prefix_of(name.plain if name else run.absolute().name)


def list_steps(arguments: argparse.Namespace) -> Listing:
    """List a run's checkpoints; unless `--remote`, the local ones if the bucket cannot be read."""
    run, only_remote = run_of(arguments), getattr(arguments, "remote", False)
    catalog = with_bucket(run, arguments)[0] if only_remote else catalog_of(run, arguments)
    try:
        entries = catalog.entries()
    except BucketError as error:
        if only_remote:
            raise
        print(f"{error}\nOnly the local steps are looked at.", file=sys.stderr)
        catalog.remote = None
        return Listing(run, catalog, catalog.entries(), error.exit_code)
    if only_remote:
        entries = [entry for entry in entries if entry.bucket != "-"]
    return Listing(run, catalog, entries, ExitCode.OK)


def find_steps(requests: Sequence[str], arguments: argparse.Namespace) -> list[Listing]:
    """Find `latest`, `best`, numbers or names in the run, paths and addresses where they say.

    Returns:
        For each request a listing of one checkpoint, which may be broken.
    """
    listing, found = None, []
    for request in requests:
        if "/" in request and not request.startswith("branch-"):
            found.append(_find_by_place(request, arguments))
            continue
        listing = listing or list_steps(arguments)
        entry = listing.catalog.find(request, listing.entries)
        found.append(dataclasses.replace(listing, entries=[entry]))
    return found


def _find_by_place(request: str, arguments: argparse.Namespace) -> Listing:
    """Find a checkpoint by its path, or by its address, whose copy is where `download` puts it."""
    from refocused.checkpoints.resume.catalog import Catalog
    from refocused.checkpoints.resume.import_checkpoint import split_address

    parent, name = split_address(request)
    if name is None:
        parent, _, name = parent.rpartition("/")
    if "://" in request:
        run = parent.removesuffix("/checkpoints").rpartition("/")[2]
        catalog = Catalog(RUNS / run / "checkpoints", place(parent, arguments))
    else:
        catalog = Catalog(Path(parent or "/").expanduser())
    entry = catalog.find(name, catalog.entries())
    return Listing(catalog.local.parent, catalog, [entry], ExitCode.OK)


def local_step(request: str, arguments: argparse.Namespace) -> StepDirectory:
    """Return the checkpoint that `request` names, fetched from the bucket if it is not whole here.

    If `request` is an address, what is here under its name must be a copy of it.
    """
    from refocused.checkpoints.mirror.remote_steps import LEFT_BEHIND
    from refocused.checkpoints.step.step_directory import read_step
    from refocused.checkpoints.step.verify import WHOLE

    (found,) = find_steps([request], arguments)
    catalog, (entry,) = found.catalog, found.entries
    path = catalog.local / entry.name
    if "://" in request and catalog.remote is not None:
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
    """Fetch a checkpoint from the bucket over what is here, and show the progress."""
    marker = catalog.remote.marker(name) if catalog.remote else None
    with progress_line(f"download {name}") as show:
        if marker is not None:
            show(0, marker.bytes)
        return catalog.fetch(
            name,
            threads=threads,
            progress=lambda progress: show(progress.done_bytes, progress.total_bytes),
            replace=True,
        )


def refuse_another(remote: RemoteSteps, path: Path, name: str) -> None:
    """Raise CheckpointError if `path` exists and is not a copy, even a damaged one, of a name."""
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
    """Return the folder of a model, either a checkpoint or a transformers folder.

    `request` is a folder of either kind, the `gs://` address of an export, a run's folder or name
    (its latest checkpoint), or what `local_step` takes.
    """
    folder = Path(request).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if arguments.run is None and "://" not in request:
        for run in (folder, RUNS / request):
            if (run / "checkpoints").is_dir():
                named = argparse.Namespace(**{**vars(arguments), "run": str(run)})
                return local_step("latest", named).path
    if "://" in request and (exported := _fetch_export(request, arguments)) is not None:
        return exported
    return local_step(request, arguments).path


def _fetch_export(address: str, arguments: argparse.Namespace) -> Path | None:
    """Return a local copy of the exported model at an address; None: no export is there."""
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
    with progress_line(f"download {last}") as show:
        return fetch_folder(
            bucket,
            MODELS / checked_name(place_name, where=address),
            progress=lambda progress: show(progress.done_bytes, progress.total_bytes),
        )
