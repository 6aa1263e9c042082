"""`checkpoints export`, `download`, `upload`: convert and copy checkpoints."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands import run_selection
from refocused.commands.arguments import Parser, add_tokenizer_options, tokenizer_choice
from refocused.commands.output import count, print_result, progress_line
from refocused.system.errors import CheckpointError, ConfigError, ExitCode, as_typed, counted
from refocused.system.logs import print_message
from refocused.system.number_text import duration, size_text

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import CatalogEntry


def run_export(parser: Parser) -> None:
    """Export one checkpoint as a transformers folder."""
    parser.examples = ("best data/model --run demo", "latest data/model32 --dtype fp32")
    add = parser.add_argument
    add("step", metavar="STEP", help="latest, best, a number, a name, a path or a gs:// address")
    add("out", metavar="OUT", type=Path, help="new folder for the model")
    add = parser.group("output")
    add("--dtype", "type of the weights", choices=("bf16", "fp16", "fp32"), default="bf16")
    add("--no-compare", "do not load the export to compare it (needs memory for the whole model)")
    add("--push hub:NAME", "also upload the folder to the Hugging Face hub; a new model is private")
    add_tokenizer_options(parser)
    parser.group("tokenizer")("--no-tokenizer", "export the model without a tokenizer")
    run_selection.add_run_options(parser)
    arguments = parser.read()
    if arguments.out.exists():  # before torch is imported
        raise ConfigError(f"{arguments.out} exists. Remove it or name another folder.")
    if arguments.push is not None and not arguments.push.startswith("hub:"):
        raise ConfigError(f"--push {arguments.push}: expected hub:NAME, such as hub:me/model.")
    from refocused.evaluate.export import export_step, push_folder
    from refocused.evaluate.model_weights import ModelWeights, tokenizer_of

    choice = tokenizer_choice(arguments)
    started = time.monotonic()
    step = run_selection.local_step(arguments.step, run_selection.run_choice(arguments))
    _print_on_terminal(f"verifying {step.path}")
    weights = ModelWeights(step)
    exported = export_step(
        weights,
        arguments.out,
        tokenizer=None if arguments.no_tokenizer else tokenizer_of(weights, choice),
        dtype=arguments.dtype,
        compare=not arguments.no_compare,
        report=_print_on_terminal,
    )
    seconds = time.monotonic() - started
    size = f"{exported.parameters:,} parameters, {size_text(exported.bytes)}"
    lines = [f"{exported.folder}: step {step.step:,}, {size}, in {duration(seconds)}"]
    if exported.logit_difference is not None:
        share = f"{exported.logit_difference:.0e} of the largest"
        differ = f"differ by at most {share}" if exported.logit_difference else "are equal"
        lines.append(f"loaded by transformers: its logits and the checkpoint's {differ}")
    record = {"step": step.step, **dataclasses.asdict(exported), "seconds": seconds}
    if arguments.push is not None:
        record["pushed"] = push_folder(exported.folder, arguments.push)
        lines.append(f"uploaded: {record['pushed']}")
    print_result(record, lines, as_json=arguments.json)


def _print_on_terminal(line: str) -> None:
    if sys.stderr.isatty():
        print_message(None, line)


def run_download(parser: Parser) -> None:
    """Download a checkpoint unless a local copy has every byte of it."""
    parser.examples = ("latest --run demo", "best --run demo --to data/best")
    parser.add_argument("step", metavar="STEP", help="latest, best, a number or a name")
    add = parser.group("options")
    add("--to DIR", "folder to write to (default: the run's)", type=Path)
    add("--threads N", "files downloaded at once", type=count, default=8)
    run_selection.add_run_options(parser, local=False)
    arguments = parser.read()
    from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
    from refocused.checkpoints.step.verify import describe, verify

    choice = run_selection.run_choice(arguments)
    catalog, remote = run_selection.with_bucket(choice.folder, choice, checkpoints=arguments.to)
    started = time.monotonic()
    entry = catalog.resolve(_require_name(arguments.step))
    if arguments.to is not None:
        run_selection.refuse_another(remote, catalog.local / entry.name, entry.name)
    local = None
    if entry.local == "ok":
        local = read_checkpoint(catalog.local / entry.name)
        if problems := verify(local, deep=True):
            reason = f"{local.path} is corrupt: {describe(problems)}"
            print_message("warning", f"{reason}. Downloading it again.")
            local = None
    step = local or run_selection.fetch_shown(catalog, entry.name, threads=arguments.threads)
    seconds = time.monotonic() - started
    files, size = len(step.manifest.files), step.manifest.total_bytes
    how = "already here" if local else f"downloaded in {duration(seconds)}"
    record = {"step": step.step, "path": step.path, "files": files, "bytes": size}
    record |= {"downloaded": local is None, "seconds": seconds}
    lines = [f"{step.path}: {counted(files, 'file')}, {size_text(size)}, all verified, {how}"]
    print_result(record, lines, as_json=arguments.json)


def _require_name(request: str) -> str:
    if "/" in request:
        raise ConfigError(
            f"{request}: a path names a local checkpoint. Give its step or name, and its run with "
            "--run."
        )
    return request


def run_upload(parser: Parser) -> int:
    """Upload what the bucket lacks; the exit code is OK if all of it is there then."""
    parser.examples = ("all --run demo", "latest --bucket data/copies --deep")
    parser.add_argument("step", metavar="STEP", help="all, latest, best, a number or a name")
    add = parser.group("options")
    add("--deep", "read the files of a bucket that keeps no checksums (a folder)")
    add("--threads N", "files uploaded at once", type=count, default=4)
    run_selection.add_run_options(parser, local=False)
    arguments = parser.read()
    from refocused.checkpoints.mirror.copies import CheckpointCopier, verify_remote
    from refocused.checkpoints.mirror.mirror import MirrorFiles
    from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
    from refocused.checkpoints.step.verify import describe
    from refocused.system.locks import FileLock

    run = run_selection.find_run(arguments.run)
    catalog, remote = run_selection.with_bucket(run, run_selection.run_choice(arguments))
    lock = FileLock(MirrorFiles(run).lock)
    if not lock.acquire():
        raise CheckpointError(
            f"Another process is copying the steps of {run} to a bucket: its mirror, or another "
            f"upload. It needs no help; see how far it is: {as_typed('checkpoints list')}"
        )

    def upload(entry: CatalogEntry) -> str:
        """Complete one checkpoint in the bucket; return `uploaded`, `there` or `parts`."""
        if not entry.sound_here:
            if entry.bucket == "ok":
                return "there"
            raise CheckpointError(
                f"{catalog.local / entry.name} is {entry.local}, so it was not uploaded. Remove "
                "it if you do not need it."
            )
        sent: list[int] = []
        with progress_line(f"upload {entry.step:,}") as show:

            def report(done_bytes: int, total_bytes: int) -> None:
                sent.append(done_bytes)
                show(done_bytes, total_bytes)

            threads = arguments.threads
            copier = CheckpointCopier(
                remote, stopping=lambda: False, report=report, threads=threads
            )
            checkpoint, problems = read_checkpoint(catalog.local / entry.name), []
            if entry.bucket != "-":
                problems = verify_remote(remote, entry.name, deep=arguments.deep)
            if problems:
                again = f"{remote.url}/{entry.name}: {describe(problems)}. Uploading again."
                print_message("warning", again)
                whole = copier.repair(checkpoint, [problem.file for problem in problems])
            else:
                whole = copier.copy(checkpoint)
        return "parts" if not whole else "uploaded" if sent else "there"

    started = time.monotonic()
    result: dict[str, list[int]] = {"uploaded": [], "there": [], "parts": []}
    failed: dict[int, str] = {}
    try:
        entries = catalog.entries()
        to_upload = [entry for entry in reversed(entries) if entry.local != "-"]  # newest first
        if arguments.step != "all":
            to_upload = [catalog.find(_require_name(arguments.step), entries)]
            if to_upload[0].local == "-":
                raise CheckpointError(
                    f"{to_upload[0].name} is not in {catalog.local}, so there is nothing to "
                    f"upload. See what is where: {as_typed('checkpoints list')}"
                )
        remote.write_readme()
        for entry in to_upload:
            try:
                result[upload(entry)].append(entry.step)
            except CheckpointError as error:  # go on with the others
                failed[entry.step] = str(error)
                print_message("error", str(error))
    finally:
        lock.release()
    seconds = time.monotonic() - started
    whole = len(result["uploaded"]) + len(result["there"])
    lines = step_lines(
        {
            "uploaded": result["uploaded"],
            "already there": result["there"],
            "failed": failed,
            "without the parts of other machines": result["parts"],
        }
    )
    if result["parts"]:
        lines.append("Upload on every machine, on node 0 first and again after the others.")
    lines.append(
        f"{remote.url}: {whole} of {len(to_upload)} checkpoints are whole ({duration(seconds)})"
    )
    record = {"bucket": remote.url, **result, "failed": failed, "seconds": seconds}
    print_result(record, lines, as_json=arguments.json)
    if failed:
        return ExitCode.FAILED
    return ExitCode.NOT_MIRRORED if result["parts"] else ExitCode.OK


def step_lines(rows: Mapping[str, Iterable[int]]) -> list[str]:
    """Return a line for each list of steps that is not empty."""
    numbers = {what: ", ".join(f"{step:,}" for step in steps) for what, steps in rows.items()}
    return [f"{what}: {steps}" for what, steps in numbers.items() if steps]
