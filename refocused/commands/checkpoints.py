"""`launch/checkpoints.py`: shows the checkpoints of a run, on the disk and in the bucket."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, dashed, quiet_on_a_closed_pipe
from refocused.commands.places import add_credentials, place
from refocused.commands.quantities import size_text
from refocused.errors import BucketError, ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.checkpoints.catalog import Catalog, CatalogEntry

RUNS = Path("runs")
_HEADINGS = ("STEP", "SAVED", "SIZE", "LOCAL", "BUCKET", "LOSS", "NOTE")


def main(argv: Sequence[str]) -> int:
    """Run the command line after the program's name; return the exit status."""
    arguments = _parser().parse_args([dashed(one) for one in argv])
    try:
        with quiet_on_a_closed_pipe():
            return int(_list(arguments))
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


def _parser() -> Parser:
    parser = Parser(
        prog="checkpoints", description="The checkpoints of a run, on the disk and in the bucket."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    shown = verbs.add_parser("list", help="show every step, newest first")
    shown.add_argument("--run", help="a run's folder or name (default: the newest below runs/)")
    shown.add_argument("--bucket", help="gs://bucket/prefix or a folder (default: the run's own)")
    shown.add_argument("--json", action="store_true", help="print JSON")
    either = shown.add_mutually_exclusive_group()
    either.add_argument("--local", action="store_true", help="do not ask the bucket")
    either.add_argument("--remote", action="store_true", help="only what the bucket has")
    add_credentials(shown)
    return parser


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of a run's checkpoints on the disk.

    Attributes:
        steps: In step directories.
        leftovers: In what interrupted saves, downloads and removals left, or are using now.
        free: Free on that disk.
    """

    steps: int
    leftovers: int
    free: int


def _list(arguments: argparse.Namespace) -> ExitCode:
    run = find_run(arguments.run, must_exist=arguments.bucket is None)
    catalog = _catalog(run, arguments)
    outcome = ExitCode.OK
    try:
        entries = catalog.entries()
    except BucketError as error:
        if arguments.remote:
            raise
        print(f"{error}\nOnly the local steps are shown.", file=sys.stderr)
        outcome = error.exit_code
        catalog.remote = None
        entries = catalog.entries()
    if arguments.remote:
        entries = [entry for entry in entries if entry.bucket != "-"]
    use = _disk_use(catalog.local)
    if arguments.json:
        _print_json(run, catalog, entries, use)
    else:
        _print_table(catalog, entries, use)
    return outcome


def find_run(request: str | None, *, must_exist: bool = True) -> Path:
    """Return the folder of a run.

    Args:
        request: A folder, or a name below `runs/`; None: the newest run there.
        must_exist: Refuse a run without a folder (one only in a bucket has none).

    Raises:
        ConfigError: There is no such run.
    """
    runs = [path for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    if request is None:
        if not runs:
            raise ConfigError(
                f"There is no run below {RUNS.absolute()}. Name one: --run FOLDER, or for a run "
                "that is only in a bucket: --run NAME --bucket gs://bucket/prefix"
            )
        return max(runs, key=_last_change)
    for folder in (Path(request).expanduser(), RUNS / request):
        if folder.is_dir():
            return folder
    if not must_exist:
        return RUNS / request
    near = difflib.get_close_matches(request, [path.name for path in runs], n=3, cutoff=0.4)
    hint = f"Near: {', '.join(near)}." if near else f"{RUNS} holds {len(runs)} other runs."
    raise ConfigError(f"--run {request}: there is no such folder, nor {RUNS / request}. {hint}")


def _last_change(run: Path) -> float:
    """When a run last got something; saving changes the folder of its checkpoints only."""
    return max(path.stat().st_mtime for path in (run, run / "checkpoints") if path.exists())


def _catalog(run: Path, arguments: argparse.Namespace) -> Catalog:
    from refocused.checkpoints.catalog import Catalog
    from refocused.checkpoints.mirror_status import MirrorFiles
    from refocused.checkpoints.remote_steps import prefix_of

    files = MirrorFiles(run)
    status = files.read_status()
    url, prefix = arguments.bucket, prefix_of(run.absolute().name)
    if url is None and status is not None:
        url, prefix = status.bucket, status.prefix
    if url is None and arguments.remote:
        raise ConfigError(
            f"--remote: {run} has no mirror so far. Name the bucket: --bucket gs://bucket/prefix"
        )
    if url is None or arguments.local:
        return Catalog(files.checkpoints)
    return Catalog(files.checkpoints, place(url, arguments), prefix)


def _disk_use(checkpoints: Path) -> DiskUse:
    from refocused.bucket.part_file import free_bytes
    from refocused.checkpoints.staging import leftovers
    from refocused.checkpoints.step_directory import step_paths

    return DiskUse(
        steps=sum(_bytes_below(path) for path in step_paths(checkpoints)),
        leftovers=sum(_bytes_below(path) for path in leftovers(checkpoints)),
        free=free_bytes(checkpoints),
    )


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print_json(run: Path, catalog: Catalog, entries: Sequence[CatalogEntry], use: DiskUse) -> None:
    steps = [
        dataclasses.asdict(entry) | {"created": entry.created and entry.created.isoformat()}
        for entry in entries
    ]
    content = {
        "run": str(run),
        "bucket": catalog.remote.url if catalog.remote else None,
        "steps": steps,
        "disk_bytes": dataclasses.asdict(use),
    }
    print(json.dumps(content, indent=1))


def _print_table(catalog: Catalog, entries: Sequence[CatalogEntry], use: DiskUse) -> None:
    now = time.time()
    rows = [_HEADINGS, *(_row(entry, now=now) for entry in reversed(entries))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    if entries:
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("   ".join(cells).rstrip())
    else:
        print(f"No checkpoints in {catalog.local}.")
    left = f", {size_text(use.leftovers)} in interrupted or running saves" if use.leftovers else ""
    print(f"disk     {size_text(use.steps)} in steps{left}, {size_text(use.free)} free")
    if catalog.remote is not None:
        print(f"bucket   {catalog.remote.url}")


def _row(entry: CatalogEntry, *, now: float) -> tuple[str, ...]:
    return (
        f"{entry.step:,}",
        age(now - entry.created.timestamp()) if entry.created else "-",
        size_text(entry.size) if entry.size is not None else "-",
        entry.local.partition(":")[0],
        entry.bucket.partition(":")[0],
        f"{entry.loss:.4f}" if entry.loss is not None else "-",
        ", ".join(entry.notes),
    )


def age(seconds: float) -> str:
    """Say how long ago something was, in its two largest units; the future counts as now."""
    minutes = max(0, int(seconds // 60))
    hours, days = minutes // 60, minutes // 1440
    if minutes < 1:
        return "just now"
    if hours < 1:
        return f"{minutes} min ago"
    if days < 1:
        return f"{hours} h {minutes % 60} min ago"
    return f"{days} d {hours % 24} h ago"
