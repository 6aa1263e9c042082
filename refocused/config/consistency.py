"""What the sections of a run must agree on among themselves and with the model's shape."""

from __future__ import annotations

from typing import NamedTuple

from refocused.config.model_shape import Attention, ModelShape
from refocused.config.run_config import RunConfig

FP8_MULTIPLE = 16  # of each side of a product of 8 bits, on every NVIDIA GPU that has them


class Misfit(NamedTuple):
    """Two settings that cannot both hold: `section.key` of the one to change, and why."""

    key: str
    message: str


def check_run(config: RunConfig) -> list[Misfit]:
    """Return every pair of settings of a run that do not fit together."""
    steps, schedule, batch, data = config.run.steps, config.schedule, config.batch, config.data
    offload = config.zero.offload_optimizer
    rules = [
        (
            schedule.warmup_steps >= steps,
            "schedule.warmup_steps",
            f"the warmup must end before run.steps = {steps}. Lower it, or raise run.steps.",
        ),
        (
            schedule.cycle_steps is not None and schedule.cycle_steps <= schedule.warmup_steps,
            "schedule.cycle_steps",
            f"a cycle must be longer than schedule.warmup_steps = {schedule.warmup_steps}.",
        ),
        (
            batch.windows is not None
            and isinstance(batch.micro, int)
            and batch.windows % batch.micro != 0,
            "batch.windows",
            f"not a multiple of batch.micro = {batch.micro}: no number of GPUs can share it.",
        ),
        (
            config.checkpoint.in_background and offload == "nvme",
            "checkpoint.async",
            "zero.offload_optimizer = nvme keeps states on the drive, which cannot be copied to "
            "host memory. Set it to false.",
        ),
        (
            config.optimizer.kind == "muon" and offload != "none",
            "optimizer.kind",
            "muon gathers whole matrices on the GPU, so zero.offload_optimizer must be none.",
        ),
    ]
    if not data.tokenizer_is_readable:
        reason = "data.tokenizer, which is unknown. Name the one that made the data"
        if data.tokenizer == "gpt2":
            reason = "the files of gpt2. Name their folder by data.bpe_folder"
        message = f"text is turned into tokens by {reason}, or leave this out."
        evaluation = config.evaluation
        rules += [
            (evaluation.sample_prompt is not None, "evaluation.sample_prompt", message),
            (bool(evaluation.tasks), "evaluation.tasks", message),
        ]
    return [Misfit(key, message) for is_broken, key, message in rules if is_broken]


def check_shape(config: RunConfig, shape: ModelShape) -> list[Misfit]:
    """Return every setting of a run that its model's shape does not allow."""
    model, document_id, preset = config.model, config.data.document_id, config.model.preset
    is_unknown_id = document_id is not None and document_id >= shape.vocabulary
    has_attention = isinstance(shape.mixer, Attention)
    rules = [
        (
            model.sequence_length > shape.max_length,
            "model.sequence_length",
            f"{preset} goes up to {shape.max_length}. Lower it, or choose another model.preset.",
        ),
        (
            is_unknown_id and model.vocabulary != "auto",
            "data.document_id",
            f"{preset} knows ids up to {shape.vocabulary - 1}. Give the id that precedes each "
            "document in the files, or raise model.vocabulary.",
        ),
        (
            config.data.mask_documents and not has_attention,
            "data.mask_documents",
            f"{preset} ({shape.family}) has no attention to keep within documents. Set it to "
            "false, or choose another model.preset.",
        ),
        (
            config.precision.fp8 != "none" and not has_attention,
            "precision.fp8",
            f"is made for gpt2 and gpt_neox; {preset} is {shape.family}. Set it to none.",
        ),
    ]
    sizes = {
        f"{preset} is {shape.width} wide": shape.width,
        f"{preset}'s feed-forward part is {shape.ffn_width} wide": shape.ffn_width,
        f"model.sequence_length is {model.sequence_length}": model.sequence_length,
    }
    rules += [
        (
            config.precision.fp8 != "none" and has_attention and size % FP8_MULTIPLE != 0,
            "precision.fp8",
            f"GPUs multiply 8 bits in multiples of {FP8_MULTIPLE}; {what}. Set it to none, or "
            "change that.",
        )
        for what, size in sizes.items()
    ]
    return [Misfit(key, message) for is_broken, key, message in rules if is_broken]
