"""`checkpoints prune`: removes old steps from the disk, as training does with `checkpoint.keep`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.quantities import count, size_text
from refocused.commands.run_catalog import add_run_options, catalog_of, find_run
from refocused.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.retention import KeptStep


@dataclasses.dataclass(slots=True)
class PruneResult:
    """What became of the local steps.

    Attributes:
        removed: Steps that went, or would go.
        kept: Steps that stay.
        unmirrored: Of those that stay, the ones that stay only because the bucket lacks them.
        failed: Steps that the disk did not let go, with the reason.
        bytes: Of the steps in `removed`.
    """

    removed: list[int]
    kept: list[int]
    unmirrored: list[int]
    failed: dict[int, str]
    bytes: int


def add_prune_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add(
        "--keep",
        type=count,
        required=True,
        metavar="N",
        help="newest whole steps that stay, at least 2; also the best, and what the mirror lacks",
    )
    add("--yes", action="store_true", help="do not ask")
    add("--dry-run", action="store_true", help="remove nothing, say what would go")
    add_run_options(parser)


def run_prune(arguments: argparse.Namespace) -> int:
    """Remove what retention does not keep; the exit code says whether all of it went."""
    from refocused.checkpoints.retention import to_remove

    catalog = catalog_of(find_run(arguments.run), arguments)
    entries = {entry.step: entry for entry in catalog.entries() if entry.local != "-"}
    steps = [_kept_step(catalog, entry) for entry in entries.values()]
    doomed = to_remove(steps, keep=arguments.keep)
    free_of_mirror = [dataclasses.replace(step, mirrored=None) for step in steps]
    result = PruneResult(
        removed=doomed,
        kept=sorted(set(entries) - set(doomed)),
        unmirrored=sorted(set(to_remove(free_of_mirror, keep=arguments.keep)) - set(doomed)),
        failed={},
        bytes=sum(entries[step].size or 0 for step in doomed),
    )
    if doomed and not arguments.dry_run:
        if not (arguments.yes or _agreed(result)):
            print("Nothing was removed.", file=sys.stderr)
            return ExitCode.FAILED
        _remove(catalog, [entries[step] for step in doomed], result)
    if arguments.json:
        content = dataclasses.asdict(result) | {"dry_run": arguments.dry_run}
        print(json.dumps(content, indent=1))
    else:
        _print(result, dry_run=arguments.dry_run)
    return ExitCode.FAILED if result.failed else ExitCode.OK


def _kept_step(catalog: Catalog, entry: CatalogEntry) -> KeptStep:
    from refocused.checkpoints.retention import KeptStep
    from refocused.checkpoints.step_directory import is_in_use

    return KeptStep(
        step=entry.step,
        verified=entry.local == "ok",
        mirrored=None if catalog.remote is None else _is_mirrored(catalog, entry),
        tiers=frozenset(entry.tiers),
        best="best" in entry.notes,
        in_use=is_in_use(catalog.local / entry.name),
    )


def _is_mirrored(catalog: Catalog, entry: CatalogEntry) -> bool:
    """Whether the bucket has all of this very save; a listing alone cannot tell it from another."""
    from refocused.checkpoints.mirror_copy import marker_of
    from refocused.checkpoints.step_directory import read_step

    assert catalog.remote is not None  # asked for before
    if entry.bucket != "ok":
        return False
    if entry.local != "ok":
        return True  # what is here cannot be used, what is there can
    return catalog.remote.marker(entry.name) == marker_of(read_step(catalog.local / entry.name))


def _agreed(result: PruneResult) -> bool:
    """Ask on a terminal.

    Raises:
        ConfigError: There is none, and nobody has agreed beforehand.
    """
    steps = ", ".join(f"{step:,}" for step in result.removed)
    what = f"remove {_share(result)}: {steps}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"This would {what}. Nobody can be asked here: add --yes to do it, or --dry-run."
        )
    print(f"This will {what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(catalog: Catalog, entries: Sequence[CatalogEntry], result: PruneResult) -> None:
    from refocused.checkpoints.staging import remove_step

    for entry in entries:
        try:
            remove_step(catalog.local / entry.name)
        except OSError as error:
            result.failed[entry.step] = error.strerror or str(error)
            result.removed.remove(entry.step)
            result.bytes -= entry.size or 0
            print(f"{catalog.local / entry.name} was not removed: {error}", file=sys.stderr)


def _print(result: PruneResult, *, dry_run: bool) -> None:
    verb = "would be removed" if dry_run else "removed"
    rows = {
        verb: result.removed,
        "kept": result.kept,
        "kept since the mirror lacks them": result.unmirrored,
    }
    for what, steps in rows.items():
        if steps:
            print(f"{what}: {', '.join(f'{step:,}' for step in steps)}")
    print(f"{_share(result)} {verb}")


def _share(result: PruneResult) -> str:
    total = len(result.removed) + len(result.kept) + len(result.failed)
    return f"{len(result.removed)} of {total} steps, {size_text(result.bytes)}"
