"""`checkpoints prune`: remove old checkpoints and those set aside, here or in the bucket."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from refocused.commands import run_selection
from refocused.commands.arguments import Parser
from refocused.commands.checkpoints.move import step_lines
from refocused.commands.output import count, print_result, size_text
from refocused.system.errors import BucketError, ConfigError, ExitCode, as_typed

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.retention import RetentionCandidate


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint that may be removed, or (`step` is None) a directory outside the branch."""

    step: int | None
    name: str
    bytes: int
    remove: Callable[[], None]


# A folder or bucket, its checkpoints as retention sees them, and all that can be removed.
Place: TypeAlias = "tuple[str, list[RetentionCandidate], list[Removal]]"


def run_prune(parser: Parser) -> int:
    """Remove what retention does not keep; the exit code is FAILED if something stayed."""
    parser.examples = ("--keep 3 --dry-run", "--keep 3 --remote --yes --run demo")
    parser.epilog = (
        "At least 2 checkpoints are kept, and always the best, those at the end of an epoch or of "
        "the run, and those that the mirror lacks, also of branches that the run left. Without a "
        "mirror, all others of such branches are removed."
    )
    add = parser.group("options")
    add("--keep N", "newest rolling checkpoints to keep", type=count, required=True)
    add("--remote", "remove from the bucket instead of the disk")
    add("--yes", "do not ask for confirmation")
    add("--dry-run", "only print what would be removed")
    run_selection.add_run_options(parser, local=False)
    arguments = parser.read()
    from refocused.checkpoints.step.retention import to_remove

    where, steps, possible = (_bucket if arguments.remote else _disk)(arguments)
    to_delete = to_remove(steps, keep=arguments.keep)
    kept = [step.step for step in steps if step.step not in to_delete]
    free_of_mirror = [dataclasses.replace(step, mirrored=None) for step in steps]
    without_mirror = to_remove(free_of_mirror, keep=arguments.keep)
    removals = [one for one in possible if one.step is None or one.step in to_delete]
    failed: dict[str, str] = {}
    if removals and not arguments.dry_run:
        if not (arguments.yes or _is_agreed(_share(removals, len(steps)), where, to_delete)):
            print("Nothing was removed.", file=sys.stderr)
            return ExitCode.FAILED
        for one in removals:
            try:
                one.remove()
            except (OSError, BucketError) as error:
                failed[str(one.step or one.name)] = getattr(error, "strerror", "") or str(error)
                print(f"{one.name} in {where} was not removed: {error}", file=sys.stderr)
    went = [one for one in removals if str(one.step or one.name) not in failed]
    verb = "would be removed" if arguments.dry_run else "removed"
    steps_by_fate = {
        "removed": [one.step for one in went if one.step is not None],
        "kept": sorted(kept),
        "unmirrored": [step for step in without_mirror if step not in to_delete],
    }
    aside = [one.name for one in went if one.step is None]
    record = {
        **steps_by_fate,
        "failed": failed,
        "bytes": sum(one.bytes for one in went),
        "aside": aside,
        "dry_run": arguments.dry_run,
        "where": where,
    }
    lines = [f"{verb}: {', '.join(aside)}"] if aside else []
    titles = (verb, "kept", "kept because they are not in the mirror")
    lines += step_lines(dict(zip(titles, steps_by_fate.values(), strict=True)))
    lines.append(f"{where}: {_share(went, len(steps))} {verb}")
    print_result(record, lines, as_json=arguments.json)
    return ExitCode.FAILED if failed else ExitCode.OK


def _share(removals: Sequence[Removal], total: int) -> str:
    count = sum(one.step is not None for one in removals)
    aside = ", ".join(one.name for one in removals if one.step is None)
    size = size_text(sum(one.bytes for one in removals))
    return f"{count} of {total:,} checkpoints{f' and {aside}' if aside else ''}, {size}"


def _is_agreed(share: str, where: str, steps: Sequence[int]) -> bool:
    """Ask for confirmation; raise ConfigError if standard input is not a terminal."""
    named = f": {', '.join(f'{step:,}' for step in steps)}" if steps else ""
    what = f"remove {share} in {where}{named}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"This would {what}. Standard input is not a terminal: add --yes or --dry-run."
        )
    print(f"This will {what}. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _disk(arguments: argparse.Namespace) -> Place:
    from refocused.checkpoints.step.retention import ALWAYS_KEPT, local_steps
    from refocused.checkpoints.step.staging import bytes_below, remove_step, steps_set_aside
    from refocused.checkpoints.step.step_directory import unused

    def remove(path: Path) -> None:
        with unused(path):
            remove_step(path)

    catalog = run_selection.catalog_of(run_selection.find_run(arguments.run), arguments)
    here = [entry for entry in catalog.entries() if entry.local != "-"]
    present = {entry.step: entry for entry in here if entry.is_present}
    steps = local_steps(catalog.local, catalog.branch, None)
    if catalog.remote is not None:
        mirrored = {step for step, entry in present.items() if _is_mirrored(catalog, entry)}
        steps = [dataclasses.replace(one, mirrored=one.step in mirrored) for one in steps]
    aside = list(steps_set_aside(catalog.local))
    removals = []
    for entry in here:
        path = catalog.local / entry.name
        if entry.is_present:
            remove_it = functools.partial(remove, path)
            removals.append(Removal(entry.step, entry.name, entry.size or 0, remove_it))
        elif not ALWAYS_KEPT & {*entry.tiers}:  # of a branch that the run has left
            if catalog.remote is None or _is_mirrored(catalog, entry):
                aside.append(path)
            else:
                text = "is kept: the mirror lacks it, and no newer checkpoint continues it. Upload "
                text += f"it first ({as_typed(f'checkpoints upload {entry.name}')}), or remove "
                print(f"{entry.name} {text}{path} by hand.", file=sys.stderr)
    for path in aside:
        name = path.relative_to(catalog.local).as_posix()
        removals.append(Removal(None, name, bytes_below(path), functools.partial(remove, path)))
    return str(catalog.local), steps, removals


def _bucket(arguments: argparse.Namespace) -> Place:
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.checkpoints.mirror.remote_steps import RemoteRetention

    run = run_selection.run_of(arguments)
    catalog, remote = run_selection.with_bucket(run, arguments)
    sizes = {one.name: one.bucket_bytes for one in catalog.entries()}
    branch, status = catalog.branch, MirrorFiles(run).read_status()
    copied_now = [*status.waiting, *status.skipped] if status is not None and status.alive else []
    steps = RemoteRetention(remote, branch, keep=arguments.keep).steps(in_use=copied_now)
    removals = []
    for step in steps:
        name = branch.name_of(step.step)
        remove = functools.partial(remote.retract, name)
        removals.append(Removal(step.step, name, sizes.get(name, 0), remove))
    return remote.url, steps, removals


def _is_mirrored(catalog: Catalog, entry: CatalogEntry) -> bool:
    from refocused.checkpoints.mirror.copy_step import marker_of
    from refocused.checkpoints.step.step_directory import read_step

    if catalog.remote is None or entry.bucket != "ok" or not entry.sound_here:
        return entry.bucket == "ok"
    # The listing cannot tell this save of the step from another; the marker can.
    return catalog.remote.marker(entry.name) == marker_of(read_step(catalog.local / entry.name))
