"""`checkpoints info`: all that is known about one step."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.checkpoints_inspect import as_record
from refocused.commands.output import age, count_text, duration_text, size_text
from refocused.commands.run_selection import add_local_option, add_run_options, find_step

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.resume.step_contents import StepContents
    from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest


def add_info_arguments(parser: Parser) -> None:
    """Describe the command line."""
    parser.add_argument("step", metavar="STEP", help="latest, best, a number, a name or a path")
    add_run_options(parser)
    add_local_option(parser)


def run_info(arguments: argparse.Namespace) -> int:
    """Show one step; a broken one as far as it can be read."""
    from refocused.checkpoints.resume.step_contents import read_contents
    from refocused.checkpoints.resume.step_state import LEFT_BEHIND

    found = find_step(arguments.step, arguments)
    readable = found.entry.usable or found.entry.bucket == LEFT_BEHIND
    contents = read_contents(found.catalog, found.entry) if readable else None
    if arguments.json:
        print(json.dumps(_record(found.entry, contents), indent=1))
    else:
        _print(found.catalog, found.entry, contents)
    return found.outcome


def _record(entry: CatalogEntry, contents: StepContents | None) -> dict[str, Any]:
    """Return all of a step for JSON; without contents what the catalog knows."""
    if contents is None:
        return as_record(entry)
    manifest = contents.manifest
    return {
        **as_record(entry),
        "read_from": contents.where,
        "alias": manifest.alias,
        "manifest": manifest.model_dump(mode="json"),
        "trainer": contents.trainer,
        "settings": contents.settings,
    }


def _print(catalog: Catalog, entry: CatalogEntry, contents: StepContents | None) -> None:
    rows = _content_rows(contents) if contents else {}
    rows["local"] = _state(entry.local, f"{catalog.local}/{entry.name}")
    if catalog.remote is not None:
        rows["bucket"] = _state(entry.bucket, f"{catalog.remote.url}/{entry.name}")
    print("   ".join(filter(None, [entry.name, ", ".join(entry.notes)])))
    for name, text in rows.items():
        print(f"  {name:<10} {text}")


def _state(state: str, where: str) -> str:
    return state if state == "-" else f"{state}, {where}"


def _content_rows(contents: StepContents) -> dict[str, str]:
    manifest, trainer = contents.manifest, contents.trainer
    ago = age(time.time() - manifest.created.timestamp())
    mixture = f", mixture {manifest.data_mixture}" if manifest.data_mixture else ""
    return {
        "alias": manifest.alias,
        "saved": f"{manifest.created:%Y-%m-%d %H:%M:%S %Z} ({ago}) by run {manifest.run}",
        "trained": f"{manifest.step:,} steps, {count_text(manifest.tokens)} tokens, epoch "
        f"{manifest.epoch}, {manifest.files_done:,} of its files done",
        "loss": _losses(manifest, trainer),
        "spent": _spent(trainer),
        "form": f"{manifest.parameters:,} parameters, {manifest.world_size} ranks, ZeRO stage "
        f"{manifest.zero_stage}, {manifest.dtype}",
        "data": f"{manifest.data_order}, fingerprint {manifest.data_fingerprint[:16]}{mixture}",
        "written by": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        "files": _files(manifest),
    }


def _losses(manifest: CheckpointManifest, trainer: dict[str, Any]) -> str:
    parts = [f"training {_loss(manifest.loss)}", f"validation {_loss(manifest.validation_loss)}"]
    if trainer["best_loss"] is not None:
        parts.append(f"best so far {_loss(trainer['best_loss'])} at step {trainer['best_step']:,}")
    return ", ".join(parts)


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"


def _spent(trainer: dict[str, Any]) -> str:
    cost = trainer["cost_usd"]
    return duration_text(trainer["seconds"]) + (f", ${cost:,.2f}" if cost is not None else "")


def _files(manifest: CheckpointManifest) -> str:
    """Sum files up by their folder: `9 files, 10.6 GB (zero/ 10.6 GB in 4, ...)`."""
    groups: dict[str, list[int]] = defaultdict(list)
    for file, record in manifest.files.items():
        folder, slash, _ = file.partition("/")
        groups[f"{folder}/" if slash else "beside them"].append(record.size)
    parts = [f"{name} {size_text(sum(sizes))} in {len(sizes)}" for name, sizes in groups.items()]
    return f"{len(manifest.files)}, {size_text(manifest.total_bytes)} ({', '.join(parts)})"
