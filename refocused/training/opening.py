"""The first lines of a run: what is going to be trained, on what, with what."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import refocused
from refocused.config.batch_plan import BatchPlan
from refocused.config.decode import Change
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.config.shape import ModelShape
from refocused.estimate import count_parameters, state_memory
from refocused.training.data import DataParts
from refocused.world import World


def lines(
    *,
    name: str,
    shape: ModelShape,
    vocabulary_multiple: int,
    plan: BatchPlan,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    changes: Sequence[Change],
    world: World,
    digest: str,
) -> list[str]:
    """Return what can be said before the data is looked at."""
    count = count_parameters(shape, vocabulary_multiple=vocabulary_multiple)
    padding = f" + {count.padding:,} of padding" if count.padding else ""
    memory = state_memory(count.allocated, zero=zero, dtype=precision.dtype, ranks=world.world_size)
    unit = "GPU" if world.device_kind == "cuda" else "rank"
    ranks = f"{world.world_size} {unit}{'s' if world.world_size > 1 else ''}"
    return [
        f"refocused {refocused.__version__}   run {name}   git {_git_commit()}   config {digest}",
        f"  model    {shape.family} {shape.layers} x {shape.width}, {count.total:,} parameters"
        f"{padding} ({count.without_embeddings / 1e6:,.1f} M without embeddings)",
        f"  batch    {plan.micro} x {plan.sequence_length} x {plan.accumulation} accumulation x "
        f"{ranks} = {plan.tokens:,} tokens a step",
        f"  memory   {memory.gpu / 1e9:,.2f} GB of states a {unit}, {memory.host / 1e9:,.2f} GB "
        f"offloaded | ZeRO-{zero.stage}, {precision.dtype}, {world.device_name}",
        *(
            f"  changed  {change.key} {change.before} -> {change.after} (command line)"
            for change in changes
        ),
    ]


def data_line(data: DataParts, steps: int, plan: BatchPlan) -> str:
    """Return what is known of the data."""
    manifest = data.manifest
    epochs = steps * plan.windows / data.order.windows_per_epoch
    size = sum(shard.size for shard in manifest.shards)
    return (
        f"  data     {len(manifest.shards):,} shards, {_tokens(manifest.tokens)} tokens "
        f"({size / 1e9:.2f} GB, {manifest.tokenizer}), {data.order.windows_per_epoch:,} windows to "
        f"train and {data.validation_windows:,} to validate, {epochs:.2f} epochs in {steps:,} "
        f"steps | {manifest.fingerprint[:16]}"
    )


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
