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
from refocused.commands.output import count, print_result
from refocused.system.errors import BucketError, ConfigError, ExitCode, as_typed
from refocused.system.logs import print_message
from refocused.system.number_text import size_text

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.verify import CheckpointState


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint that may be removed, or (`step` is None) a directory outside the branch."""

    step: int | None
    name: str
    bytes: int
    remove: Callable[[], None]


# A folder or bucket, its checkpoints by step, and all that can be removed.
Place: TypeAlias = "tuple[str, dict[int, CheckpointState], list[Removal]]"


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

    where, states, possible = (_bucket if arguments.remote else _disk)(arguments)
    to_delete = to_remove(states, keep=arguments.keep)
    free_of_mirror = {s: dataclasses.replace(state, mirrored=None) for s, state in states.items()}
    without_mirror = to_remove(free_of_mirror, keep=arguments.keep)
    removals = [item for item in possible if item.step is None or item.step in to_delete]
    failed: dict[str, str] = {}
    if removals and not arguments.dry_run:
        named = f": {', '.join(f'{step:,}' for step in to_delete)}" if to_delete else ""
        what = f"remove {_share(removals, len(states))} in {where}{named}"
        if not arguments.yes and not sys.stdin.isatty():
            raise ConfigError(
                f"This would {what}. Standard input is not a terminal: add --yes or --dry-run."
            )
        if not arguments.yes:
            print(f"This will {what}. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print_message(None, "Nothing was removed.")
                return ExitCode.FAILED
        for item in removals:
            try:
                item.remove()
            except (OSError, BucketError) as error:
                failed[str(item.step or item.name)] = getattr(error, "strerror", "") or str(error)
                print_message("error", f"{item.name} in {where} was not removed: {error}")
    removed = [item for item in removals if str(item.step or item.name) not in failed]
    verb = "would be removed" if arguments.dry_run else "removed"
    steps_by_fate = {
        "removed": [item.step for item in removed if item.step is not None],
        "kept": sorted(step for step in states if step not in to_delete),
        "unmirrored": [step for step in without_mirror if step not in to_delete],
    }
    aside = [item.name for item in removed if item.step is None]
    record = {
        **steps_by_fate,
        "failed": failed,
        "bytes": sum(item.bytes for item in removed),
        "aside": aside,
        "dry_run": arguments.dry_run,
        "where": where,
    }
    lines = [f"{verb}: {', '.join(aside)}"] if aside else []
    titles = (verb, "kept", "kept because they are not in the mirror")
    lines += step_lines(dict(zip(titles, steps_by_fate.values(), strict=True)))
    lines.append(f"{where}: {_share(removed, len(states))} {verb}")
    print_result(record, lines, as_json=arguments.json)
    return ExitCode.FAILED if failed else ExitCode.OK


def _share(removals: Sequence[Removal], total: int) -> str:
    count = sum(item.step is not None for item in removals)
    aside = ", ".join(item.name for item in removals if item.step is None)
    size = size_text(sum(item.bytes for item in removals))
    return f"{count} of {total:,} checkpoints{f' and {aside}' if aside else ''}, {size}"


def _disk(arguments: argparse.Namespace) -> Place:
    from refocused.checkpoints.step.checkpoint_directory import unused
    from refocused.checkpoints.step.retention import ALWAYS_KEPT, local_states
    from refocused.checkpoints.step.staging import (
        bytes_below,
        checkpoints_set_aside,
        remove_checkpoint,
    )

    def remove(path: Path) -> None:
        with unused(path):
            remove_checkpoint(path)

    catalog = run_selection.catalog_of(
        run_selection.find_run(arguments.run), run_selection.run_choice(arguments)
    )
    entries = [entry for entry in catalog.entries() if entry.local != "-"]
    states = local_states(catalog.local, catalog.branch, None)
    for entry in entries if catalog.remote is not None else ():
        if entry.is_present and (state := states.get(entry.step)) is not None:
            mirrored = _is_mirrored(catalog, entry)
            states[entry.step] = dataclasses.replace(state, mirrored=mirrored)
    aside = list(checkpoints_set_aside(catalog.local))
    removals = []
    for entry in entries:
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
                print_message("warning", f"{entry.name} {text}{path} by hand.")
    for path in aside:
        name = path.relative_to(catalog.local).as_posix()
        removals.append(Removal(None, name, bytes_below(path), functools.partial(remove, path)))
    return str(catalog.local), states, removals


def _bucket(arguments: argparse.Namespace) -> Place:
    from refocused.checkpoints.mirror.mirror import MirrorFiles
    from refocused.checkpoints.mirror.remote_checkpoints import RemoteRetention

    choice = run_selection.run_choice(arguments)
    run = choice.folder
    catalog, remote = run_selection.with_bucket(run, choice)
    sizes = {entry.name: entry.bucket_bytes for entry in catalog.entries()}
    branch, status = catalog.branch, MirrorFiles(run).read_status()
    copied_now = [*status.waiting, *status.skipped] if status is not None and status.alive else []
    states = RemoteRetention(remote, branch, keep=arguments.keep).states(in_use=copied_now)
    removals = []
    for step in states:
        name = branch.name_of(step)
        remove = functools.partial(remote.retract, name)
        removals.append(Removal(step, name, sizes.get(name, 0), remove))
    return remote.url, states, removals


def _is_mirrored(catalog: Catalog, entry: CatalogEntry) -> bool:
    from refocused.checkpoints.mirror.copies import marker_of
    from refocused.checkpoints.step.checkpoint_directory import read_checkpoint

    if catalog.remote is None or entry.bucket != "ok" or not entry.sound_here:
        return entry.bucket == "ok"
    # The listing cannot tell this save of the step from another; the marker can.
    return catalog.remote.marker(entry.name) == marker_of(
        read_checkpoint(catalog.local / entry.name)
    )
