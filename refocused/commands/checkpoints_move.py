"""`checkpoints download`, `upload`, `export`: copy a checkpoint, or make a model folder of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from refocused.commands.arguments import Parser
from refocused.commands.local_steps import fetch_shown, local_step, refuse_another
from refocused.commands.output import ProgressLine, count, duration_text, size_text
from refocused.commands.run_selection import (
    add_local_option,
    add_run_options,
    catalog_of,
    find_run,
    run_of,
)
from refocused.system.errors import CheckpointError, ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.copy_step import StepCopier
    from refocused.checkpoints.mirror.remote_steps import RemoteSteps
    from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
    from refocused.checkpoints.step.step_directory import StepDirectory


def add_export_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("step", metavar="STEP", help="latest, best, a number, a name, a path or a gs:// address")
    add("out", metavar="OUT", type=Path, help="the folder to make")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights (bf16)")
    add(
        "--tokenizer",
        metavar="NAME",
        help="bytes, gpt2, hub:MODEL or a tokenizer.json (default: its own)",
    )
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")
    add("--no-tokenizer", action="store_true", help="export the model alone")
    add(
        "--no-compare",
        action="store_true",
        help="do not load the result to compare it, which takes the memory of the whole model",
    )
    add_run_options(parser)
    add_local_option(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Export one step.

    Raises:
        ConfigError: The folder exists; known before torch is imported and a step is verified.
    """
    if arguments.out.expanduser().exists():
        raise ConfigError(f"{arguments.out} exists already. Remove it, or name another folder.")
    from refocused.evaluate.export import export_step
    from refocused.evaluate.model_weights import ModelWeights, tokenizer_of
    from refocused.tokenizers.encoders import TokenizerChoice

    named = arguments.tokenizer
    choice = None if named is None else TokenizerChoice(named, bpe_folder=arguments.bpe_folder)
    started = time.monotonic()
    step = local_step(arguments.step, arguments)
    _say(f"verifying {step.path}")
    weights = ModelWeights(step)
    exported = export_step(
        weights,
        arguments.out.expanduser(),
        tokenizer=None if arguments.no_tokenizer else tokenizer_of(weights, choice),
        dtype=arguments.dtype,
        compare=not arguments.no_compare,
        report=_say,
    )
    seconds = time.monotonic() - started
    if arguments.json:
        found = dataclasses.asdict(exported) | {"folder": str(exported.folder)}
        print(json.dumps({"step": step.step, **found, "seconds": seconds}, indent=1))
        return ExitCode.OK
    size = f"{exported.parameters:,} parameters, {size_text(exported.bytes)}"
    print(f"{exported.folder}: step {step.step:,}, {size}, in {duration_text(seconds)}")
    if exported.logit_difference is not None:
        share = f"{exported.logit_difference:.0e}"
        print(f"transformers loads the same weights; logits agree to {share} of the largest")
    return ExitCode.OK


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def add_download_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("step", metavar="STEP", help="latest, best, a number or a name")
    add("--to", type=Path, metavar="DIR", help="folder that gets it (default: the run's own)")
    add("--threads", type=count, default=8, metavar="N", help="files at once (8)")
    add_run_options(parser)


def run_download(arguments: argparse.Namespace) -> int:
    """Fetch a step from the bucket unless it is on the disk, every byte right."""
    run = run_of(arguments)
    catalog = catalog_of(run, arguments, checkpoints=arguments.to)
    remote = _require_bucket(catalog, run)
    started = time.monotonic()
    found = catalog.resolve(_name(arguments.step))
    if arguments.to is not None:
        refuse_another(remote, catalog.local / found.name, found.name)
    here = _whole_here(found.path) if found.path is not None else None
    step = here or fetch_shown(catalog, found.name, threads=arguments.threads)
    seconds = time.monotonic() - started
    if arguments.json:
        content = {
            "step": step.step,
            "path": str(step.path),
            "files": len(step.manifest.files),
            "bytes": step.manifest.total_bytes,
            "downloaded": here is None,
            "seconds": seconds,
        }
        print(json.dumps(content, indent=1))
        return ExitCode.OK
    size = f"{len(step.manifest.files)} files, {size_text(step.manifest.total_bytes)}"
    how = "was here already" if here else f"downloaded in {duration_text(seconds)}"
    print(f"{step.path}: {size}, all verified, {how}")
    return ExitCode.OK


def add_upload_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("step", metavar="STEP", help="all, latest, best, a number or a name")
    add("--deep", action="store_true", help="read what a bucket keeps no checksums of, a folder")
    add("--threads", type=count, default=4, metavar="N", help="files at once (4)")
    add_run_options(parser)


def run_upload(arguments: argparse.Namespace) -> int:
    """Complete in the bucket what is on the disk; the exit code says whether all of it is there."""
    from refocused.checkpoints.mirror.mirror_status import MirrorFiles
    from refocused.system.locks import FileLock

    run = find_run(arguments.run)
    catalog = catalog_of(run, arguments)
    remote = _require_bucket(catalog, run)
    lock = FileLock(MirrorFiles(run).lock)
    if not lock.acquire():
        raise CheckpointError(
            f"Another process is copying the steps of {run} to a bucket: its mirror, or another "
            "upload. It needs no help; see how far it is: python launch/checkpoints.py list"
        )
    started = time.monotonic()
    try:
        result = _upload(catalog, remote, _wanted(catalog, arguments.step), arguments)
    finally:
        lock.release()
    seconds = time.monotonic() - started
    if arguments.json:
        content = {"bucket": remote.url, **dataclasses.asdict(result), "seconds": seconds}
        print(json.dumps(content, indent=1))
    else:
        _print_uploads(result, remote.url, seconds)
    if result.failed:
        return ExitCode.FAILED
    return ExitCode.NOT_MIRRORED if result.parts else ExitCode.OK


@dataclasses.dataclass(slots=True)
class UploadResult:
    """What became of each step.

    Attributes:
        uploaded: Steps that were completed.
        there: Steps that needed nothing.
        parts: Steps of which the bucket lacks what other machines have.
        failed: Steps that cannot be copied, with the reason.
    """

    uploaded: list[int] = dataclasses.field(default_factory=list)
    there: list[int] = dataclasses.field(default_factory=list)
    parts: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)


def _require_bucket(catalog: Catalog, run: Path) -> RemoteSteps:
    if catalog.remote is None:
        raise ConfigError(f"{run} has no mirror. Name the bucket: --bucket gs://bucket/prefix")
    return catalog.remote


def _name(request: str) -> str:
    if "/" in request:
        raise ConfigError(
            f"{request}: a path names a step on a disk; give its number or name, and the run that "
            "it belongs to with --run."
        )
    return request


def _whole_here(path: Path) -> StepDirectory | None:
    """Return a local step when every byte of it is right."""
    from refocused.checkpoints.step.step_directory import read_step
    from refocused.checkpoints.step.verify import describe, verify

    step = read_step(path)
    problems = verify(step, deep=True)
    if not problems:
        return step
    print(f"{path} is corrupt: {describe(problems)}. It is fetched again.", file=sys.stderr)
    return None


def _wanted(catalog: Catalog, request: str) -> list[CatalogEntry]:
    """The steps to copy, newest first: it is the one that a resume needs."""
    entries = catalog.entries()
    if request != "all":
        chosen = catalog.find(_name(request), entries)
        if chosen.local == "-":
            raise CheckpointError(
                f"{chosen.name} is not in {catalog.local}, so there is nothing to upload. "
                "See what is where: python launch/checkpoints.py list"
            )
        return [chosen]
    return [entry for entry in reversed(entries) if entry.local != "-"]


def _upload(
    catalog: Catalog,
    remote: RemoteSteps,
    entries: Sequence[CatalogEntry],
    arguments: argparse.Namespace,
) -> UploadResult:
    """Copy steps; one that is damaged here does not keep the others back."""
    result = UploadResult()
    remote.introduce()
    for entry in entries:
        try:
            category = _upload_one(catalog, remote, entry, arguments)
        except CheckpointError as error:
            result.failed[entry.step] = str(error)
            print(error, file=sys.stderr)
            continue
        getattr(result, category).append(entry.step)
    return result


def _upload_one(
    catalog: Catalog, remote: RemoteSteps, entry: CatalogEntry, arguments: argparse.Namespace
) -> Literal["uploaded", "there", "parts"]:
    """Complete one step in the bucket; return where in the result it belongs."""
    from refocused.checkpoints.mirror.copy_step import StepCopier
    from refocused.checkpoints.step.step_directory import read_step

    if not entry.sound_here:
        if entry.bucket == "ok":
            return "there"
        raise CheckpointError(
            f"{catalog.local / entry.name} is {entry.local}. It is not copied to the bucket; "
            "remove it when nothing of it is needed."
        )
    line = ProgressLine(f"upload {entry.step:,}")
    reports: list[int] = []

    def report(done_bytes: int, total_bytes: int) -> None:
        reports.append(done_bytes)
        line.show(done_bytes, total_bytes)

    copier = StepCopier(remote, stopping=lambda: False, report=report, threads=arguments.threads)
    step = read_step(catalog.local / entry.name)
    try:
        whole = _copy(copier, step, entry, deep=arguments.deep)
    finally:
        line.end()
    if not whole:
        return "parts"
    return "uploaded" if reports else "there"


def _copy(copier: StepCopier, step: StepDirectory, entry: CatalogEntry, *, deep: bool) -> bool:
    """Copy a step; of a copy that is there, what is damaged. Return whether all of it is there."""
    from refocused.checkpoints.mirror.copy_step import verify_remote
    from refocused.checkpoints.step.verify import describe

    problems = verify_remote(copier.remote, entry.name, deep=deep) if entry.bucket != "-" else []
    if problems:
        print(
            f"{copier.remote.url}/{entry.name}: {describe(problems)}. Sent again.", file=sys.stderr
        )
        return copier.repair(step, [problem.file for problem in problems])
    return copier.copy(step)


def _print_uploads(result: UploadResult, url: str, seconds: float) -> None:
    for steps, what in ((result.uploaded, "uploaded"), (result.there, "there already")):
        if steps:
            print(f"{what}: {', '.join(f'{step:,}' for step in steps)}")
    if result.failed:
        print(f"failed: {', '.join(f'{step:,}' for step in result.failed)}")
    if result.parts:
        waiting = ", ".join(f"{step:,}" for step in result.parts)
        print(f"parts of other machines are missing: {waiting}")
        print("upload on every machine: on node 0 first, and on it again when the others are done")
    whole = len(result.uploaded) + len(result.there)
    wanted = whole + len(result.failed) + len(result.parts)
    print(f"{url}: {whole} of {wanted} steps are whole there ({duration_text(seconds)})")
