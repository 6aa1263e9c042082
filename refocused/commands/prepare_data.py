"""`prepare_data VERB`: make token files from texts, and work on them; one function a verb."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_json,
    add_reading_options,
    bucket_at,
    chosen,
    credentials_of,
    data_settings,
)
from refocused.commands.output import (
    check_picture,
    count,
    print_result,
    progress_line,
    ratio,
    write_picture,
)
from refocused.system.errors import ConfigError, ExitCode, counted, local_path
from refocused.system.logs import print_message
from refocused.system.number_text import count_text, duration, size_text

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.prepare.inspect_data import DataReport
    from refocused.prepare.sync import SyncResult
    from refocused.prepare.write_shards import PackResult


TRAINING_BYTES = 300_000_000
DOCSTRING_CHARACTERS = 20_000_000


def add_source(parser: Parser, *, json_help: str = "print JSON") -> None:
    """Add the options of a source of token files, and `--json`."""
    help_text = "folder or gs:// address of token files"
    parser.add_argument("source", metavar="DIR_OR_URL", help=help_text)
    add_reading_options(parser)
    add_credentials(parser)
    add_json(parser, json_help)


def open_source(arguments: argparse.Namespace) -> tuple[Bucket, DataConfig]:
    """Return the bucket of the token files and how to read them."""
    return bucket_at(arguments.source, arguments), data_settings(arguments, arguments.source)


def _add_texts(parser: Parser) -> None:
    texts = ".txt, .md, .json(l), .parquet or .arrow, also as .gz or .zst: files, folders, "
    texts += "gs://... or hub:DATASET[:NAME]"
    parser.add_argument("inputs", nargs="+", metavar="IN", help=texts)
    add = parser.group("input")
    add("--field NAME", "field of .json(l), .parquet and .arrow to read", default="text")
    add("--separator LINE", "line between documents of a .txt (default: a file is one document)")
    add("--bad-text", "if it is not UTF-8", choices=("refuse", "replace"), default="refuse")


def run_train_tokenizer(parser: Parser) -> None:
    """Train a byte-pair encoding on texts, and compare it with GPT-2's."""
    parser.examples = ("texts/ --vocabulary 32768 --out tokenizer.json",)
    _add_texts(parser)
    most = "text to read, spread over the input"
    parser.group("input")("--max-bytes N", most, type=count, default=TRAINING_BYTES)
    add = parser.group("tokenizer")
    add("--vocabulary N", "token ids, special tokens included", type=count, required=True)
    more = "special token besides <|endoftext|>; repeatable"
    add("--special-token TOKEN", more, action="append", default=[])
    add("--bpe-folder DIR", "GPT-2's vocab.bpe and encoder.json, to compare with", type=Path)
    parser.group("output")("--out FILE", "new tokenizer.json", type=Path, required=True)
    add_json(parser)
    arguments = parser.read()
    from refocused.bucket.partial_files import disk_errors
    from refocused.prepare.texts.text_documents import TextReading, sampled_texts, train_byte_pairs
    from refocused.prepare.texts.text_inputs import find_inputs, plan_tasks
    from refocused.system.atomic_files import replace_file
    from refocused.tokenizers.encoders import END_OF_TEXT, TokenizerChoice, open_tokenizer

    out, vocabulary, started = arguments.out, arguments.vocabulary, time.monotonic()
    if out.exists() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: name a new file, in a folder that exists.")
    choices = {"new": TokenizerChoice(str(out), end_of_text=END_OF_TEXT)}
    if arguments.bpe_folder is not None:
        choices["gpt2"] = TokenizerChoice("gpt2", bpe_folder=arguments.bpe_folder)
        open_tokenizer(choices["gpt2"])
    tasks = plan_tasks(find_inputs(arguments.inputs))
    reading, most = chosen(TextReading, arguments, cuts_at_spaces=True), arguments.max_bytes
    held_out: list[str] = []
    with progress_line("read") as show:
        texts = sampled_texts(tasks, reading, most_bytes=most, held_out=held_out, progress=show)
        special = arguments.special_token
        content = train_byte_pairs(texts, vocabulary=vocabulary, special_tokens=special)
    with disk_errors(out):
        replace_file(out, content)
    tokenizers = {name: open_tokenizer(choice) for name, choice in choices.items()}
    size, made = sum(len(text.encode()) for text in held_out), tokenizers["new"].vocabulary
    rates: dict[str, float] = {}
    record = {"out": str(out), "vocabulary": made, "held_out_bytes": size, "bytes_per_token": rates}
    lines = [f"{out}: {made:,} ids, in {duration(time.monotonic() - started)}"]
    if made < vocabulary:
        lines.append(f"  the text has no pair that repeats for the other {vocabulary - made:,}")
    for name, tokenizer in tokenizers.items() if held_out else ():
        rates[name] = size / sum(len(tokenizer.encode(text)) for text in held_out)
        rate = f"  {rates[name]:.3f} bytes a token with {name}"
        lines.append(f"{rate}, on {size_text(size)} held out")
    if arguments.bpe_folder is None:
        lines.append("  not compared with GPT-2's: give the folder of its files with --bpe-folder")
    print_result(record, [*lines, f"Use it as --tokenizer {out}."], as_json=arguments.json)


def run_docstrings(parser: Parser) -> None:
    """Write text that every machine has, as a file of JSON lines."""
    parser.examples = ("data/docstrings.jsonl",)
    add = parser.add_argument
    add("out", type=Path, metavar="FILE.jsonl", help="new file; a document is a line")
    most = "characters to collect"
    parser.group("output")("--characters N", most, type=count, default=DOCSTRING_CHARACTERS)
    arguments = parser.read()
    from refocused.bucket.partial_files import disk_errors
    from refocused.prepare.texts.docstrings import docstrings
    from refocused.system.atomic_files import replace_file

    out, started = arguments.out, time.monotonic()
    if out.exists():
        raise ConfigError(f"{out} exists. Name a new file.")
    texts = list(docstrings(arguments.characters))
    lines = [json.dumps({"text": text}) for text in texts]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, "\n".join([*lines, ""]).encode())
    size, seconds = size_text(out.stat().st_size), duration(time.monotonic() - started)
    number = counted(len(texts), "docstring")
    print(f"{out}: {number} of the installed packages, {size}, in {seconds}")


def _add_out(parser: Parser) -> None:
    add = parser.group("output")
    add(
        "--out DIR_OR_URL",
        "empty folder or bucket prefix (as in data.source) for the shards",
        required=True,
    )
    add("--name NAME", "first part of the shards' names", default="tokens")
    add("--work-folder DIR", "unfinished work of a remote --out (default: data/prepare)", type=Path)
    fit = "place documents whole in sequences of N tokens (model.sequence_length)"
    add("--best-fit N", fit, type=count)


def _work_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder for unfinished work; check the options of `_add_out`."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", arguments.name):
        raise ConfigError(f"--name {arguments.name!r}: use only letters, digits, _ and -.")
    length, most = arguments.best_fit, arguments.shard_tokens
    if length is not None and not 2 <= length <= (most or length):
        raise ConfigError(
            f"--best-fit {length}: give 2 tokens or more, and at most --shard-tokens."
        )
    out, named = arguments.out, arguments.work_folder
    name = out.removeprefix("gs://").lower()
    if "://" in out:
        return named or Path("data/prepare") / re.sub(r"[^a-z0-9._-]+", "_", name)
    if named is not None:
        raise ConfigError("--work-folder is only for a remote --out. Leave it out.")
    return local_path(out) / ".prepare"


def run_tokenize(parser: Parser) -> None:
    """Tokenize texts, and print how to train on the shards."""
    parser.examples = (
        "texts/ --out data/tokens --tokenizer bytes --val-ratio 0.01",
        "web.jsonl.gz --out data/web --tokenizer gpt2 --bpe-folder data/bpe --workers 8",
    )
    _add_texts(parser)
    add = parser.group("tokenizer")
    add("--tokenizer NAME", "gpt2, bytes, a tokenizer.json, or hub:MODEL", required=True)
    add("--bpe-folder DIR", "folder of GPT-2's vocab.bpe, encoder.json", type=Path)
    add("--end-of-text TOKEN", "token before each document (default: that of the tokenizer)")
    add("--max-loss R", "share of characters that it may lose", type=ratio, default=0.01)
    _add_out(parser)
    add = parser.group("output")
    add("--shard-tokens N", "tokens of a shard", type=count, default=100_000_000)
    add("--val-ratio R", "share of the documents for validation", type=ratio, default=0.0)
    add("--workers N", "processes (default: one per core)", type=count, default=os.cpu_count())
    executors = "where tasks run; slurm: in the processes of srun"
    add("--executor NAME", executors, choices=("local", "slurm", "ray"), default="local")
    add_json(parser)
    add_credentials(parser)
    arguments = parser.read()
    from refocused.prepare.texts.text_documents import TextReading
    from refocused.prepare.texts.text_inputs import find_inputs
    from refocused.prepare.texts.tokenize import help_tokenize, tokenize
    from refocused.prepare.texts.tokenize_worker import TokenizeRequest
    from refocused.tokenizers.encoders import GPT2, VOCABULARIES, TokenizerChoice

    if arguments.tokenizer != GPT2:
        parser.refuse(arguments, "needs --tokenizer gpt2", "bpe_folder")
    if arguments.tokenizer in VOCABULARIES:
        parser.refuse(arguments, "needs a tokenizer.json: others have one", "end_of_text")
    work = _work_folder(arguments)
    tokenizer = TokenizerChoice(
        arguments.tokenizer, bpe_folder=arguments.bpe_folder, end_of_text=arguments.end_of_text
    )
    share = arguments.val_ratio
    settings = {"tokenizer": tokenizer, "validation_ratio": share}
    settings["reading"] = chosen(TextReading, arguments, cuts_at_spaces=True)
    request = chosen(TokenizeRequest, arguments, **settings)
    bucket = bucket_at(arguments.out, arguments)
    inputs = find_inputs(arguments.inputs, credentials_of(arguments))
    if arguments.executor == "slurm":
        if "SLURM_PROCID" not in os.environ:
            raise ConfigError(
                "--executor slurm: SLURM_PROCID is not set. Run the command in an allocation by "
                "srun, with a task for each core."
            )
        if os.environ["SLURM_PROCID"] != "0":
            help_tokenize(inputs, bucket, work=work, request=request)
            return
    started = time.monotonic()
    with progress_line("tokenize") as show:

        def show_tokens(done_bytes: int, total_bytes: int, tokens: int, shards: int) -> None:
            speed = tokens / max(time.monotonic() - started, 1e-9)
            note = f"{counted(shards, 'shard')} | {count_text(speed)} tokens/s"
            show(done_bytes, total_bytes, note)

        workers = arguments.workers
        result = tokenize(
            inputs,
            bucket,
            work=work,
            request=request,
            workers=workers,
            progress=show_tokens,
            executor=arguments.executor,
        )
    _print_tokenized(result, time.monotonic() - started, arguments)


def _print_tokenized(result: PackResult, seconds: float, arguments: argparse.Namespace) -> None:
    from refocused.tokenizers.encoders import VOCABULARIES

    manifest, kept = result.manifest, result.kept_shards
    val = sum(
        shard.tokens for shard in manifest.shards if shard.name.startswith(f"{arguments.name}_val_")
    )
    documents = sum(shard.documents or 0 for shard in manifest.shards)
    record = {
        "out": arguments.out,
        "tokenizer": manifest.tokenizer,
        "tokens": manifest.tokens,
        "train_tokens": manifest.tokens - val,
        "val_tokens": val,
        "documents": documents,
        "shards": len(manifest.shards),
        "kept_shards": kept,
        "new_tokens": result.new_tokens,
        "seconds": seconds,
        "fingerprint": manifest.fingerprint,
        "end_of_text_id": manifest.end_of_text_id,
        "notes": manifest.notes,
        "packing": result.packing,
    }
    noun = "documents" if arguments.best_fit is None else "parts of documents"
    verified = f", {kept} of them verified and kept" if kept else ""
    lines = [
        f"{arguments.out}: {counted(len(manifest.shards), 'shard')}{verified}",
        f"  {manifest.tokens:,} tokens of {documents:,} {noun} ({val:,} for validation), "
        f"{manifest.shards[0].dtype}",
        *(f"  {note}" for note in manifest.notes),
    ]
    if result.new_tokens:
        speed = f"{count_text(result.new_tokens / seconds)} tokens/s over {duration(seconds)}"
        local = arguments.executor == "local"
        where = (
            f"{counted(arguments.workers, 'process', 'processes')}"
            if local
            else f"--executor {arguments.executor}"
        )
        lines.append(f"  {speed}, {where}")
    if empty := result.packing["empty"]:
        lines.append(f"  left out: {counted(empty, 'null or empty text')}")
    lines += _train_lines(arguments.out, arguments.tokenizer, result)
    if arguments.best_fit is None and arguments.tokenizer not in VOCABULARIES:
        # Samples and exports end their texts with it.
        lines.append(f"  document_id: {manifest.end_of_text_id}")
    if arguments.bpe_folder is not None:
        lines.append(f"  bpe_folder: {arguments.bpe_folder}")
    if val:
        lines.append(f'  validation_files: ["{arguments.name}_val_*"]')
    lines.append("model:\n  vocabulary: auto")
    if arguments.best_fit is not None:
        lines.append(f"  sequence_length: {arguments.best_fit}")
    print_result(record, lines, as_json=arguments.json)
    if arguments.val_ratio and not val:
        print_message(
            "warning",
            f"No document for validation: {arguments.val_ratio:g} of {documents:,} documents is "
            "less than one. Name the line between documents with --separator, or set "
            "data.validation_fraction in the run file.",
        )


def _train_lines(out: str, tokenizer: str, result: PackResult) -> list[str]:
    packing, document_id = result.packing, result.manifest.shards[0].document_id
    lines = [
        "To train on them, in the run file:",
        f"data:\n  source: {out}\n  tokenizer: {tokenizer}",
    ]
    if document_id is not None:
        lines.append(f"  document_id: {document_id}\n  mask_documents: true")
    if documents := packing["documents"]:
        cut, in_stream = packing["cut"] / documents, packing["cut_in_stream"] / documents
        packed = f"  best fit cuts {cut:.1%} of {documents:,} documents, a stream {in_stream:.1%}"
        lines.insert(0, f"{packed}; {packing['padding'] / packing['ids']:.2%} is padding")
    return lines


def run_convert(parser: Parser) -> None:
    """Convert token files, and print how to train on the shards."""
    parser.examples = ("data/padded --out data/tokens --pad-id 0 --separator-id 50256",)
    add_source(parser)
    _add_out(parser)
    add = parser.group("output")
    add("--shard-tokens N", "tokens of a shard (default: one shard per file)", type=count)
    add("--vocabulary N", "ids; above 65,536 stored as uint32", type=count, default=65_536)
    arguments = parser.read()
    from refocused.prepare.convert import ConvertRequest, convert

    work = _work_folder(arguments)
    separator, vocabulary = arguments.separator_id, arguments.vocabulary
    if arguments.best_fit is not None and (separator is None or separator >= vocabulary):
        raise ConfigError("--best-fit needs --separator-id, the id of --vocabulary at borders.")
    bucket, data = open_source(arguments)
    out, request = bucket_at(arguments.out, arguments), chosen(ConvertRequest, arguments)
    with progress_line("convert") as show:
        result = convert(bucket, out, data=data, work=work, request=request, progress=show)
    manifest = result.manifest
    shards, size = len(manifest.shards), manifest.bytes
    record = {"out": arguments.out, "shards": shards, "tokens": manifest.tokens, "bytes": size}
    record |= {"fingerprint": manifest.fingerprint, "packing": result.packing}
    lines = [
        f"{arguments.out}: {counted(shards, 'shard')}, {size_text(size)}",
        f"  {manifest.tokens:,} tokens, {manifest.shards[0].dtype}",
        *_train_lines(arguments.out, manifest.tokenizer, result),
    ]
    if arguments.best_fit is not None:
        lines.append(f"model:\n  sequence_length: {arguments.best_fit}")
    print_result(record, lines, as_json=arguments.json)


_NAMED = 20
FOLDER_SAMPLE, BUCKET_SAMPLE = 100_000_000, 8_000_000  # tokens


def run_split(parser: Parser) -> None:
    """Choose validation files, and print the lines for the run file."""
    parser.examples = ("data/tokens --val-ratio 0.01",)
    add_source(parser)
    add = parser.group("output")
    add("--val-ratio R", "share of the tokens for validation", type=ratio, default=0.01)
    add("--seed N", "seed of the choice of files", type=int, default=0)
    arguments = parser.read()
    from refocused.data.manifest.shard_manifest import build_manifest
    from refocused.prepare.manifest_changes import choose_validation

    manifest = build_manifest(*open_source(arguments))
    names, tokens = choose_validation(manifest, ratio=arguments.val_ratio, seed=arguments.seed)
    fraction = 0.0 if names else arguments.val_ratio
    record = {
        "source": arguments.source,
        "validation_files": names,
        "validation_fraction": fraction,
        "validation_tokens": tokens,
        "tokens": manifest.tokens,
    }
    share, files = tokens / manifest.tokens, len(manifest.shards)
    if names:
        why = f"# {len(names)} of {files:,} files: {share:.2%} of the tokens"
        setting = "  validation_files:"
    else:
        why = f"# {files} files are too few for {share:.2%}: the last sequences by name validate."
        setting = f"  validation_fraction: {fraction:g}"
    lines = [why, f"data:\n  source: {arguments.source}", setting]
    lines += [f"    - {json.dumps(name)}" for name in names]
    print_result(record, lines, as_json=arguments.json)


def run_inspect(parser: Parser) -> int:
    """Report what token files contain; the exit code is CHECK_FAILED if one is not usable."""
    parser.examples = ("data/tokens", "gs://my-bucket/tokens --vocabulary 50257")
    add_source(parser)
    sample = parser.group("input", exclusive=True)
    sample("--sample-tokens N", "tokens to read (default: 1e8, or 8e6 from gs://)", type=count)
    sample("--all", "read everything")
    add = parser.group("input")
    add("--vocabulary N", "report ids that a model of N ids lacks", type=count)
    add("--bpe-folder DIR", "GPT-2's files, to show text")
    parser.group("output")("--picture FILE.png", "draw ids and lengths of documents", type=Path)
    arguments = parser.read()
    check_picture(arguments.picture)
    from refocused.prepare.inspect_data import draw_report, inspect_data

    usual = BUCKET_SAMPLE if "://" in arguments.source else FOLDER_SAMPLE
    sample_tokens = 2**62 if arguments.all else arguments.sample_tokens or usual
    bucket, data = open_source(arguments)
    data = data.model_copy(update={"bpe_folder": arguments.bpe_folder})
    report = inspect_data(bucket, data, sample_tokens, arguments.vocabulary, shows_text=True)
    print_result(dataclasses.asdict(report), _report_lines(report), as_json=arguments.json)
    if arguments.picture is not None:
        write_picture(functools.partial(draw_report, report), arguments.picture)
    return ExitCode.CHECK_FAILED if report.problems else ExitCode.OK


def _report_lines(report: DataReport) -> list[str]:
    sample, unknown = report.sample, "unknown"
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.kinds.items()) or "none"
    frequent = ", ".join(f"{token} {share:.1%}" for token, share in sample.most_frequent[:5])
    padding, size, documents = report.padding_fraction, report.bytes_per_token, report.documents
    rows = {
        "files": f"{report.files} ({kinds}), {size_text(report.bytes)}",
        "tokens": f"{report.tokens:,}",
        "padding": unknown if padding is None else f"{padding:.1%} of what is stored",
        "stored": unknown if size is None else f"{size:.2f} bytes for each token",
        "documents": unknown if documents is None else f"{documents:,}",
        "tokenizer": report.tokenizer or unknown,
        "read": f"{counted(sample.tokens, 'token')} of {counted(report.sampled_files, 'file')}: "
        + (
            "unknown without --separator-id"
            if sample.documents is None
            else f"{sample.documents:,}"
        ),
        "ids": "none"
        if sample.max_id is None
        else f"{sample.min_id} to {sample.max_id}, {sample.distinct_ids:,} different",
    }
    if frequent:
        rows["frequent"] = frequent
    if report.lost_fraction is not None:
        rows["round trip"] = f"{1 - report.lost_fraction:.2%} of the compared ids come back"
    return [
        report.url,
        *(f"  {name:<10} {value}" for name, value in rows.items()),
        *(f"  text       {text}" for text in report.texts),
        *(f"  note: {note}" for note in report.notes),
        *(f"  PROBLEM: {problem}" for problem in report.problems),
    ]


def run_verify(parser: Parser) -> int:
    """Verify every file; the exit code is CHECK_FAILED if one is wrong."""
    parser.examples = ("data/tokens", "data/tokens --deep --vocabulary 50257")
    add_source(parser)
    add = parser.group("input")
    add("--deep", "read all tokens, not only checksums or headers")
    add("--vocabulary N", "with --deep, report ids that a model with N of them lacks", type=count)
    arguments = parser.read()
    from refocused.prepare.verify_data import verify_data

    if arguments.vocabulary is not None and not arguments.deep:
        raise ConfigError("--vocabulary needs --deep, which reads the ids.")
    bucket, data = open_source(arguments)
    with progress_line("verify") as show:
        findings = verify_data(
            bucket, data, deep=arguments.deep, vocabulary=arguments.vocabulary, progress=show
        )
    bad = [finding.problem for finding in findings if finding.problem is not None]
    lines = bad[:_NAMED]
    if len(bad) > _NAMED:
        lines.append(f"and {len(bad) - _NAMED:,} more; --json lists all")
    size = size_text(sum(finding.size for finding in findings))
    tokens = sum(finding.tokens or 0 for finding in findings)
    right = f"{len(findings) - len(bad):,} of {len(findings):,} files are right"
    lines.append(f"{arguments.source}: {right} ({size}, {tokens:,} tokens)")
    record = [dataclasses.asdict(finding) for finding in findings]
    print_result(record, lines, as_json=arguments.json)
    return ExitCode.CHECK_FAILED if bad else ExitCode.OK


def run_manifest(parser: Parser) -> None:
    """List the files with their tokens, from their headers; print or store the manifest."""
    parser.examples = ("data/tokens", "gs://my-bucket/tokens --tokenizer gpt2 --write")
    add_source(parser, json_help="print the manifest's text")
    stored = parser.group("output", exclusive=True)
    stored("--write", "store it beside the files")
    stored("--update", "add files that the stored manifest does not list")
    arguments = parser.read()
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest.shard_manifest import manifest_to_json, write_manifest
    from refocused.prepare.manifest_changes import add_files, describe_set, with_checksums

    bucket, data = open_source(arguments)
    with progress_line("manifest") as show:
        if arguments.update:
            earlier, manifest, added = add_files(bucket, data, progress=show)
            lines = [f"{len(added):,} files are added to {len(earlier.shards):,}"]
            if added:
                lines += [
                    f"  {earlier.tokens:,} -> {manifest.tokens:,} tokens",
                    f"  fingerprint {earlier.fingerprint[:16]} -> {manifest.fingerprint[:16]}",
                    "  A run on these data goes on without the new files. To resume it with them, "
                    "add\n  --allow-change data: it then begins a new epoch over all files.",
                ]
        else:
            manifest, gone = describe_set(bucket, data)
            if arguments.write:
                manifest = with_checksums(bucket, manifest, progress=show)
                write_manifest(bucket, manifest)
            lines = [
                f"{counted(len(manifest.shards), 'file')}, {size_text(manifest.bytes)}",
                f"  {manifest.tokens:,} tokens, tokenizer {manifest.tokenizer}",
                f"  fingerprint {manifest.fingerprint[:16]}",
            ]
            if gone:
                lost = f"  without {counted(len(gone), 'file')} of the stored one"
                lines.append(f"{lost}, such as {gone[0]}")
            if arguments.write:
                lines.append(f"  written as {MANIFEST_NAME}")
    if arguments.json:
        print(manifest_to_json(manifest), end="")
    else:
        print(f"{arguments.source}: " + "\n".join(lines))


def run_sync(parser: Parser) -> None:
    """Download what the folder lacks."""
    parser.examples = ("gs://my-bucket/tokens data/tokens --max-files 10",)
    parser.add_argument("source", metavar="URL", help="gs:// address or folder to copy")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    add = parser.group("input")
    add("--max-files N", "copy the first N token or text files", type=count)
    add("--include GLOB", "copy only these objects; repeatable", action="append", default=[])
    add("--exclude GLOB", "skip these; repeatable", action="append", default=[])
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import sync_folder

    bucket, folder = bucket_at(arguments.source, arguments), arguments.folder
    chosen = {name: getattr(arguments, name) for name in ("include", "exclude", "max_files")}
    move = functools.partial(sync_folder, bucket, folder, **chosen)
    _move("sync", move, str(folder), arguments)


def run_upload(parser: Parser) -> None:
    """Upload what the bucket lacks."""
    parser.examples = ("data/tokens gs://my-bucket/tokens",)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder to copy, without its hidden files")
    add("target", metavar="URL", help="gs:// address or folder to write to")
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import upload_folder

    bucket = bucket_at(arguments.target, arguments)
    move = functools.partial(upload_folder, arguments.folder, bucket)
    _move("upload", move, arguments.target, arguments)


def _add_moving_options(parser: Parser) -> None:
    add = parser.group("storage")
    add("--threads N", "objects copied at once", type=count, default=8)
    add_credentials(parser)
    add_json(parser)


def _move(
    what: str, move: Callable[..., SyncResult], where: str, arguments: argparse.Namespace
) -> None:
    """Move objects with `move(threads=, show=)`, and print what was moved."""
    started = time.monotonic()
    with progress_line(what) as show:
        result = move(threads=arguments.threads, show=show)
    seconds, kept = time.monotonic() - started, result.objects - result.moved_objects
    verified = "all verified"
    if result.size_only:
        verified = f"{result.size_only:,} only by size, as the source keeps no checksums"
    lines = [f"{where}: {counted(result.objects, 'object')}, {size_text(result.bytes)}, {verified}"]
    if result.moved_objects:
        rate = size_text(result.moved_bytes / seconds)
        moved = f"{result.moved_objects:,} moved ({size_text(result.moved_bytes)}, {rate}/s)"
        lines.append(f"  {moved} in {duration(seconds)}, {kept:,} were there")
    record = dataclasses.asdict(result) | {"seconds": seconds}
    print_result(record, lines, as_json=arguments.json)
