"""The first lines of a run: model, batch, memory, data."""

from __future__ import annotations

import collections
import functools
import hashlib
import importlib.metadata
import itertools
import json
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import refocused
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun, render_run
from refocused.config.run_config import idle_settings
from refocused.data.loader.open_data import DataParts
from refocused.data.order.mixture_order import PERIOD, Mixture
from refocused.data.order.sequences import Position
from refocused.data.order.sources import data_warnings, unused_tokens
from refocused.engine.schedule import unfinished_cycle
from refocused.estimate.flops import count_parameters
from refocused.estimate.memory_plan import needless_offload
from refocused.estimate.step_time import step_of_run
from refocused.metrics.expected_loss import expected_text
from refocused.system.errors import ConfigError, counted
from refocused.system.hardware import cpu_name, gpu_spec
from refocused.system.number_text import count_text
from refocused.system.world import World
from refocused.train.lifecycle.run_folder import expected_loss

if TYPE_CHECKING:
    from refocused.train.lifecycle.trainer import Plan


CLOCK_SECONDS = 300.0  # S3 refuses requests of a clock that is 15 minutes off
# Of fp8 without compiled blocks. Bytes are those of the operations of `models/fp8.py` one after
# another, and of one pass for the scale and one for the value. The width: the three products of a
# layer with the widths D and 4 D save 3 * 4 D^2 FLOPs a token at a bf16 rate of 600 TFLOP/s, and
# convert 2 * 5 D elements, each of which moves 26 bytes more (two products share a scale) at
# 3.3 TB/s.
UNCOMPILED_FP8 = (
    "  warning  8 bits without compiled blocks: bringing an element to 8 bits moves 33 bytes "
    "of memory in place of 5. Counted for an H100, that costs more than 8 bits save below a "
    "width of about 4,000: set model.compile=auto, or precision.fp8=none"
)


def digest(loaded: LoadedRun) -> str:
    """Return a SHA-256 over everything that decides what is trained."""
    return hashlib.sha256("\n".join(settings_lines(loaded)).encode()).hexdigest()


def settings_lines(loaded: LoadedRun) -> list[str]:
    """Return everything that decides what is trained."""
    rest = json.dumps([dict(loaded.shape.settings), loaded.fragment], sort_keys=True, indent=0)
    return [*render_run(loaded.config).splitlines(), *rest.splitlines()]


def require_equal_settings(loaded: LoadedRun, world: World) -> None:
    """Refuse ranks with other settings, which would train other models, or with another clock."""
    settings = settings_lines(loaded)
    pairs = itertools.zip_longest(settings, world.broadcast(settings), fillvalue="nothing")
    differing = (f"{here.strip()}, not {first.strip()}" for here, first in pairs if here != first)
    difference = next(differing, "")
    world.barrier()  # so that all read their clocks at one time
    ranks = world.gather((socket.gethostname(), time.time(), difference))
    for rank, (host, clock, difference) in enumerate(ranks):
        if difference:
            raise ConfigError(
                f"rank {rank} was started with other settings than rank 0 ({loaded.file}): {host} "
                f"has {difference}. Give every machine the same run file, model file and command "
                "line."
            )
        ahead = clock - ranks[0][1]
        if abs(ahead) > CLOCK_SECONDS:
            raise ConfigError(
                f"The clock of {host} is {abs(ahead) / 60:.0f} minutes "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {ranks[0][0]}. Buckets refuse "
                "requests of a wrong clock: set it (timedatectl set-ntp true)."
            )


def opening_lines(loaded: LoadedRun, planned: Plan, world: World) -> list[str]:
    """Return what is known before the data is read."""
    config, shape, plan = loaded.config, loaded.shape, planned.batch
    parameters = count_parameters(shape, vocabulary_multiple=config.model.vocabulary_multiple)
    padding = f" + {parameters.padding:,} of padding" if parameters.padding else ""
    unit = "GPU" if world.device_kind == "cuda" else "rank"
    ranks = f"{world.world_size} {unit}{'s' if world.world_size > 1 else ''}"
    lines = [
        f"refocused {refocused.__version__}   run {config.run.name}   git {_git_commit()}   "
        f"config {digest(loaded)[:4]}",
        f"  model    {shape.family} {shape.layers} x {shape.width}, {parameters.total:,} parameters"
        f"{padding} ({parameters.without_embeddings / 1e6:,.1f} M without embeddings)",
        f"  batch    {plan.text} accumulation x "
        + (f"{plan.shares} x 1/{plan.sequence_parallel} of " if plan.sequence_parallel > 1 else "")
        + f"{ranks} = {plan.tokens:,} tokens a step"
        + (
            f", growing from 1 pass in {counted(plan.warmup_steps, 'step')}"
            if plan.warmup_steps
            else ""
        ),
        *memory_lines(loaded, planned, world),
    ]
    native = planned.native
    if planned.is_native_by_choice:
        lines.append(f"  dtype    {native.dtype} (precision.dtype=auto): {native.reason}")
    elif config.precision.resolved == "bf16" != native.dtype:
        lines.append(
            f"  warning  precision.dtype=bf16 is slow here: {native.reason}. "
            f"precision.dtype={native.dtype} is several times as fast"
        )
    if config.run.steps and (warning := unfinished_cycle(config.run.steps, config.schedule)):
        lines.append(f"  warning  {warning}")
    if config.run.hang_minutes != 0 and not config.log.sample_seconds:
        lines.append("  warning  hangs are not watched for, as log.sample_seconds is 0")
    lines += [
        f"  changed  {change.key} {change.before} -> {change.after} (command line)"
        for change in loaded.changes
    ]
    facts = gpu_spec(world.device_name) if world.device_kind == "cuda" else None
    if facts is not None:
        plan, step = step_of_run(loaded, planned.choice, ranks=world.world_size, gpu=facts)
        lines.append(f"  expect   {step.as_text(plan.tokens)}")
    return lines


def memory_lines(loaded: LoadedRun, planned: Plan, world: World) -> list[str]:
    """Return the memory that a step takes, and warnings if it is not enough or not needed."""
    unit = "GPU" if world.device_kind == "cuda" else "rank"
    zero, memory, precision = (planned.choice.zero, planned.choice.memory, loaded.config.precision)
    fp8 = f" with {precision.fp8} fp8" if precision.fp8 != "none" else ""
    gathered = f" + {memory.gathered / 1e9:,.2f} GB gathered" if memory.gathered else ""
    whole = f" of {planned.memory_bytes / 1e9:,.1f} GB" if planned.memory_bytes else ""
    elsewhere = "".join(
        f", {size / 1e9:,.2f} GB on {device}"
        for size, device in ((memory.host, "the host"), (memory.nvme, "NVMe"))
        if size
    )
    lines = [
        f"  memory   {memory.states / 1e9:,.2f} GB states{gathered} + "
        f"{memory.activations / 1e9:,.2f} GB activations{whole} a {unit}{elsewhere} | "
        f"ZeRO-{zero.stage}, {precision.resolved}{fp8}, {world.device_name}"
    ]
    if planned.memory_bytes and not memory.fits(planned.memory_bytes):
        lines.append(
            "  warning  by this plan the GPU's memory is not enough: "
            "batch.micro_batch_size=auto and zero.stage=auto choose what fits"
        )
    without_offload = needless_offload(
        loaded, planned.choice, ranks=world.world_size, memory_bytes=planned.memory_bytes
    )
    if without_offload is not None:
        lines.append(
            f"  warning  the offload is not needed: without it a step takes "
            f"{without_offload.peak / 1e9:,.1f} GB of a {unit}. It costs 8-55 % of a step "
            "(0.76-1.41 B on 80 GB); set zero.offload_optimizer and zero.offload_parameters to none"
        )
    return lines


def data_lines(data: DataParts, loaded: LoadedRun, plan: BatchPlan) -> list[str]:
    """Return what is known of the data, and the loss to expect of the run."""
    manifest, run = data.manifest, loaded.config
    config, steps = run.data, run.run.total_steps
    size = sum(shard.size for shard in manifest.shards)
    sequences = sum(source.sequences for source in data.sources)
    kept = sum(source.kept for source in data.sources)
    tokens = manifest.tokens
    trained, length = plan.sequences_between(0, steps), plan.sequence_length
    unused = unused_tokens(manifest.shards, sequence_length=length) / tokens
    passes = f", {trained / sequences:.2f} epochs in {counted(steps, 'step')}"
    lines = [
        f"  data     {counted(len(manifest.shards), 'shard')}, {count_text(tokens)} tokens "
        f"({size / 1e9:.2f} GB, {manifest.tokenizer}), {counted(sequences, 'sequence')} to "
        f"train and {kept:,} to validate ({unused:.2%} of the tokens are unused, at the ends of "
        f"shards)"
        f"{'' if config.mixture else passes} | "
        f"{manifest.fingerprint[:16]}"
    ]
    weights = sum(source.weight for source in config.mixture.values())
    end = data.order.stream_from(Position()).position_at(trained)
    for source in data.sources if config.mixture else ():
        epochs = (end.sources or {})[str(source.name)] / source.sequences
        lines.append(
            f"  source   {source.name}: {source.share / PERIOD:.2%} of the sequences "
            f"({source.share} in {PERIOD:,}; "
            f"asked for {config.mixture[str(source.name)].weight / weights:.2%}), "
            f"{source.sequences:,} to train and {source.kept:,} to validate, "
            f"{epochs:.2f} epochs in {counted(steps, 'step')}"
        )
    for stage in data.order.stages[1:] if isinstance(data.order, Mixture) else ():
        begins = plan.step_of(stage.begins)
        when = f"in step {begins:,}" if begins <= steps else "after the run's last step"
        shares = ", ".join(f"{name} {share / PERIOD:.2%}" for name, share in stage.shares.items())
        lines.append(f"  stage    {stage.name} begins {when} (sequence {stage.begins:,}): {shares}")
    if config.skip:
        skipped = sum(source.skipped_sequences for source in data.sources)
        lines.append(
            f"  skip     data.skip leaves out {len(data.sources[0].skipped):,} of "
            f"{len(manifest.shards):,} shards, {skipped:,} sequences of an epoch; those that "
            "follow take their places"
        )
    if config.mask_documents:
        lines.append(
            f"  mask     attention and loss stay within documents, which begin with id "
            f"{config.document_id}"
        )
    warnings = data_warnings(data.sources, manifest, config, sequence_length=length)
    lines += [f"  warning  {warning}" for warning in warnings]
    lines += [f"  warning  {key} is {problem}" for key, problem in idle_settings(run)]
    if run.run.tokens is not None:
        lines.append(f"  steps    {steps:,} for {run.run.length}")
        if warning := unfinished_cycle(steps, run.schedule):
            lines.append(f"  warning  {warning}")
    expected = expected_loss(loaded, plan, data)
    fit = f"  expect   by a published fit a loss of {expected_text(expected, [])}"
    return [*lines, *tokenizer_lines(config), *([fit] if "curve" in expected else [])]


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes."""
    packages = ("refocused", "torch", "deepspeed", "transformers")
    return {name: importlib.metadata.version(name) for name in packages}


def setup_record(
    loaded: LoadedRun, planned: Plan, data: DataParts, *, world: World, command: str
) -> dict[str, object]:
    """Return what a session runs, and on what, for its `setup` event: on rank 0; all ranks call.

    Texts are those of the first lines.
    """
    is_gpu = world.device_kind == "cuda"
    device = world.device_name if is_gpu else cpu_name()
    hosts, devices = zip(*world.gather((socket.gethostname(), device)), strict=True)
    if not world.is_rank_0:
        return {}
    lines = opening_lines(loaded, planned, world)
    lines += data_lines(data, loaded, planned.batch)
    texts = collections.defaultdict[str, list[str]](list)
    for line in lines:
        word, _, text = line.strip().partition(" ")
        texts[word].append(text.strip())
    unit, counts = "x" if is_gpu else "ranks on", collections.Counter(devices).items()
    packages = {**package_versions(), "python": platform.python_version()}
    hardware = ", ".join(f"{count} {unit} {name}" for name, count in counts)
    return {
        "command": command,  # that resumes the run, without secrets
        "git": _git_commit(),  # of the code, `-dirty` with changes; `-`: it is not a checkout
        "versions": packages,  # by package
        "hardware": hardware,  # GPUs or processors of all ranks
        "hosts": list(dict.fromkeys(hosts)),  # the machines' names
        "model": texts["model"],  # family, shape, parameters
        "batch": texts["batch"],  # sequences and tokens of a step
        "memory": texts["memory"],  # by plan, of a GPU or rank
        "data": texts["data"],  # shards, tokens, sequences
        "sources": texts["source"],  # of a mixture
        "tokenizer": data.manifest.tokenizer,  # that made the tokens
        "data_fingerprint": data.manifest.fingerprint,  # of the files and their content
    }


def tokenizer_lines(config: DataConfig) -> list[str]:
    """Return a warning if checkpoints will name a tokenizer that they do not hold."""
    if config.tokenizer == "unknown" or config.tokenizer_is_readable:
        return []
    return [
        f"  warning  checkpoints and final_model/ will hold no tokenizer, and bits per byte are "
        f"unknown: the files of {config.tokenizer} are not named. Set data.bpe_folder to the "
        "folder of vocab.bpe and encoder.json"
    ]


@functools.cache
def _git_commit() -> str:
    """Return the short commit of the code that runs, `-dirty` with changes; `-` if unknown."""
    root = Path(refocused.__file__).parents[1]
    if not (root / "pyproject.toml").is_file():  # installed, maybe inside another repository
        return "-"
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "-"
    return done.stdout.strip() or "-"
