"""`checkpoints verify`: compare checkpoints with their manifests, here and in the bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.checkpoints.show import STEP_HELP
from refocused.commands.output import print_result, progress_line
from refocused.commands.run_selection import add_run_options, find_steps, list_steps
from refocused.system.errors import CheckpointError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry

_NAMED = 10


def run_verify(parser: Parser) -> int:
    """Verify checkpoints; the exit code is CHECK_FAILED unless all are whole."""
    parser.examples = ("latest", "all --deep --run demo")
    parser.add_argument("step", metavar="STEP", help=f"all, {STEP_HELP}")
    parser.group("options")("--deep", "read every local byte and compare checksums")
    add_run_options(parser)
    arguments = parser.read()
    if arguments.step == "all":
        found = list_steps(arguments)
    else:
        (found,) = find_steps([arguments.step], arguments)
    catalog, entries, deep, done = found.catalog, found.entries, arguments.deep, 0
    total = sum(entry.size or 0 for entry in entries if entry.local != "-")
    with progress_line("verify") as show:

        def read(size: int) -> None:
            nonlocal done
            done += size
            show(done, total)

        if deep and total:
            show(0, total)
        checks = [_check(catalog, entry, deep=deep, read=read) for entry in reversed(entries)]
    checks = [check for check in checks if (check["local"], check["bucket"]) != ("-", "-")]
    lines = []
    for check in checks:
        lines.append("{name}   local {local}   bucket {bucket}".format_map(check))
        for place in ("local", "bucket"):
            bad = check[f"{place}_problems"]
            lines += [f"  {place:<6} {one['file']} {one['problem']}" for one in bad[:_NAMED]]
            if len(bad) > _NAMED:
                lines.append(f"  {place:<6} and {len(bad) - _NAMED} more; --json lists all")
    whole = sum(check["whole"] for check in checks)
    how = "read every byte" if deep else "opened the files; --deep reads every byte"
    lines.append(f"{whole} of {len(checks)} checkpoints are whole ({how})")
    if not checks:
        lines = [f"No checkpoints in {catalog.local}."]
    print_result(checks, lines, as_json=arguments.json)
    return found.outcome if whole == len(checks) else ExitCode.CHECK_FAILED


def _check(
    catalog: Catalog, entry: CatalogEntry, *, deep: bool, read: Callable[[int], None]
) -> dict[str, Any]:
    """Check one checkpoint; return its states, as in the catalog, and its problems.

    `whole`: no problem, and at least one complete copy (or this machine's part of one).
    """
    from refocused.bucket.bucket import crc32c_of
    from refocused.checkpoints.mirror.copy_step import verify_remote
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
    from refocused.checkpoints.step.step_directory import read_step
    from refocused.checkpoints.step.verify import FileProblem, unreadable, verify

    local, bucket, path = entry.local, entry.bucket, catalog.local / entry.name
    here: list[FileProblem] = []
    there: list[FileProblem] = []
    if local != "-":
        try:
            step = read_step(path)
        except CheckpointError as error:
            here = [FileProblem(MANIFEST, f"cannot be used: {error}")]
        else:
            here = verify(step, deep=False)
            known = {problem.file for problem in here}
            for file, record in step.files.items() if deep else ():
                if file not in known:
                    here += verify(step, deep=True, files=[file])
                read(record.size)
            here += unreadable(step, set(step.files) - {problem.file for problem in here})
        if not path.exists():
            here, local = [], "-"  # removed by retention meanwhile
    if bucket != "-" and catalog.remote is not None:
        there = verify_remote(catalog.remote, entry.name, deep=deep)
        marker = None if there or not entry.sound_here else catalog.remote.marker(entry.name)
        if marker is not None and marker.manifest_crc32c != crc32c_of(path / MANIFEST):
            text = "belongs to another save of this step than the local one"
            there = [FileProblem(MANIFEST, text)]
    if bucket.startswith("broken"):
        bucket = "ok"  # the catalog knew only the listing
    return {
        "step": entry.step,
        "name": entry.name,
        "local": "broken" if here else local,
        "bucket": "broken" if there else bucket,
        "local_problems": [dataclasses.asdict(problem) for problem in here],
        "bucket_problems": [dataclasses.asdict(problem) for problem in there],
        "whole": not (here or there) and (entry.sound_here or bucket == "ok"),
    }
