"""`checkpoints list`, `info`, `verify`, `compare`, `plot`: show what is known about checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from refocused.commands.arguments import Parser, add_json
from refocused.commands.output import (
    check_picture,
    print_result,
    progress_line,
    setting_text,
    table,
    write_picture,
)
from refocused.commands.run_selection import (
    add_run_options,
    find_run,
    find_steps,
    list_steps,
    run_choice,
)
from refocused.system.errors import CheckpointError, ExitCode, RefocusedError, counted
from refocused.system.number_text import age, count_text, duration, known, size_text

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.resume.changes import CheckpointContents, Difference

_HEADINGS = ("STEP", "SAVED", "SIZE", "LOCAL", "BUCKET", "LOSS", "VALIDATION", "BITS/BYTE", "NOTE")
STEP_HELP = "latest, best, a number, a name or a path"
_SHOWN_PROBLEMS = 10


def run_list(parser: Parser) -> int:
    """List the checkpoints, newest first, and the space they take."""
    parser.examples = ("", "--run demo --remote")
    either = parser.group("storage", exclusive=True)
    either("--local", "do not read the bucket")
    either("--remote", "list only what the bucket has")
    add_run_options(parser, local=False)
    arguments = parser.read()
    from refocused.bucket.partial_files import free_bytes
    from refocused.checkpoints.step.checkpoint_directory import checkpoint_paths
    from refocused.checkpoints.step.staging import bytes_below, checkpoints_set_aside, leftovers

    listing = list_steps(run_choice(arguments))
    catalog, entries = listing.catalog, listing.entries
    disk = {
        "steps": sum(map(bytes_below, checkpoint_paths(catalog.local).values())),
        "leftovers": sum(map(bytes_below, leftovers(catalog.local))),
        "aside": sum(map(bytes_below, checkpoints_set_aside(catalog.local))),
        "free": free_bytes(catalog.local),
    }
    remote_bytes = sum(entry.bucket_bytes for entry in entries)
    parts = [f"{size_text(disk['steps'])} in checkpoints"]
    if disk["leftovers"]:
        parts.append(f"{size_text(disk['leftovers'])} in unfinished saves")
    if disk["aside"]:
        parts.append(f"{size_text(disk['aside'])} set aside (removed by checkpoints prune)")
    lines = [f"disk     {', '.join(parts)}, {size_text(disk['free'])} free"]
    if catalog.remote is not None:
        lines.append(f"bucket   {size_text(remote_bytes)} in {catalog.remote.url}")
    record = {
        "run": str(listing.run),
        "bucket": catalog.remote.url if catalog.remote else None,
        "steps": [_entry_record(entry) for entry in entries],
        "disk_bytes": disk,
        "bucket_bytes": remote_bytes if catalog.remote else None,
    }
    if entries and not arguments.json:
        print_entries(entries)
    elif not entries:
        lines.insert(0, f"No checkpoints in {catalog.local}.")
    if entries and arguments.run is None:
        lines.insert(0, f"run      {listing.run}, which changed last; --run NAME chooses another")
    print_result(record, lines, as_json=arguments.json)
    return listing.outcome


def print_entries(entries: Iterable[CatalogEntry], *, file: TextIO | None = None) -> None:
    """Print a table of checkpoints, newest first."""
    now = time.time()
    rows = [
        (
            f"{entry.step:,}",
            age(now - entry.created.timestamp()) if entry.created else "-",
            "-" if entry.size is None else size_text(entry.size),
            entry.local.partition(":")[0],
            entry.bucket.partition(":")[0],
            _loss(entry.loss, unknown="-"),
            _loss(entry.validation_loss, unknown="-"),
            _loss(entry.bits_per_byte, unknown="-"),
            ", ".join(entry.notes),
        )
        for entry in entries
    ]
    print(*table(reversed(rows), *_HEADINGS, file=file), sep="\n", file=file)


def _entry_record(entry: CatalogEntry) -> dict[str, Any]:
    return dataclasses.asdict(entry) | {"created": entry.created and entry.created.isoformat()}


def _loss(loss: float | None, *, unknown: str = "unknown") -> str:
    return unknown if loss is None else f"{loss:.4f}"


def run_info(parser: Parser) -> int:
    """Show one checkpoint, a corrupt one as far as it can be read."""
    parser.examples = ("latest", "400 --run demo --json")
    parser.add_argument("step", metavar="STEP", help=STEP_HELP)
    add_run_options(parser)
    arguments = parser.read()
    from refocused.checkpoints.resume.changes import read_contents

    (listing,) = find_steps([arguments.step], run_choice(arguments))
    catalog, (entry,) = listing.catalog, listing.entries
    record, rows = _entry_record(entry), {}
    if entry.usable:
        contents = read_contents(catalog, entry)
        rows = _content_rows(contents)
        record |= {
            "read_from": contents.where,
            "alias": contents.manifest.alias,
            "manifest": contents.manifest.model_dump(mode="json"),
            "trainer": contents.trainer,
            "settings": contents.settings,
        }
    places = {"local": (entry.local, str(catalog.local))}
    if catalog.remote is not None:
        places["bucket"] = (entry.bucket, catalog.remote.url)
    for name, (state, where) in places.items():
        rows[name] = state if state == "-" else f"{state}, {where}/{entry.name}"
    head = "   ".join(filter(None, [entry.name, ", ".join(entry.notes)]))
    lines = [head, *(f"  {name:<10} {text}" for name, text in rows.items())]
    print_result(record, lines, as_json=arguments.json)
    return listing.outcome


def _content_rows(contents: CheckpointContents) -> dict[str, str]:
    manifest, trainer = contents.manifest, contents.trainer
    ago = age(time.time() - manifest.created.timestamp())
    loss = f"training {_loss(manifest.loss)}, validation {_loss(manifest.validation_loss)}"
    loss += known(" ({:.4f} bits per byte)", manifest.bits_per_byte)
    if trainer["best_loss"] is not None:
        best = trainer["best_step"]
        loss += f", best so far {_loss(trainer['best_loss'])} at step {best:,}"
    cost = trainer["cost_usd"]
    folders: dict[str, list[int]] = defaultdict(list)
    for file, record in manifest.files.items():
        folder, slash, _ = file.partition("/")
        folders[f"{folder}/" if slash else "the top folder"].append(record.size)
    files = [f"{name} {size_text(sum(sizes))} in {len(sizes)}" for name, sizes in folders.items()]
    mixture = f", mixture {manifest.data_mixture}" if manifest.data_mixture else ""
    return {
        "alias": manifest.alias,
        "saved": f"{manifest.created:%Y-%m-%d %H:%M:%S %Z} ({ago}) by run {manifest.run}",
        "trained": f"{counted(manifest.step, 'step')}, {count_text(manifest.tokens)} tokens, epoch "
        f"{manifest.epoch}, {manifest.files_done:,} of its files done",
        "loss": loss,
        "time": duration(trainer["seconds"]) + ("" if cost is None else f", ${cost:,.2f}"),
        "size": f"{manifest.parameters:,} parameters, {counted(manifest.world_size, 'rank')}, "
        f"ZeRO stage {manifest.zero_stage}, {manifest.dtype}",
        "data": f"{manifest.data_order}, fingerprint {manifest.data_fingerprint[:16]}{mixture}",
        "written by": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        **({"origin": str(manifest.origin)} if manifest.origin is not None else {}),
        "files": f"{len(manifest.files)}, {size_text(manifest.total_bytes)} ({', '.join(files)})",
    }


def run_verify(parser: Parser) -> int:
    """Verify checkpoints; the exit code is CHECK_FAILED unless all are whole."""
    parser.examples = ("latest", "all --deep --run demo")
    parser.add_argument("step", metavar="STEP", help=f"all, {STEP_HELP}")
    parser.group("options")("--deep", "read every local byte and compare checksums")
    add_run_options(parser)
    arguments = parser.read()
    if arguments.step == "all":
        listing = list_steps(run_choice(arguments))
    else:
        (listing,) = find_steps([arguments.step], run_choice(arguments))
    catalog, entries, deep, done = listing.catalog, listing.entries, arguments.deep, 0
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
        for copy in ("local", "bucket"):
            bad = check[f"{copy}_problems"]
            problems = [f"{problem['file']} {problem['problem']}" for problem in bad]
            lines += [f"  {copy:<6} {text}" for text in problems[:_SHOWN_PROBLEMS]]
            if len(bad) > _SHOWN_PROBLEMS:
                lines.append(f"  {copy:<6} and {len(bad) - _SHOWN_PROBLEMS} more; --json lists all")
    whole = sum(check["whole"] for check in checks)
    how = "read every byte" if deep else "opened the files; --deep reads every byte"
    lines.append(f"{whole} of {len(checks)} checkpoints are whole ({how})")
    if not checks:
        lines = [f"No checkpoints in {catalog.local}."]
    print_result(checks, lines, as_json=arguments.json)
    return listing.outcome if whole == len(checks) else ExitCode.CHECK_FAILED


def _check(
    catalog: Catalog, entry: CatalogEntry, *, deep: bool, read: Callable[[int], None]
) -> dict[str, Any]:
    """Check one checkpoint; return its states, as in the catalog, and its problems.

    `whole`: no problem, and at least one complete copy (or this machine's part of one).
    """
    from refocused.bucket.bucket import crc32c_of
    from refocused.checkpoints.mirror.copies import verify_remote
    from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
    from refocused.checkpoints.step.verify import FileProblem, unreadable, verify

    local, bucket, path = entry.local, entry.bucket, catalog.local / entry.name
    on_disk: list[FileProblem] = []
    in_bucket: list[FileProblem] = []
    if local != "-":
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            on_disk = [FileProblem(MANIFEST, f"cannot be used: {error}")]
        else:
            on_disk = verify(checkpoint, deep=deep, progress=read if deep else None)
            if not deep:
                damaged = {problem.file for problem in on_disk}
                on_disk += unreadable(checkpoint, set(checkpoint.files) - damaged)
        if not path.exists():
            on_disk, local = [], "-"  # removed by retention meanwhile
    if bucket != "-" and catalog.remote is not None:
        in_bucket = verify_remote(catalog.remote, entry.name, deep=deep)
        marker = None if in_bucket or not entry.sound_here else catalog.remote.marker(entry.name)
        if marker is not None and marker.manifest_crc32c != crc32c_of(path / MANIFEST):
            text = "belongs to another save of this step than the local one"
            in_bucket = [FileProblem(MANIFEST, text)]
    if bucket.startswith("broken"):
        bucket = "ok"  # the catalog knew only the listing
    return {
        "step": entry.step,
        "name": entry.name,
        "local": "broken" if on_disk else local,
        "bucket": "broken" if in_bucket else bucket,
        "local_problems": [dataclasses.asdict(problem) for problem in on_disk],
        "bucket_problems": [dataclasses.asdict(problem) for problem in in_bucket],
        "whole": not (on_disk or in_bucket) and (entry.sound_here or bucket == "ok"),
    }


def run_compare(parser: Parser) -> int:
    """Show how two checkpoints differ."""
    parser.examples = ("200 latest --run demo",)
    for name in ("a", "b"):
        text = "latest, best, a number, a name, or a path in another run"
        parser.add_argument(name, metavar=name.upper(), help=text)
    add_run_options(parser)
    arguments = parser.read()
    from refocused.checkpoints.resume.changes import differences, facts_of, read_contents

    listings = find_steps([arguments.a, arguments.b], run_choice(arguments))
    a, b = (read_contents(step.catalog, step.entries[0]) for step in listings)
    of_a, of_b = ({**step.trainer, **step.manifest.model_dump()} for step in (a, b))
    losses: list[dict[str, Any]] = []
    rows: dict[str, list[tuple[str, ...]]] = {"losses": []}
    for name in ("loss", "validation_loss", "bits_per_byte", "best_loss"):
        loss_a, loss_b = of_a[name], of_b[name]
        change = None if None in (loss_a, loss_b) else loss_b - loss_a
        losses.append({"name": name, "a": loss_a, "b": loss_b, "change": change})
        shown = "" if change is None else f"{change:+.4f}"
        rows["losses"].append((name, _loss(loss_a), _loss(loss_b), shown))
    facts = differences(facts_of(a), facts_of(b))
    settings = differences(a.settings, b.settings)
    record = {
        "a": a.where,
        "b": b.where,
        "facts": [dataclasses.asdict(fact) for fact in facts],
        "losses": losses,
        "settings": [dataclasses.asdict(setting) for setting in settings],
    }
    rows["facts that differ"] = [_row(fact) for fact in facts]
    rows["settings that differ"] = [_row(setting) for setting in settings]
    lines = [f"A  {a.where}", f"B  {b.where}"]
    for title, found_rows in rows.items():
        lines.append(f"\n{title}" if found_rows else f"\n{title}: none")
        lines += table(found_rows, indent=2)
    print_result(record, lines, as_json=arguments.json)
    return max(step.outcome for step in listings)


def _row(difference: Difference) -> tuple[str, ...]:
    a = "-" if difference.only_in == "b" else setting_text(difference.a)
    b = "-" if difference.only_in == "a" else setting_text(difference.b)
    return difference.name, a, b


def run_plot(parser: Parser) -> None:
    """Draw a run's losses, and print the last and the best."""
    parser.examples = ("--run demo --out loss.png",)
    add = parser.group("output")
    parser.group("input")("--run RUN", "a run's folder or name (default: the newest in runs/)")
    add("--out FILE.png", "picture (default: loss.png in the run)", type=Path)
    add_json(parser, "print the losses as JSON too")
    arguments = parser.read()
    from refocused.metrics.expected_loss import EXPECTED_LOSS_FILE
    from refocused.metrics.history import (
        METRICS_FILE,
        StepMetrics,
        Validation,
        lowest,
        read_history,
    )
    from refocused.metrics.jsonl import read_json
    from refocused.monitor.screen.pictures import draw_history

    run = find_run(arguments.run)
    file, out = run / METRICS_FILE, arguments.out or run / "loss.png"
    check_picture(out, option="--out")
    try:
        history = read_history(file)
    except OSError as error:
        text = f"{file} cannot be read ({error.strerror}). Name the folder of a run with --run."
        raise RefocusedError(text) from error
    training, validation = history.steps, history.validations
    if not (training or validation):
        raise RefocusedError(f"{file} has no step yet. Wait for the first one (log.interval).")
    title = run.absolute().name
    expected = read_json(run / EXPECTED_LOSS_FILE)
    write_picture(
        lambda out: draw_history(history, out, title=title, expected=expected), out, option="--out"
    )
    lines = [f"{out}: {counted(len(training), 'step')}, {counted(len(validation), 'validation')}"]
    shown = {
        "last training": training[-1] if training else None,
        "last validation": validation[-1] if validation else None,
        "best validation": (best := lowest(validation)),
    }
    lines += [
        f"  {what:<15} {_loss(point.loss, unknown='not finite')} at step {point.step:,}"
        for what, point in shown.items()
        if point
    ]

    def pairs(points: Iterable[StepMetrics | Validation]) -> list[dict[str, float | None]]:
        return [{"step": point.step, "loss": point.loss} for point in points]

    losses = {"training": pairs(training), "validation": pairs(validation)}
    record = {"file": str(out), **losses, "best": pairs([best])[0] if best else None}
    print_result(record, lines, as_json=arguments.json)
