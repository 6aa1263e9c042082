"""`prepare_data recommend`: propose a model and a run file for a data set."""

from __future__ import annotations

import argparse
import dataclasses
import glob
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_json,
    add_reading_options,
    data_settings,
    place,
)
from refocused.commands.output import count, positive, print_result
from refocused.data.formats.object_names import matches
from refocused.system.errors import ConfigError, ExitCode, as_typed, counted
from refocused.system.number_text import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from refocused.config.data import DataConfig
    from refocused.config.load_run import LoadedRun
    from refocused.config.model_shape import ModelShape
    from refocused.data.manifest.shard_manifest import Manifest
    from refocused.estimate.recommendation import Recommendation

PLACEHOLDER = "gs://YOUR-BUCKET/tokens"
SAMPLED_TOKENS = 1_000_000  # read for the largest id if the tokenizer is unknown
ROWS = 128  # model.vocabulary_multiple: ids up to the next multiple cost nothing
LEAST_VALIDATION, MOST_VALIDATION = 0.001, 0.05  # shares of the sequences
_OF_VALIDATION = re.compile(r"(^|[^a-z])val(id|idation)?([^a-z]|$)", re.IGNORECASE)


def run_recommend(parser: Parser) -> int:
    """Plan a run for a data set, and print or write its run file."""
    parser.examples = (
        "data/tokens --gpus 1 --out mine.yaml",
        "--tokens 15B --gpus 8 --per-hour 20",
    )
    add = parser.add_argument
    add("source", nargs="?", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    parser.group("input")("--tokens N", "without a source", type=count)
    add = parser.group("output")
    add("--out FILE", "write the run file, for train --config FILE", type=Path)
    add_json(parser)
    add = parser.group("model")
    add("--preset NAME", "shape (default: the one that fits the data's size)")
    passes = "passes over the data (default: 1; with --preset, 20 tokens a parameter)"
    add("--epochs E", passes, type=positive)
    add("--step-tokens N", "(default: 1,048,576, or less for at least 1,000 steps)", type=count)
    add("--sequence-length N", "(default: 2,048, or the shape's context)", type=count)
    add_machine_options(parser)
    mfu = "share of the GPUs' peak (default: estimated)"
    parser.group("machine and price")("--mfu F", mfu, type=positive)
    add_reading_options(parser)
    add_credentials(parser)
    arguments = parser.read()
    from refocused.system.atomic_files import replace_file

    if (arguments.source is None) == (arguments.tokens is None):
        raise ConfigError("Name either a source or --tokens N.")
    if arguments.source is None:
        of_files = ("dtype", "pad_id", "separator_id", "tokenizer", "include", "exclude")
        of_credentials = ("max_files", "threads", "gcs_credentials", "gcp_project", "bpe_folder")
        why = "has no effect with --tokens: no data are read"
        parser.refuse(arguments, why, *of_files, *of_credentials)
    out: Path | None = arguments.out
    if out is not None and arguments.source is None:
        raise ConfigError("--out needs a source instead of --tokens: a run file names its data.")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        reason = "it exists" if out.exists() else f"there is no folder {out.parent}"
        raise ConfigError(f"--out {out}: {reason}. Name a new file in a folder that exists.")
    found, text = plan_run(arguments)
    last = f"The run file, which --out FILE writes:\n\n{text}"
    if out is not None:
        replace_file(out, text.encode())
        last = f"Written. Train with: {as_typed('launch')} --config {out}"
    lines = [*plan_lines(found, arguments), last]
    print_result(dataclasses.asdict(found), lines, as_json=arguments.json)
    return ExitCode.OK


def add_machine_options(parser: Parser) -> None:
    """Add the options of the machine that a run is planned for, and of its tokenizer's files."""
    bpe = "folder of GPT-2's vocab.bpe, encoder.json, for data.bpe_folder"
    parser.group("input")("--bpe-folder DIR", bpe, type=Path)
    add = parser.group("machine and price")
    add("--gpus N", "number of GPUs", type=count, default=8)
    add("--gpu NAME", "kind of GPU", default="H100 SXM")
    add("--per-hour USD", "price of the whole machine", type=positive)
    add("--budget USD", "save and stop at this cost; needs --per-hour", type=positive)


def plan_run(arguments: argparse.Namespace) -> tuple[Recommendation, str]:
    """Return a run for the options' data and machine, and its file; raise ConfigError if none."""
    from refocused.config.yaml_source import write_yaml
    from refocused.data.manifest.shard_manifest import build_manifest
    from refocused.data.manifest.vocabulary import decide_vocabulary, tokenizer_vocabulary
    from refocused.estimate.recommendation import LONGEST_SEQUENCE, choose_model, recommend
    from refocused.prepare.inspect_data import inspect_data
    from refocused.system.hardware import named_gpu
    from refocused.tokenizers.encoders import VOCABULARIES

    if arguments.budget is not None and arguments.per_hour is None:
        raise ConfigError("--budget needs --per-hour USD, the price of the machine.")
    gpu = named_gpu(arguments.gpu)
    arguments.gpu = gpu.name
    data = source_settings(arguments, arguments.source or PLACEHOLDER)
    manifest: Manifest | None = None
    size: int | None = None
    vocabulary: int | str = "auto"
    tokens = arguments.tokens
    if arguments.source is not None:
        manifest = build_manifest(place(arguments.source, arguments), data, cache_file=None)
        tokens = max(1, manifest.tokens)
        if data.tokenizer == "unknown" and manifest.tokenizer in VOCABULARIES:
            data = data.model_copy(update={"tokenizer": manifest.tokenizer})
        size = tokenizer_vocabulary(data) or manifest.vocabulary
        if size is None:
            ids = [-1 if shard.max_id is None else shard.max_id for shard in manifest.shards]
            if -1 in ids:
                bucket = place(arguments.source, arguments)
                report = inspect_data(bucket, data, SAMPLED_TOKENS, None, shows_text=False)
                ids.append(report.sample.max_id or 0)
            size = vocabulary = -(-(max(ids) + 1) // ROWS) * ROWS
        if packed := next((one for one in manifest.shards if one.packed_for), None):
            masked = {"document_id": packed.document_id, "mask_documents": True}
            data = data.model_copy(update=masked)
            arguments.sequence_length = arguments.sequence_length or packed.packed_for
    shapes = _shapes(arguments.preset, size)
    epochs = arguments.epochs or (None if arguments.preset else 1.0)
    name = next(iter(shapes))
    if arguments.preset is None:
        name = choose_model(tokens * epochs, shapes, sequence_length=arguments.sequence_length)
    length = arguments.sequence_length or min(LONGEST_SEQUENCE, shapes[name].max_length)
    if manifest is None:
        data = data.model_copy(update={"validation_fraction": LEAST_VALIDATION})
        sequences = tokens // length
    else:
        data, sequences = _with_validation(data, manifest, length)
    found = recommend(
        sequences,
        preset=name,
        shape=shapes[name],
        epochs=epochs,
        step_tokens=arguments.step_tokens,
        sequence_length=length,
        gpus=arguments.gpus,
        gpu=gpu,
        mfu=arguments.mfu,
        per_hour_usd=arguments.per_hour,
    )
    if vocabulary != "auto":
        note = f"the tokenizer is unknown, so model.vocabulary={vocabulary} is from the largest id "
        note += "read. Name it with --tokenizer for its true size."
        found = dataclasses.replace(found, notes=(*found.notes, note))
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": found.steps},
        "model": {
            "preset": found.preset,
            "vocabulary": vocabulary,
            "sequence_length": found.sequence_length,
        },
        "batch": {"micro_batch_size": "auto", "global_batch_size": found.step_sequences},
        "data": data.model_dump(mode="json", exclude_defaults=True, exclude={"fetch_threads"}),
        "optimizer": {"lr": found.learning_rate},
        "schedule": {"kind": "cosine", "warmup_steps": found.warmup_steps},
        "checkpoint": {"interval": found.save_interval},
        "evaluation": {"interval": found.save_interval},
    }
    if found.recomputes:
        sections["model"]["activation_checkpointing"] = True
    if arguments.per_hour is not None:
        sections["cost"] = {"per_hour_usd": arguments.per_hour}
    if arguments.budget is not None:
        sections["cost"]["budget_usd"] = arguments.budget
    parts = [write_yaml({key: sections[key]}) for key in sections]
    source = arguments.source or f"{arguments.tokens:,} tokens"
    step = f"{found.step_sequences} x {found.sequence_length} = {found.step_tokens:,} tokens"
    trained = count_text(found.steps * found.step_tokens)
    header = (
        f"# A run for {source}, by prepare_data recommend for {arguments.gpus} x {arguments.gpu}.\n"
        f"#\n#   model    {found.preset}: {found.parameters:,} parameters\n#   step     {step}\n"
        f"#   run      {found.steps:,} steps = {trained} tokens, {found.epochs:.2f} epochs\n"
    )
    text = "\n".join([header, *parts])
    decide_vocabulary(loaded_text(text, arguments.out or Path("run.yaml")))
    return found, text


def source_settings(arguments: argparse.Namespace, source: str) -> DataConfig:
    """Return the data section of the options, whose tokenizer the data may have to name."""
    data, bpe_folder = data_settings(arguments, source), arguments.bpe_folder
    return data if bpe_folder is None else data.model_copy(update={"bpe_folder": str(bpe_folder)})


def _with_validation(data: DataConfig, manifest: Manifest, length: int) -> tuple[DataConfig, int]:
    """Return the data section with a validation set, and the number of training sequences."""
    from refocused.config.outputs import EvaluationConfig
    from refocused.data.manifest.run_manifest import pack_chunks
    from refocused.data.order.sequences import sequence_count, sequences_of, split_sequences

    counts = {
        shard.name: sequences_of(shard.tokens, sequence_length=length) for shard in manifest.shards
    }
    total = sum(counts.values())
    files = validation_files(list(counts))
    if 0 < sum(counts[name] for name in counts if matches(name, files)) < total:
        data = data.model_copy(update={"validation_files": files})
    else:
        share = min(MOST_VALIDATION, EvaluationConfig().sequences / max(1, total))
        share = float(f"{max(LEAST_VALIDATION, share):.2g}")
        data = data.model_copy(update={"validation_fraction": share})
    split = split_sequences(
        pack_chunks(manifest, data),
        sequence_length=length,
        validation_files=data.validation_files,
        validation_fraction=data.validation_fraction,
    )
    return data, sequence_count(split.train)


def validation_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return a pattern, or the names, of the files that are for validation by their names."""
    found = [name for name in names if _OF_VALIDATION.search(PurePosixPath(name).name)]
    pattern = re.sub("[0-9]+", "*", glob.escape(found[0])) if found else ""
    if found and [name for name in names if matches(name, [pattern])] == found:
        return (pattern,)
    return tuple(glob.escape(name) for name in found)


def _shapes(preset: str | None, vocabulary: int | None) -> dict[str, ModelShape]:
    from refocused.config import shipped_files
    from refocused.config.load_run import find_config
    from refocused.config.model_shape import load_shape

    folder = shipped_files() / "models"
    files = sorted(folder.glob("*.json")) if preset is None else [find_config("models", preset)]
    shapes = {}  # by `model.preset`
    for file in files:
        shape = load_shape(file)
        name = file.stem if file.parent == folder else str(file.resolve())
        shapes[name] = shape if vocabulary is None else shape.with_vocabulary(vocabulary)
    return shapes


def loaded_text(text: str, file: Path) -> LoadedRun:
    """Load the text of a run file that is not written yet; raise ConfigError if it is wrong."""
    from refocused.config.load_run import load_run

    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / file.name
        trial.write_text(text, encoding="utf-8")
        return load_run(trial)


def plan_lines(found: Recommendation, arguments: argparse.Namespace) -> list[str]:
    """Return what a plan is made of, and its notes."""
    cost = "price unknown: set --per-hour"
    if found.cost_usd is not None:
        cost = f"${found.cost_usd:,.2f} at ${arguments.per_hour:,.2f} an hour"
    speed = f"{count_text(found.tokens_per_second)} tokens/s"
    machine = f"{arguments.gpus} x {arguments.gpu} at {found.mfu_fraction:.0%} of the peak"
    fit = f"20 tokens a parameter would be {count_text(found.ideal_parameters)}"
    rows = [
        ("data", f"{found.data_tokens:,} tokens; {fit}"),
        ("model", f"{found.preset}, {found.parameters:,} parameters"),
        ("tokens", f"{found.tokens_per_parameter:.1f} a parameter, {found.epochs:.2f} epochs"),
        ("steps", f"{found.steps:,} of {found.step_tokens:,} tokens"),
        ("warm-up", f"{counted(found.warmup_steps, 'step')}"),
        ("save", f"every {counted(found.save_interval, 'step')}"),
        ("time", f"{found.hours:,.1f} h, {speed}: {machine}"),
        ("cost", cost),
    ]
    facts = [f"{name:<8} {value}" for name, value in rows]
    return [*facts, *(f"note: {note}" for note in found.notes)]
