"""`init`: plan a run for a data set and GPUs and write its run file, or copy a shipped one."""

from __future__ import annotations

import dataclasses
import glob
import re
import shlex
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_json,
    add_reading_options,
    bucket_at,
    data_settings,
)
from refocused.commands.output import count, positive, print_result
from refocused.data.formats.object_names import matches
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ConfigError, as_typed, counted, local_path
from refocused.system.number_text import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.config.load_run import LoadedRun
    from refocused.config.model_shape import ModelShape
    from refocused.data.manifest.shard_manifest import Manifest
    from refocused.estimate.recommendation import Recommendation
    from refocused.system.hardware import GpuSpec

BUCKET = "YOUR-BUCKET"  # in place of a bucket in shipped run files, and in plans without data
SAMPLED_TOKENS = 1_000_000  # read for the largest id if the tokenizer is unknown
ROWS = 128  # model.vocabulary_multiple: ids up to the next multiple cost nothing
LEAST_VALIDATION, MOST_VALIDATION = 0.001, 0.05  # shares of the sequences
_OF_VALIDATION = re.compile(r"(^|[^a-z])val(id|idation)?([^a-z]|$)", re.IGNORECASE)


def run_init(parser: Parser) -> None:
    """Write a run file, and print the plan and the commands that use it."""
    parser.examples = (
        "mine.yaml --data data/tokens --gpus 1 --gpu A100 --per-hour 2 --budget 50",
        "mine.yaml --from gpt2_124m",
        "--tokens 15B --gpus 8 --per-hour 20",
    )
    new = "run file to write (default: run.yaml, or NAME.yaml)"
    parser.add_argument("out", nargs="?", type=Path, metavar="FILE", help=new)
    add = parser.group("output")
    add("--force", "overwrite FILE if it exists")
    add("--dry-run", "print the plan and the run file, and write nothing; so does --tokens")
    add_json(parser, "print the plan as JSON")
    add = parser.group("input")
    add("--data DIR_OR_URL", "folder or gs:// address of token files", dest="source")
    add("--tokens N", "plan for so many tokens, without data", type=count)
    add("--from NAME", "copy this run file of config/runs, with comments", dest="template")
    bpe = "folder of GPT-2's vocab.bpe, encoder.json, for data.bpe_folder"
    add("--bpe-folder DIR", bpe, type=Path)
    add = parser.group("model")
    add("--preset NAME", "shape (default: the one that fits the data's size)")
    passes = "passes over the data (default: 1; with --preset, 20 tokens a parameter)"
    add("--epochs E", passes, type=positive)
    add("--step-tokens N", "(default: 1,048,576, or less for at least 1,000 steps)", type=count)
    add("--sequence-length N", "(default: 2,048, or the shape's context)", type=count)
    add = parser.group("machine and price")
    add("--gpus N", "number of GPUs", type=count, default=8)
    add("--gpu NAME", "kind of GPU", default="H100 SXM")
    add("--mfu F", "share of the GPUs' peak (default: estimated)", type=positive)
    add("--per-hour USD", "price of the whole machine", type=positive)
    add("--budget USD", "save and stop at this cost; needs --per-hour", type=positive)
    add_reading_options(parser)
    add_credentials(parser)
    arguments = parser.read()
    from refocused.config.load_run import find_config
    from refocused.system.hardware import named_gpu

    given = [arguments.source, arguments.tokens, arguments.template]
    if sum(source is not None for source in given) != 1:
        raise ConfigError(
            "Name the token files with --data DIR_OR_URL, or their number with --tokens N, or a "
            "run file to copy with --from NAME."
        )
    if arguments.template is not None:
        of_output = {"out", "force", "dry_run", "template"}
        why = "has no effect with --from, which copies a run file"
        parser.refuse(arguments, why, *(vars(arguments).keys() - of_output))
        template = find_config("runs", arguments.template)
        out, text = arguments.out or Path(f"{template.stem}.yaml"), template.read_text("utf-8")
        rows = enumerate(text.splitlines(), 1)
        numbers = ", ".join(str(number) for number, line in rows if BUCKET in line)
        notes = [f"Set your bucket in place of {BUCKET}: line {numbers}"] if numbers else []
        record, machine = {"copied": str(template)}, ""
    else:
        out, bucket = arguments.out or Path("run.yaml"), None
        if arguments.source is None:
            of_files = ("dtype", "pad_id", "separator_id", "tokenizer", "include", "exclude")
            others = ("max_files", "threads", "gcs_credentials", "gcp_project", "bpe_folder")
            why = "has no effect with --tokens: no data are read"
            parser.refuse(arguments, why, *of_files, *others, "out", "force")
        elif "://" not in arguments.source and not local_path(arguments.source).is_dir():
            raise ConfigError(
                f"There is no folder {arguments.source!r}. To make token files of texts: "
                f"{as_typed('prepare_data tokenize')} IN... --out DIR --tokenizer gpt2"
            )
        else:
            bucket = bucket_at(arguments.source, arguments)
        if arguments.budget is not None and arguments.per_hour is None:
            raise ConfigError("--budget needs --per-hour USD, the price of the machine.")
        data = data_settings(arguments, arguments.source or f"gs://{BUCKET}/tokens")
        if arguments.bpe_folder is not None:
            data = data.model_copy(update={"bpe_folder": str(arguments.bpe_folder)})
        gpu = named_gpu(arguments.gpu)
        plan, text = plan_run(
            data,
            bucket,
            file=out,
            gpu=gpu,
            budget_usd=arguments.budget,
            per_hour_usd=arguments.per_hour,
            **{
                name: getattr(arguments, name)
                for name in ("tokens", "preset", "epochs", "step_tokens", "gpus", "mfu")
            },
            sequence_length=arguments.sequence_length,
        )
        notes = plan_lines(plan, arguments.gpus, gpu, arguments.per_hour)
        record = dataclasses.asdict(plan)
        machine = f" --gpus {arguments.gpus} --gpu {shlex.quote(gpu.name)}"
        if None not in (plan.cost_usd, arguments.budget) and plan.cost_usd > arguments.budget:
            budget = f"the budget of ${arguments.budget:,.2f}"
            notes.append(f"note: {budget} ends the run before its last step.")
    loaded_text(text, out)
    if arguments.dry_run or arguments.tokens is not None:
        print_result(record, [*notes, f"The run file:\n\n{text}"], as_json=arguments.json)
        return
    if out.exists() and not arguments.force:
        raise ConfigError(f"{out} exists. Name another file, or overwrite it with --force.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}. Make it first.")
    replace_file(out, text.encode())
    following = [
        f"  {as_typed(command)} --config {shlex.quote(str(out))}{more}"
        for command, more in (("doctor", ""), ("estimate_cost", machine), ("launch", ""))
    ]
    lines = [f"Wrote {out}.", *notes, "Next:", *following]
    print_result({"out": str(out), **record}, lines, as_json=arguments.json)


def plan_run(
    data: DataConfig,
    bucket: Bucket | None,
    *,
    tokens: int | None,
    file: Path,
    preset: str | None,
    epochs: float | None,
    step_tokens: int | None,
    sequence_length: int | None,
    gpus: int,
    gpu: GpuSpec,
    mfu: float | None,
    per_hour_usd: float | None,
    budget_usd: float | None,
) -> tuple[Recommendation, str]:
    """Plan a run for data and GPUs; return it and the text of its run file.

    Args:
        data: The data section.
        bucket: The token files; None: there are none, and `tokens` is their number.
        file: The name of the run file, which names the run.
        preset: `model.preset`; None: chosen by the number of tokens. So are the other settings.
        mfu: Share of the GPUs' peak; None: estimated.
        per_hour_usd: Price of all GPUs together.

    Raises:
        ConfigError: There is no such run.
        RefocusedError: The data cannot be read.
    """
    from refocused.config.yaml_source import write_yaml
    from refocused.data.manifest.shard_manifest import build_manifest
    from refocused.data.manifest.vocabulary import decide_vocabulary, tokenizer_vocabulary
    from refocused.estimate.recommendation import LONGEST_SEQUENCE, choose_model, recommend
    from refocused.prepare.inspect_data import inspect_data
    from refocused.tokenizers.encoders import VOCABULARIES

    manifest: Manifest | None = None
    size: int | None = None
    vocabulary: int | str = "auto"
    source = f"{tokens:,} tokens" if bucket is None else data.source
    if bucket is not None:
        manifest = build_manifest(bucket, data)
        tokens = max(1, manifest.tokens)
        if data.tokenizer == "unknown" and manifest.tokenizer in VOCABULARIES:
            data = data.model_copy(update={"tokenizer": manifest.tokenizer})
        size = tokenizer_vocabulary(data) or manifest.vocabulary
        if size is None:
            ids = [-1 if shard.max_id is None else shard.max_id for shard in manifest.shards]
            if -1 in ids:
                report = inspect_data(bucket, data, SAMPLED_TOKENS, None, shows_text=False)
                ids.append(report.sample.max_id or 0)
            size = vocabulary = -(-(max(ids) + 1) // ROWS) * ROWS
        if packed := next((shard for shard in manifest.shards if shard.packed_for), None):
            masked = {"document_id": packed.document_id, "mask_documents": True}
            data = data.model_copy(update=masked)
            sequence_length = sequence_length or packed.packed_for
    assert tokens is not None  # without data, their number is given
    shapes = _shapes(preset, size)
    epochs = epochs or (None if preset else 1.0)
    name = next(iter(shapes))
    if preset is None:
        name = choose_model(tokens * (epochs or 1.0), shapes, sequence_length=sequence_length)
    length = sequence_length or min(LONGEST_SEQUENCE, shapes[name].max_length)
    if manifest is None:
        data = data.model_copy(update={"validation_fraction": LEAST_VALIDATION})
        sequences = tokens // length
    else:
        data, sequences = _with_validation(data, manifest, length)
    plan = recommend(
        sequences,
        preset=name,
        shape=shapes[name],
        epochs=epochs,
        step_tokens=step_tokens,
        sequence_length=length,
        gpus=gpus,
        gpu=gpu,
        mfu=mfu,
        per_hour_usd=per_hour_usd,
    )
    if vocabulary != "auto":
        note = f"the tokenizer is unknown, so model.vocabulary={vocabulary} is from the largest id "
        note += "read. Name it with --tokenizer for its true size."
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": plan.steps},
        "model": {
            "preset": plan.preset,
            "vocabulary": vocabulary,
            "sequence_length": plan.sequence_length,
        },
        "batch": {"micro_batch_size": "auto", "global_batch_size": plan.step_sequences},
        "data": data.model_dump(mode="json", exclude_defaults=True, exclude={"fetch_threads"}),
        "optimizer": {"lr": plan.learning_rate},
        "schedule": {"kind": "cosine", "warmup_steps": plan.warmup_steps},
        "checkpoint": {"interval": plan.save_interval},
        "evaluation": {"interval": plan.save_interval},
    }
    if plan.recomputes:
        sections["model"]["activation_checkpointing"] = True
    prices = {"per_hour_usd": per_hour_usd, "budget_usd": budget_usd}
    if cost := {key: value for key, value in prices.items() if value is not None}:
        sections["cost"] = cost
    parts = [write_yaml({key: sections[key]}) for key in sections]
    step = f"{plan.step_sequences} x {plan.sequence_length} = {plan.step_tokens:,} tokens"
    trained = count_text(plan.steps * plan.step_tokens)
    header = (
        f"# A run for {source}, by init for {gpus} x {gpu.name}.\n"
        f"#\n#   model    {plan.preset}: {plan.parameters:,} parameters\n#   step     {step}\n"
        f"#   run      {plan.steps:,} steps = {trained} tokens, {plan.epochs:.2f} epochs\n"
    )
    text = "\n".join([header, *parts])
    decide_vocabulary(loaded_text(text, file))
    return plan, text


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
    held_out = [name for name in names if _OF_VALIDATION.search(PurePosixPath(name).name)]
    pattern = re.sub("[0-9]+", "*", glob.escape(held_out[0])) if held_out else ""
    if held_out and [name for name in names if matches(name, [pattern])] == held_out:
        return (pattern,)
    return tuple(glob.escape(name) for name in held_out)


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
        try:
            return load_run(trial)
        except ConfigError as error:  # it names the trial, which is gone
            raise ConfigError(str(error).replace(f"{folder}/", "")) from None


def plan_lines(
    plan: Recommendation, gpus: int, gpu: GpuSpec, per_hour_usd: float | None
) -> list[str]:
    """Return what a plan is made of, and its notes."""
    cost = "price unknown: set --per-hour"
    if plan.cost_usd is not None:
        cost = f"${plan.cost_usd:,.2f} at ${per_hour_usd:,.2f} an hour"
    speed = f"{count_text(plan.tokens_per_second)} tokens/s"
    machine = f"{gpus} x {gpu.name} at {plan.mfu_fraction:.0%} of the peak"
    fit = f"20 tokens a parameter would be {count_text(plan.ideal_parameters)}"
    rows = [
        ("data", f"{plan.data_tokens:,} tokens; {fit}"),
        ("model", f"{plan.preset}, {plan.parameters:,} parameters"),
        ("tokens", f"{plan.tokens_per_parameter:.1f} a parameter, {plan.epochs:.2f} epochs"),
        ("steps", f"{plan.steps:,} of {plan.step_tokens:,} tokens"),
        ("warm-up", f"{counted(plan.warmup_steps, 'step')}"),
        ("save", f"every {counted(plan.save_interval, 'step')}"),
        ("time", f"{plan.hours:,.1f} h, {speed}: {machine}"),
        ("cost", cost),
    ]
    facts = [f"{name:<8} {value}" for name, value in rows]
    return [*facts, *(f"note: {note}" for note in plan.notes)]
