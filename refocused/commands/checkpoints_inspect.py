"""`checkpoints list`: every step of a run, and the disk they take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.output import age, size_text
from refocused.commands.run_selection import add_run_options, catalog_of, listed, run_of

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry

_HEADINGS = ("STEP", "SAVED", "SIZE", "LOCAL", "BUCKET", "LOSS", "VALIDATION", "NOTE")


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of a run's checkpoints on the disk.

    Attributes:
        steps: In step directories.
        leftovers: In what interrupted saves, downloads and removals left, or are using now.
        aside: In step directories that were taken out of the run's history.
        free: Free on that disk.
    """

    steps: int
    leftovers: int
    aside: int
    free: int


def add_list_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add_run_options(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--local", action="store_true", help="do not ask the bucket")
    either.add_argument("--remote", action="store_true", help="only what the bucket has")


def run_list(arguments: argparse.Namespace) -> int:
    """Show the steps; the exit code says whether the bucket could be asked."""
    run = run_of(arguments)
    catalog = catalog_of(run, arguments)
    listing = listed(catalog, arguments)
    use = _disk_use(catalog.local)
    if arguments.json:
        _print_json(run, catalog, listing.entries, use)
    else:
        _print_table(catalog, listing.entries, use)
    return listing.outcome


def as_record(entry: CatalogEntry) -> dict[str, Any]:
    """Return an entry for JSON."""
    return dataclasses.asdict(entry) | {"created": entry.created and entry.created.isoformat()}


def _disk_use(checkpoints: Path) -> DiskUse:
    from refocused.bucket.partial_files import free_bytes
    from refocused.checkpoints.step.branches import checkpoint_paths
    from refocused.checkpoints.step.staging import bytes_below, leftovers, steps_set_aside

    return DiskUse(
        steps=sum(map(bytes_below, checkpoint_paths(checkpoints).values())),
        leftovers=sum(map(bytes_below, leftovers(checkpoints))),
        aside=sum(map(bytes_below, steps_set_aside(checkpoints))),
        free=free_bytes(checkpoints),
    )


def _print_json(run: Path, catalog: Catalog, entries: Sequence[CatalogEntry], use: DiskUse) -> None:
    content = {
        "run": str(run),
        "bucket": catalog.remote.url if catalog.remote else None,
        "steps": [as_record(entry) for entry in entries],
        "disk_bytes": dataclasses.asdict(use),
        "bucket_bytes": sum(entry.bucket_bytes for entry in entries) if catalog.remote else None,
    }
    print(json.dumps(content, indent=1))


def _print_table(catalog: Catalog, entries: Sequence[CatalogEntry], use: DiskUse) -> None:
    if entries:
        print("\n".join(table_lines(entries)))
    else:
        print(f"No checkpoints in {catalog.local}.")
    left = f", {size_text(use.leftovers)} in interrupted or running saves" if use.leftovers else ""
    if use.aside:
        left += f", {size_text(use.aside)} set aside (checkpoints prune removes it)"
    print(f"disk     {size_text(use.steps)} in steps{left}, {size_text(use.free)} free")
    if catalog.remote is not None:
        there = sum(entry.bucket_bytes for entry in entries)
        print(f"bucket   {size_text(there)} in {catalog.remote.url}")


def table_lines(entries: Sequence[CatalogEntry]) -> list[str]:
    """Return a line for each step, the newest first, below one of headings."""
    now = time.time()
    rows = [_HEADINGS, *(_row(entry, now=now) for entry in reversed(entries))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(entry: CatalogEntry, *, now: float) -> tuple[str, ...]:
    return (
        f"{entry.step:,}",
        age(now - entry.created.timestamp()) if entry.created else "-",
        size_text(entry.size) if entry.size is not None else "-",
        entry.local.partition(":")[0],
        entry.bucket.partition(":")[0],
        *("-" if loss is None else f"{loss:.4f}" for loss in (entry.loss, entry.validation_loss)),
        ", ".join(entry.notes),
    )
