"""The run that a command line names, and the catalog of its checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place
from refocused.system.errors import BucketError, ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry

RUNS = Path("runs")


def add_run_options(parser: Parser) -> None:
    """Add what names a run and its bucket, and `--json`."""
    add = parser.add_argument
    add("--run", help="a run's folder or name (default: the newest below runs/)")
    add("--bucket", metavar="URL", help="gs://bucket/prefix or a folder (default: the run's own)")
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)


def add_local_option(parser: Parser) -> None:
    """Add what confines a command to the disk."""
    parser.add_argument("--local", action="store_true", help="do not ask the bucket")


def find_run(request: str | None, *, must_exist: bool = True, option: str | None = "--run") -> Path:
    """Return the folder of a run.

    Args:
        request: A folder, or a name below `runs/`; None: the newest run there.
        must_exist: Refuse a run without a folder (one only in a bucket has none).
        option: What names a run on this command line; None: a word without an option.

    Raises:
        ConfigError: There is no such run.
    """
    runs = [path for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    if request is None:
        if not runs:
            named = "Name a run's folder." if option is None else f"Name one: {option} FOLDER"
            if option == "--run":
                named += ", or for a run that is only in a bucket: --run NAME --bucket "
                named += "gs://bucket/prefix"
            raise ConfigError(f"There is no run below {RUNS.absolute()}. {named}")
        return max(runs, key=_last_change)
    for folder in (Path(request).expanduser(), RUNS / request):
        if folder.is_dir():
            return folder
    if not must_exist:
        return RUNS / request
    near = difflib.get_close_matches(request, [path.name for path in runs], n=3, cutoff=0.4)
    newest = [path.name for path in sorted(runs, key=_last_change, reverse=True)[:3]]
    hint = f"Near: {', '.join(near)}." if near else f"The newest of {len(runs)} runs: "
    hint += "" if near else f"{', '.join(newest)}." if newest else "none."
    named = request if option is None else f"{option} {request}"
    raise ConfigError(f"{named}: there is no such folder, nor {RUNS / request}. {hint}")


def whole_steps(checkpoints: Path) -> list[int]:
    """Return the committed steps in a folder: those with a manifest."""
    from refocused.checkpoints.step.branches import step_paths
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST

    paths = step_paths(checkpoints).items()
    return [step for step, path in paths if (path / MANIFEST).is_file()]


def run_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that the command line names.

    Raises:
        ConfigError: There is no such run, and no bucket is named that may have it.
    """
    return find_run(arguments.run, must_exist=arguments.bucket is None)


def catalog_of(
    run: Path, arguments: argparse.Namespace, *, checkpoints: Path | None = None
) -> Catalog:
    """Return a run's catalog, with its bucket when one is known and may be asked.

    Args:
        run: The run's folder.
        arguments: With the options of `add_run_options`, and perhaps `--local` and `--remote`.
        checkpoints: Where the local steps are; None: in the run's own folder.

    Raises:
        ConfigError: Only the bucket is wanted and none is known.
        BucketError: The bucket's address is none.
    """
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.checkpoints.mirror.remote_steps import prefix_of
    from refocused.checkpoints.resume.catalog import Catalog

    local = checkpoints or MirrorFiles(run).checkpoints
    if getattr(arguments, "local", False):
        return Catalog(local)
    if arguments.bucket is not None:
        known: tuple[str, str] | None = arguments.bucket, prefix_of(run.absolute().name)
    else:
        known = _own_mirror(run)
    if known is None:
        if getattr(arguments, "remote", False):
            raise ConfigError(
                f"--remote: {run} has no mirror. Name the bucket: --bucket gs://bucket/prefix"
            )
        return Catalog(local)
    url, prefix = known
    return Catalog(local, place(url, arguments), prefix)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The steps of a run as far as they could be seen.

    Attributes:
        entries: Ascending by step.
        outcome: Exit code: OK, or that of the failure that left the bucket's steps out.
    """

    entries: list[CatalogEntry]
    outcome: ExitCode


def listed(catalog: Catalog, arguments: argparse.Namespace) -> Listing:
    """List the steps; those on the disk alone, with a message, when the bucket cannot be read.

    Raises:
        BucketError: It cannot be read and only the bucket is wanted.
    """
    try:
        entries = catalog.entries()
    except BucketError as error:
        if getattr(arguments, "remote", False):
            raise
        print(f"{error}\nOnly the local steps are looked at.", file=sys.stderr)
        catalog.remote = None
        return Listing(catalog.entries(), error.exit_code)
    if getattr(arguments, "remote", False):
        entries = [entry for entry in entries if entry.bucket != "-"]
    return Listing(entries, ExitCode.OK)


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStep:
    """The step that a command line names.

    Attributes:
        catalog: Where it was found.
        entry: What both places say of it; it may be broken.
        outcome: Exit code: OK, or that of the failure that left the bucket out.
    """

    catalog: Catalog
    entry: CatalogEntry
    outcome: ExitCode


def find_step(request: str, arguments: argparse.Namespace) -> FoundStep:
    """Find one step as `find_steps` does."""
    return find_steps([request], arguments)[0]


def find_steps(requests: Sequence[str], arguments: argparse.Namespace) -> list[FoundStep]:
    """Find `latest`, `best`, numbers or names in the run, paths and addresses where they say.

    Args:
        requests: As typed.
        arguments: With the options of `add_run_options`, and perhaps `--local`.

    Raises:
        CheckpointError: There is no such step; the nearest are named.
        ConfigError: There is no such run.
        BucketError: An address names a bucket that cannot be listed.
    """
    catalog = listing = None
    found = []
    for request in requests:
        if "/" in request and not request.startswith("branch-"):
            found.append(_found_by_place(request, arguments))
            continue
        if catalog is None or listing is None:
            catalog = catalog_of(run_of(arguments), arguments)
            listing = listed(catalog, arguments)
        entry = catalog.find(request, listing.entries)
        found.append(FoundStep(catalog, entry, listing.outcome))
    return found


def _found_by_place(request: str, arguments: argparse.Namespace) -> FoundStep:
    """Find a step by its path, or by its address, whose copy here is where `download` puts it."""
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
    return FoundStep(catalog, catalog.find(name, catalog.entries()), ExitCode.OK)


def _own_mirror(run: Path) -> tuple[str, str] | None:
    """Address and prefix that the mirror said, else those of the run file; None without one."""
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.checkpoints.mirror.remote_steps import prefix_of
    from refocused.config.yaml_source import read_document

    status = MirrorFiles(run).read_status()
    if status is not None:
        return status.bucket, status.prefix
    if not (run / "run.yaml").is_file():
        return None
    settings = read_document(run / "run.yaml").settings
    mirror, name = settings.get(("checkpoint", "mirror")), settings.get(("run", "name"))
    if mirror is None or mirror.value is None:
        return None
    return mirror.plain, prefix_of(name.plain if name else run.absolute().name)


def _last_change(run: Path) -> float:
    """When a run last got something; saving changes the folder of its checkpoints only."""
    return max(path.stat().st_mtime for path in (run, run / "checkpoints") if path.exists())
