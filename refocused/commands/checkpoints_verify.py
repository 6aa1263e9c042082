"""`checkpoints verify`: whether steps are what their manifests say, here and in the bucket."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.output import ProgressLine
from refocused.commands.run_selection import (
    add_local_option,
    add_run_options,
    catalog_of,
    find_step,
    listed,
    run_of,
)
from refocused.system.errors import CheckpointError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.verify import FileProblem

_NAMED = 10


@dataclasses.dataclass(frozen=True, slots=True)
class StepCheck:
    """What was found about one step.

    Attributes:
        step: Optimizer updates done.
        name: Directory name.
        local: `ok`, `node N of M: its part` (that is right), `broken` or `-`.
        bucket: `ok`, `broken`, `superseded`, `NN %` (not all of it is there yet) or `-`.
        local_problems: What is wrong on the disk.
        bucket_problems: What is wrong in the bucket.
        whole: Nothing is wrong, and the step, or this machine's part, is whole in one place at
            least.
    """

    step: int
    name: str
    local: str
    bucket: str
    local_problems: tuple[FileProblem, ...]
    bucket_problems: tuple[FileProblem, ...]
    whole: bool


def add_verify_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("step", metavar="STEP", help="all, latest, best, a number, a name or a path")
    add("--deep", action="store_true", help="also read every byte here, and compare checksums")
    add_run_options(parser)
    add_local_option(parser)


def run_verify(arguments: argparse.Namespace) -> int:
    """Check steps; the exit code says whether all are whole."""
    if arguments.step == "all":
        catalog = catalog_of(run_of(arguments), arguments)
        listing = listed(catalog, arguments)
        entries, outcome = listing.entries, listing.outcome
    else:
        found = find_step(arguments.step, arguments)
        catalog, entries, outcome = found.catalog, [found.entry], found.outcome
    line = ProgressLine("verify")
    try:
        checks = _check_all(catalog, entries, deep=arguments.deep, show=line.show)
    finally:
        line.end()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        _print(catalog, checks, deep=arguments.deep)
    return outcome if all(check.whole for check in checks) else ExitCode.CHECK_FAILED


def _check_all(
    catalog: Catalog,
    entries: Sequence[CatalogEntry],
    *,
    deep: bool,
    show: Callable[[int, int], None],
) -> list[StepCheck]:
    """Check each step, newest first; `show` is told the bytes read here and those to read."""
    here = [entry.size or 0 for entry in entries if entry.local != "-"]
    done, total = 0, sum(here) if deep else 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        show(done, total)

    if total:
        show(0, total)
    checks = [_check(catalog, entry, deep=deep, read=read) for entry in reversed(entries)]
    return [check for check in checks if (check.local, check.bucket) != ("-", "-")]


def _check(
    catalog: Catalog, entry: CatalogEntry, *, deep: bool, read: Callable[[int], None]
) -> StepCheck:
    local, bucket = entry.local, entry.bucket
    here: list[FileProblem] = []
    if local != "-":
        here = _local_problems(catalog, entry, deep=deep, read=read)
        if not (catalog.local / entry.name).exists():
            here, local = [], "-"  # retention removed it meanwhile
    there = _bucket_problems(catalog, entry, deep=deep) if bucket != "-" else []
    if bucket.startswith("broken"):
        bucket = "ok"  # the catalog had only a listing
    return StepCheck(
        step=entry.step,
        name=entry.name,
        local="broken" if here else local,
        bucket="broken" if there else bucket,
        local_problems=tuple(here),
        bucket_problems=tuple(there),
        whole=not here and not there and (entry.sound_here or bucket in ("ok", "superseded")),
    )


def _local_problems(
    catalog: Catalog, entry: CatalogEntry, *, deep: bool, read: Callable[[int], None]
) -> list[FileProblem]:
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
    from refocused.checkpoints.step.step_directory import read_step
    from refocused.checkpoints.step.verify import FileProblem, unreadable, verify

    try:
        step = read_step(catalog.local / entry.name)
    except CheckpointError as error:
        return [FileProblem(MANIFEST, f"cannot be used: {error}")]
    problems = verify(step, deep=False)
    if deep:
        known = {problem.file for problem in problems}
        for file, record in step.files.items():
            if file not in known:
                problems += verify(step, deep=True, files=[file])
            read(record.size)
    return problems + unreadable(step, set(step.files) - {problem.file for problem in problems})


def _bucket_problems(catalog: Catalog, entry: CatalogEntry, *, deep: bool) -> list[FileProblem]:
    from refocused.bucket.bucket import crc32c_of
    from refocused.checkpoints.mirror.copy_step import verify_remote
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
    from refocused.checkpoints.step.verify import FileProblem

    assert catalog.remote is not None  # it has the step
    problems = verify_remote(catalog.remote, entry.name, deep=deep)
    if problems or not entry.sound_here or entry.bucket == "superseded":
        return problems
    marker = catalog.remote.marker(entry.name)
    if marker is not None and marker.manifest_crc32c != crc32c_of(
        catalog.local / entry.name / MANIFEST
    ):
        return [FileProblem(MANIFEST, "is of another save of this step than the one here")]
    return []


def _print(catalog: Catalog, checks: Sequence[StepCheck], *, deep: bool) -> None:
    if not checks:
        print(f"No checkpoints in {catalog.local}.")
        return
    for check in checks:
        print(f"{check.name}   local {check.local}   bucket {check.bucket}")
        for place, problems in (("local", check.local_problems), ("bucket", check.bucket_problems)):
            for problem in problems[:_NAMED]:
                print(f"  {place:<6} {problem}")
            if len(problems) > _NAMED:
                print(f"  {place:<6} and {len(problems) - _NAMED} more; --json names all")
    whole = sum(check.whole for check in checks)
    how = "every byte was read" if deep else "files were opened; --deep reads every byte"
    print(f"{whole} of {len(checks)} steps are whole ({how})")
