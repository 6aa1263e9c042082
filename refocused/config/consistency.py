"""What the sections of a run must agree on among themselves and with the model's shape."""

from __future__ import annotations

import dataclasses

from refocused.config.model_shape import Attention, ModelShape
from refocused.config.run_config import RunConfig

FP8_MULTIPLE = 16  # of each side of a product of 8 bits, on every NVIDIA GPU that has them


@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """Two settings that cannot both hold.

    Attributes:
        key: `section.key` of the one to change.
        message: Why it does not fit, and what to do.
    """

    key: str
    message: str


def check_run(config: RunConfig) -> list[Misfit]:
    """Return every pair of settings of a run that do not fit together."""
    misfits = []
    steps, schedule, batch = config.run.steps, config.schedule, config.batch
    if schedule.warmup_steps >= steps:
        misfits.append(
            Misfit(
                "schedule.warmup_steps",
                f"the warmup must end before run.steps = {steps}. Lower it, or raise run.steps.",
            )
        )
    if schedule.cycle_steps is not None and schedule.cycle_steps <= schedule.warmup_steps:
        misfits.append(
            Misfit(
                "schedule.cycle_steps",
                f"a cycle must be longer than schedule.warmup_steps = {schedule.warmup_steps}.",
            )
        )
    if isinstance(batch.micro, int) and batch.windows is not None and batch.windows % batch.micro:
        misfits.append(
            Misfit(
                "batch.windows",
                f"not a multiple of batch.micro = {batch.micro}: no number of GPUs can share it.",
            )
        )
    if config.checkpoint.in_background and config.zero.offload_optimizer == "nvme":
        misfits.append(
            Misfit(
                "checkpoint.async",
                "zero.offload_optimizer = nvme keeps states on the drive, which cannot be copied "
                "to host memory. Set it to false.",
            )
        )
    if config.optimizer.kind == "muon" and config.zero.offload_optimizer != "none":
        misfits.append(
            Misfit(
                "optimizer.kind",
                "muon gathers whole matrices on the GPU, so zero.offload_optimizer must be none.",
            )
        )
    misfits += _texts_without_tokenizer(config)
    return misfits


def _texts_without_tokenizer(config: RunConfig) -> list[Misfit]:
    """Name what the run reads or writes as text without the files to do so."""
    data, evaluation = config.data, config.evaluation
    if data.tokenizer == "unknown":
        reason = "data.tokenizer, which is unknown. Name the one that made the data"
    elif data.tokenizer == "gpt2" and data.bpe_folder is None:
        reason = "the files of gpt2. Name their folder by data.bpe_folder"
    else:
        return []
    wishes = {"sample_prompt": evaluation.sample_prompt is not None, "tasks": evaluation.tasks}
    return [
        Misfit(f"evaluation.{name}", f"text is turned into tokens by {reason}, or leave this out.")
        for name, is_wished in wishes.items()
        if is_wished
    ]


def check_shape(config: RunConfig, shape: ModelShape) -> list[Misfit]:
    """Return every setting of a run that its model's shape does not allow."""
    misfits = []
    if config.model.sequence_length > shape.max_length:
        misfits.append(
            Misfit(
                "model.sequence_length",
                f"{config.model.preset} goes up to {shape.max_length}. "
                "Lower it, or choose another model.preset.",
            )
        )
    undecided = config.model.vocabulary == "auto"
    document_id = config.data.document_id
    if document_id is not None and document_id >= shape.vocabulary and not undecided:
        misfits.append(
            Misfit(
                "data.document_id",
                f"{config.model.preset} knows ids up to {shape.vocabulary - 1}. Give the id that "
                "precedes each document in the files, or raise model.vocabulary.",
            )
        )
    if config.data.mask_documents and not isinstance(shape.mixer, Attention):
        misfits.append(
            Misfit(
                "data.mask_documents",
                f"{config.model.preset} ({shape.family}) has no attention to keep within "
                "documents. Set it to false, or choose another model.preset.",
            )
        )
    if config.precision.fp8 != "none":
        misfits += _unfit_for_fp8(config, shape)
    return misfits


def _unfit_for_fp8(config: RunConfig, shape: ModelShape) -> list[Misfit]:
    """Name what keeps a model's products from being made in 8 bits."""
    if not isinstance(shape.mixer, Attention):
        reason = f"is made for gpt2 and gpt_neox; {config.model.preset} is {shape.family}"
        return [Misfit("precision.fp8", f"{reason}. Set it to none.")]
    sizes = {
        f"{config.model.preset} is {shape.width} wide": shape.width,
        f"{config.model.preset}'s feed-forward part is {shape.ffn_width} wide": shape.ffn_width,
        f"model.sequence_length is {config.model.sequence_length}": config.model.sequence_length,
    }
    return [
        Misfit(
            "precision.fp8",
            f"GPUs multiply 8 bits in multiples of {FP8_MULTIPLE}; {what}. Set it to none, or "
            "change that.",
        )
        for what, size in sizes.items()
        if size % FP8_MULTIPLE
    ]
