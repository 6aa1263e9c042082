"""`prepare_data train-tokenizer`, `tokenize`, `convert`: make shards from texts or token files."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_json,
    add_reading_options,
    chosen,
    credentials_of,
    data_settings,
    place,
)
from refocused.commands.output import count, print_result, progress_line, ratio
from refocused.system.errors import ConfigError, counted, local_path
from refocused.system.logs import print_message
from refocused.system.number_text import count_text, duration, size_text

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest
    from refocused.prepare.texts.tokenize import TokenizeProgress
    from refocused.prepare.write_shards import PackResult


TRAINING_BYTES = 300_000_000


def add_source(parser: Parser, *, json_help: str = "print JSON") -> None:
    """Add the options of a source of token files, and `--json`."""
    help_text = "folder or gs:// address of token files"
    parser.add_argument("source", metavar="DIR_OR_URL", help=help_text)
    add_reading_options(parser)
    add_credentials(parser)
    add_json(parser, json_help)


def open_source(arguments: argparse.Namespace) -> tuple[Bucket, DataConfig]:
    """Return the bucket of the token files and how to read them."""
    return place(arguments.source, arguments), data_settings(arguments, arguments.source)


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
    replace_file(out, content)
    tokenizers = {name: open_tokenizer(choice) for name, choice in choices.items()}
    size, made = sum(len(text.encode()) for text in held_out), tokenizers["new"].vocabulary
    rates: dict[str, float] = {}
    record = {"out": str(out), "vocabulary": made, "held_out_bytes": size, "bytes_per_token": rates}
    lines = [f"{out}: {made:,} ids, in {duration(time.monotonic() - started)}"]
    if made < vocabulary:
        lines.append(f"  the text has no pair that repeats for the other {vocabulary - made:,}")
    for name, one in tokenizers.items() if held_out else ():
        rates[name] = size / sum(len(one.encode(text)) for text in held_out)
        rate = f"  {rates[name]:.3f} bytes a token with {name}"
        lines.append(f"{rate}, on {size_text(size)} held out")
    if arguments.bpe_folder is None:
        lines.append("  not compared with GPT-2's: give the folder of its files with --bpe-folder")
    print_result(record, [*lines, f"Use it as --tokenizer {out}."], as_json=arguments.json)


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
    bucket = place(arguments.out, arguments)
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

        def show_tokens(progress: TokenizeProgress) -> None:
            speed = progress.tokens / max(time.monotonic() - started, 1e-9)
            note = f"{counted(progress.shards, 'shard')} | {count_text(speed)} tokens/s"
            show(progress.done_bytes, progress.total_bytes, note)

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
    out, request = place(arguments.out, arguments), chosen(ConvertRequest, arguments)
    with progress_line("convert") as show:
        result = convert(bucket, out, data=data, work=work, request=request, progress=show)
    manifest = result.manifest
    shards, size = len(manifest.shards), manifest_bytes(manifest)
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


def manifest_bytes(manifest: Manifest) -> int:
    """Return the bytes of the files that a manifest lists."""
    return sum(shard.size for shard in manifest.shards)
