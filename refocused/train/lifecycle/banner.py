"""The first lines of a run: what is going to be trained, on what, with what."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import refocused
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.load_run import Change, LoadedRun
from refocused.config.model_shape import ModelShape
from refocused.config.optimization import PrecisionConfig
from refocused.data.order.mixture_order import PERIOD
from refocused.engine.compiled import Compilation
from refocused.estimate.flops import count_parameters
from refocused.estimate.step_time import step_of_run
from refocused.system.hardware import gpu_facts
from refocused.system.world import World
from refocused.train.lifecycle.job import Plan
from refocused.train.lifecycle.open_data import DataParts

# Memory that a bf16 element moves on its way to 8 bits, its part in finding the scale included: by
# the operations of `models/fp8.py` one after another, and by one pass for scale and one for value.
EAGER_BYTES_TO_8_BITS = 33
FUSED_BYTES_TO_8_BITS = 5


def lines(
    *,
    name: str,
    shape: ModelShape,
    vocabulary_multiple: int,
    plan: BatchPlan,
    planned: Plan,
    precision: PrecisionConfig,
    changes: Sequence[Change],
    world: World,
    digest: str,
) -> list[str]:
    """Return what can be said before the data is looked at."""
    count = count_parameters(shape, vocabulary_multiple=vocabulary_multiple)
    padding = f" + {count.padding:,} of padding" if count.padding else ""
    unit = "GPU" if world.device_kind == "cuda" else "rank"
    ranks = f"{world.world_size} {unit}{'s' if world.world_size > 1 else ''}"
    return [
        f"refocused {refocused.__version__}   run {name}   git {_git_commit()}   config {digest}",
        f"  model    {shape.family} {shape.layers} x {shape.width}, {count.total:,} parameters"
        f"{padding} ({count.without_embeddings / 1e6:,.1f} M without embeddings)",
        f"  batch    {plan.micro} x {plan.sequence_length} x {plan.accumulation} accumulation x "
        f"{ranks} = {plan.tokens:,} tokens a step",
        *memory_lines(planned, precision=precision, world=world),
        *_dtype_lines(planned, precision=precision),
        *(
            f"  changed  {change.key} {change.before} -> {change.after} (command line)"
            for change in changes
        ),
    ]


def expected_lines(loaded: LoadedRun, planned: Plan, *, world: World) -> list[str]:
    """Return what a step should take, to compare the run with; nothing where the GPU is unknown."""
    facts = gpu_facts(world.device_name) if world.device_kind == "cuda" else None
    if facts is None:
        return []
    plan, step = step_of_run(loaded, planned.choice, ranks=world.world_size, gpu=facts)
    return [f"  expect   {step.as_text(plan.tokens)}"]


def _dtype_lines(planned: Plan, *, precision: PrecisionConfig) -> list[str]:
    """Return why `auto` chose the precision, or that the chosen one is slow here."""
    native = planned.native
    if planned.is_native_by_choice:
        return [f"  dtype    {native.dtype} (precision.dtype=auto): {native.reason}"]
    if precision.resolved == "bf16" != native.dtype:
        return [
            f"  WARN     precision.dtype=bf16 is slow here: {native.reason}. "
            f"precision.dtype={native.dtype} is several times as fast"
        ]
    return []


def memory_lines(planned: Plan, *, precision: PrecisionConfig, world: World) -> list[str]:
    """Return what a step takes of a GPU, and what of it is not needed or not there."""
    unit = "GPU" if world.device_kind == "cuda" else "rank"
    zero, memory = planned.choice.zero, planned.choice.memory
    fp8 = f" with {precision.fp8} fp8" if precision.fp8 != "none" else ""
    computed_in = precision.resolved + fp8
    parts = [f"{memory.states / 1e9:,.2f} GB states"]
    if memory.gathered:
        parts.append(f"{memory.gathered / 1e9:,.2f} GB gathered")
    parts.append(f"{memory.activations / 1e9:,.2f} GB activations")
    whole = f" of {planned.memory_bytes / 1e9:,.1f} GB" if planned.memory_bytes else ""
    elsewhere = "".join(
        f", {size / 1e9:,.2f} GB on {place}"
        for size, place in ((memory.host, "the host"), (memory.nvme, "NVMe"))
        if size
    )
    lines = [
        f"  memory   {' + '.join(parts)}{whole} a {unit}{elsewhere} | ZeRO-{zero.stage}, "
        f"{computed_in}, {world.device_name}"
    ]
    if planned.memory_bytes and not memory.fits(planned.memory_bytes):
        lines.append(
            "  WARN     by this plan the GPU's memory is not enough: batch.micro=auto and "
            "zero.stage=auto choose what fits"
        )
    if planned.without_offload is not None:
        lines.append(
            f"  WARN     the offload is not needed: without it a step takes "
            f"{planned.without_offload / 1e9:,.1f} GB of a {unit}. It costs 8-55 % of a step "
            "(0.76-1.41 B on 80 GB); set zero.offload_optimizer and zero.offload_parameters to none"
        )
    return lines


def uncompiled_fp8(precision: PrecisionConfig, compilation: Compilation) -> str | None:
    """Return what 8 bits cost where blocks are not compiled; None: they are, or nothing is 8 bits.

    The width: the three products of a layer with the widths D and 4 D save 3 * 4 D^2 FLOPs a token
    at a bf16 rate of 600 TFLOP/s, and bring 2 * 5 D elements to 8 bits, of which each moves 26
    bytes more at 3.3 TB/s (the gradient's and the input's scale are found once for two products).
    """
    if precision.fp8 == "none" or compilation.is_on:
        return None
    return (
        "  WARN     8 bits without compiled blocks: bringing an element to 8 bits moves "
        f"{EAGER_BYTES_TO_8_BITS} bytes of memory in place of {FUSED_BYTES_TO_8_BITS}. Counted for "
        "an H100, that costs more than 8 bits save below a width of about 4,000: set "
        "model.compile=auto, or precision.fp8=none"
    )


def data_lines(data: DataParts, config: DataConfig, steps: int, plan: BatchPlan) -> list[str]:
    """Return what is known of the data."""
    manifest = data.manifest
    size = sum(shard.size for shard in manifest.shards)
    windows = sum(source.windows for source in data.sources)
    kept = sum(source.kept for source in data.sources)
    epochs = f", {steps * plan.windows / windows:.2f} epochs in {steps:,} steps"
    lines = [
        f"  data     {len(manifest.shards):,} shards, {_tokens(manifest.tokens)} tokens "
        f"({size / 1e9:.2f} GB, {manifest.tokenizer}), {windows:,} windows to "
        f"train and {kept:,} to validate{'' if config.mixture else epochs} | "
        f"{manifest.fingerprint[:16]}"
    ]
    asked = sum(one.weight for one in config.mixture.values())
    for source in data.sources if config.mixture else ():
        share = source.share / PERIOD
        lines.append(
            f"  source   {source.name}: {share:.2%} of the windows ({source.share} in {PERIOD:,}; "
            f"asked for {config.mixture[str(source.name)].weight / asked:.2%}), "
            f"{source.windows:,} to train and {source.kept:,} to validate, "
            f"{share * steps * plan.windows / source.windows:.2f} epochs in {steps:,} steps"
        )
    if config.skip:
        skipped = sum(source.skipped_windows for source in data.sources)
        count = len(data.sources[0].skipped)
        lines.append(
            f"  skip     data.skip leaves out {count:,} of {len(manifest.shards):,} shards, "
            f"{skipped:,} windows of an epoch; those that follow take their places"
        )
    if config.mask_documents:
        lines.append(
            f"  mask     attention and loss stay within documents, which begin with id "
            f"{config.document_id}"
        )
    return [*lines, *tokenizer_lines(config)]


def tokenizer_lines(config: DataConfig) -> list[str]:
    """Return a warning where checkpoints will name a tokenizer that they do not hold."""
    if config.tokenizer == "unknown" or config.tokenizer_is_readable:
        return []
    return [
        f"  WARN     checkpoints and final_model/ will hold no tokenizer: the files of "
        f"{config.tokenizer} are not named. Set data.bpe_folder to the folder of vocab.bpe and "
        "encoder.json"
    ]


def _tokens(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _git_commit() -> str:
    """Return the short commit of the code that runs; `-` outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(refocused.__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "-"
    return done.stdout.strip() or "-"
