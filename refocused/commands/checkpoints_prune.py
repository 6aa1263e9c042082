"""`checkpoints prune`: remove old steps from the disk or the bucket, and what was set aside."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.output import count, size_text
from refocused.commands.run_selection import add_run_options, catalog_of, find_run, run_of
from refocused.system.errors import BucketError, ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.retention import KeptStep


@dataclasses.dataclass(slots=True)
class PruneResult:
    """What became of the steps.

    Attributes:
        removed: Steps that went, or would go.
        kept: Steps that stay.
        unmirrored: Of those that stay, the ones that stay only because the bucket lacks them.
        failed: Steps that the disk did not let go, with the reason.
        bytes: Of the steps in `removed`, and of `aside`.
        aside: Directories removed that had been taken out of the run's history.
    """

    removed: list[int]
    kept: list[int]
    unmirrored: list[int]
    failed: dict[int, str]
    bytes: int
    aside: list[str]


def add_prune_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add(
        "--keep",
        type=count,
        required=True,
        metavar="N",
        help="newest rolling steps that stay, and 2 steps at least; the best, the ends of epochs "
        "and of the run, and what the mirror lacks stay too",
    )
    add("--remote", action="store_true", help="remove from the bucket, not from the disk")
    add("--yes", action="store_true", help="do not ask")
    add("--dry-run", action="store_true", help="remove nothing, say what would go")
    add_run_options(parser)


@dataclasses.dataclass(frozen=True, slots=True)
class PrunedPlace:
    """The disk or the bucket.

    Attributes:
        where: For people.
        steps: What retention has to know of each step there.
        sizes: Bytes of each step there.
        remove: Removes one; raises OSError or BucketError.
        aside: Directories that were taken out of the run's history, and those of branches that it
            has left, but for epochs and the final one.
    """

    where: str
    steps: list[KeptStep]
    sizes: Mapping[int, int]
    remove: Callable[[int], None]
    aside: Sequence[Path] = ()


def run_prune(arguments: argparse.Namespace) -> int:
    """Remove what retention does not keep; the exit code says whether all of it went."""
    from refocused.checkpoints.step.retention import to_remove
    from refocused.checkpoints.step.staging import bytes_below

    place = _bucket(arguments) if arguments.remote else _disk(arguments)
    doomed = to_remove(place.steps, keep=arguments.keep)
    free_of_mirror = [dataclasses.replace(step, mirrored=None) for step in place.steps]
    result = PruneResult(
        removed=doomed,
        kept=sorted({step.step for step in place.steps} - set(doomed)),
        unmirrored=sorted(set(to_remove(free_of_mirror, keep=arguments.keep)) - set(doomed)),
        failed={},
        bytes=sum(place.sizes[step] for step in doomed) + sum(map(bytes_below, place.aside)),
        aside=[_aside_name(path, place.where) for path in place.aside],
    )
    if (doomed or place.aside) and not arguments.dry_run:
        if not (arguments.yes or _agreed(result, place.where)):
            print("Nothing was removed.", file=sys.stderr)
            return ExitCode.FAILED
        _remove(place, result)
    if arguments.json:
        content = dataclasses.asdict(result) | {"dry_run": arguments.dry_run, "where": place.where}
        print(json.dumps(content, indent=1))
    else:
        _print(result, place.where, dry_run=arguments.dry_run)
    all_went = not result.failed and len(result.aside) == len(place.aside)
    return ExitCode.OK if all_went else ExitCode.FAILED


def _disk(arguments: argparse.Namespace) -> PrunedPlace:
    from refocused.checkpoints.step.checkpoint_manifest import SaveReason
    from refocused.checkpoints.step.staging import remove_step, steps_set_aside
    from refocused.checkpoints.step.step_directory import unused

    def remove(step: int) -> None:
        path = catalog.local / catalog.branch.name_of(step)
        with unused(path):
            remove_step(path)

    catalog = catalog_of(find_run(arguments.run), _without_remote(arguments))
    here = [entry for entry in catalog.entries() if entry.local != "-"]
    entries = [entry for entry in here if entry.is_present]
    left = [
        catalog.local / entry.name
        for entry in here
        if not entry.is_present and not {SaveReason.EPOCH, SaveReason.FINAL} & {*entry.tiers}
    ]
    return PrunedPlace(
        where=str(catalog.local),
        steps=[_kept_step(catalog, entry) for entry in entries],
        sizes={entry.step: entry.size or 0 for entry in entries},
        remove=remove,
        aside=[*steps_set_aside(catalog.local), *left],
    )


def _without_remote(arguments: argparse.Namespace) -> argparse.Namespace:
    """The bucket is asked for what it holds, and does not have to be known."""
    return argparse.Namespace(**{**vars(arguments), "remote": False})


def _bucket(arguments: argparse.Namespace) -> PrunedPlace:
    from refocused.checkpoints.mirror.remote_steps import RemoteRetention

    run = run_of(arguments)
    catalog = catalog_of(run, arguments)
    remote, entries = catalog.remote, {entry.name: entry for entry in catalog.entries()}
    assert remote is not None  # catalog_of refuses --remote without one
    branch = catalog.branch
    retention = RemoteRetention(remote, branch, keep=arguments.keep)
    steps = retention.steps(in_use=_on_their_way(run))
    return PrunedPlace(
        where=remote.url,
        steps=steps,
        sizes={
            step.step: entries[name].bucket_bytes
            for step in steps
            if (name := branch.name_of(step.step)) in entries
        },
        remove=lambda step: remote.retract(branch.name_of(step)),
    )


def _on_their_way(run: Path) -> list[int]:
    """Steps that the run's mirror is copying, or is about to."""
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles

    status = MirrorFiles(run).read_status()
    return [*status.waiting, *status.skipped] if status is not None and status.alive else []


def _kept_step(catalog: Catalog, entry: CatalogEntry) -> KeptStep:
    from refocused.checkpoints.step.retention import KeptStep
    from refocused.checkpoints.step.step_directory import is_in_use

    return KeptStep(
        step=entry.step,
        verified=entry.sound_here,
        mirrored=None if catalog.remote is None else _is_mirrored(catalog, entry),
        tiers=frozenset(entry.tiers),
        best="best" in entry.notes,
        in_use=is_in_use(catalog.local / entry.name),
    )


def _is_mirrored(catalog: Catalog, entry: CatalogEntry) -> bool:
    """Whether the bucket has all of this very save; a listing alone cannot tell it from another."""
    from refocused.checkpoints.mirror.copy_step import marker_of
    from refocused.checkpoints.step.step_directory import read_step

    assert catalog.remote is not None  # asked for before
    if entry.bucket != "ok":
        return False
    if not entry.sound_here:
        return True  # what is here cannot be used, what is there can
    return catalog.remote.marker(entry.name) == marker_of(read_step(catalog.local / entry.name))


def _agreed(result: PruneResult, where: str) -> bool:
    """Ask on a terminal.

    Raises:
        ConfigError: There is none, and nobody has agreed beforehand.
    """
    steps = ", ".join(f"{step:,}" for step in result.removed)
    what = f"remove {_share(result)} in {where}{f': {steps}' if steps else ''}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"This would {what}. Nobody can be asked here: add --yes to do it, or --dry-run."
        )
    print(f"This will {what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(place: PrunedPlace, result: PruneResult) -> None:
    from refocused.checkpoints.step.staging import bytes_below, remove_step
    from refocused.checkpoints.step.step_directory import unused

    for step in list(result.removed):
        try:
            place.remove(step)
        except (OSError, BucketError) as error:
            result.failed[step] = getattr(error, "strerror", None) or str(error)
            result.removed.remove(step)
            result.bytes -= place.sizes[step]
            print(f"step {step:,} in {place.where} was not removed: {error}", file=sys.stderr)
    for path in place.aside:
        try:
            with unused(path):
                remove_step(path)
        except OSError as error:
            result.aside.remove(_aside_name(path, place.where))
            result.bytes -= bytes_below(path)
            print(f"{path} was not removed: {error}", file=sys.stderr)


def _aside_name(path: Path, where: str) -> str:
    return path.relative_to(where).as_posix()


def _print(result: PruneResult, where: str, *, dry_run: bool) -> None:
    verb = "would be removed" if dry_run else "removed"
    rows = {
        verb: result.removed,
        "kept": result.kept,
        "kept since the mirror lacks them": result.unmirrored,
    }
    if result.aside:
        print(f"{verb}: {', '.join(result.aside)}")
    for what, steps in rows.items():
        if steps:
            print(f"{what}: {', '.join(f'{step:,}' for step in steps)}")
    print(f"{where}: {_share(result)} {verb}")


def _share(result: PruneResult) -> str:
    total = len(result.removed) + len(result.kept) + len(result.failed)
    aside = f" and {', '.join(result.aside)}" if result.aside else ""
    return f"{len(result.removed)} of {total} steps{aside}, {size_text(result.bytes)}"
