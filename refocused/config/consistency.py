"""Check that the sections of a run fit together and fit the model's shape."""

from collections.abc import Iterator
from typing import NamedTuple

from refocused.config.model_shape import Attention, Eigenstates, ModelShape, Recall, Resonators
from refocused.config.run_config import RunConfig

FP8_MULTIPLE = 16  # of each side of a product of 8 bits, on every NVIDIA GPU that has them


class Misfit(NamedTuple):
    """A setting to change, as `section.key`, and why."""

    key: str
    message: str


def check_run(config: RunConfig) -> Iterator[Misfit]:
    """Yield the settings of a run that do not fit together."""
    steps, schedule, batch, data = config.run.steps, config.schedule, config.batch, config.data
    warmup, offload = schedule.warmup_steps, config.zero.offload_optimizer
    if warmup >= steps:
        message = f"the warmup must end before run.steps = {steps}. Lower it, or raise run.steps."
        yield Misfit("schedule.warmup_steps", message)
    if schedule.cycle_steps is not None and schedule.cycle_steps <= warmup:
        message = f"a cycle must be longer than schedule.warmup_steps = {warmup}."
        yield Misfit("schedule.cycle_steps", message)
    if (begin := schedule.decay_begins(steps)) < warmup:
        key = "decay_steps" if schedule.decay_steps is not None else "decay_fraction"
        message = (
            f"the decay would begin at step {begin:,}, and the warmup ends at step {warmup:,}."
        )
        yield Misfit(f"schedule.{key}", f"{message} Shorten one of them.")
    if (
        isinstance(batch.micro_batch_size, int)
        and batch.global_batch_size is not None
        and batch.global_batch_size % batch.micro_batch_size
    ):
        each = f"batch.micro_batch_size = {batch.micro_batch_size}"
        message = f"not a multiple of {each}: no number of GPUs can share it."
        yield Misfit("batch.global_batch_size", message)
    if config.checkpoint.in_background and offload == "nvme":
        message = "states offloaded to nvme cannot be copied to host memory. Set it to false."
        yield Misfit("checkpoint.async", message)
    if config.run.on_spike == "rewind" and not config.checkpoint.interval:
        message = "rewind needs checkpoints to go back to. Set checkpoint.interval."
        yield Misfit("run.on_spike", message)
    model, places = config.model, (offload, config.zero.offload_parameters)
    if model.start_from is not None and "nvme" in places:
        message = "weights cannot be loaded to an NVMe drive. Offload to cpu, or leave this out."
        yield Misfit("model.start_from", message)
    if config.run.replay_every is not None and "nvme" in places:
        message = "states on an NVMe drive cannot be compared. Offload to cpu, or leave this out."
        yield Misfit("run.replay_every", message)
    if model.resize_vocabulary and model.start_from is None:
        yield Misfit("model.resize_vocabulary", "needs model.start_from. Set it, too.")
    if config.optimizer.kind == "muon" and offload != "none":
        message = "muon needs zero.offload_optimizer = none: it gathers whole matrices on the GPU."
        yield Misfit("optimizer.kind", message)
    if not data.tokenizer_is_readable:
        missing = "data.tokenizer. Set it to the tokenizer that made the data"
        if data.tokenizer == "gpt2":
            missing = "the files of gpt2. Set data.bpe_folder to their folder"
        message = f"needs {missing}, or leave this out."
        if config.evaluation.sample_prompt is not None:
            yield Misfit("evaluation.sample_prompt", message)
        if config.evaluation.tasks:
            yield Misfit("evaluation.tasks", message)


def idle_settings(config: RunConfig) -> Iterator[Misfit]:
    """Yield the intervals of what a run cannot measure; it may train without."""
    sources, evaluation = config.data.by_source.values(), config.evaluation
    held_out = any(source.validation_files or source.validation_fraction for source in sources)
    for key, is_possible, missing in (
        (
            "interval",
            held_out,
            "no data are held out, so there is no validation loss and no best checkpoint. Set "
            "data.validation_fraction=0.001 or data.validation_files",
        ),
        ("task_interval", evaluation.tasks, "no task is named. Set evaluation.tasks"),
        ("sample_interval", evaluation.sample_prompt, "no prompt. Set evaluation.sample_prompt"),
    ):
        if (value := getattr(evaluation, key)) and not is_possible:
            yield Misfit(f"evaluation.{key}", f"{value}: {missing}, or evaluation.{key}=0.")


def check_shape(config: RunConfig, shape: ModelShape) -> Iterator[Misfit]:
    """Yield the settings of a run that do not fit its model's shape."""
    model, document_id, preset = config.model, config.data.document_id, config.model.preset
    has_attention = shape.record.has_attention
    if model.sequence_length > shape.max_length:
        message = f"{preset} allows up to {shape.max_length}. Lower it, or choose another"
        yield Misfit("model.sequence_length", f"{message} model.preset.")
    undecided = model.vocabulary == "auto"
    if document_id is not None and document_id >= shape.vocabulary and not undecided:
        message = f"{preset} has ids up to {shape.vocabulary - 1}. Set it to the id before each"
        yield Misfit(
            "data.document_id", f"{message} document in the files, or raise model.vocabulary."
        )
    if config.data.mask_documents and not has_attention:
        message = f"{preset} ({shape.family}) has no attention. Set it to false, or choose another"
        yield Misfit("data.mask_documents", f"{message} model.preset.")
    if model.head == "fused" and (model.z_loss or shape.softcap is not None):
        message = "torch's form has neither a logit softcap nor a z-loss. Set it to chunked."
        yield Misfit("model.head", message)
    if model.scan == "kernel":
        recall = getattr(shape.mixer, "recall", Recall())
        if not isinstance(shape.mixer, Eigenstates) and not recall.memory_heads:
            yield Misfit("model.scan", f"{preset} ({shape.family}) has no scan. Set it to chunked.")
        elif model.sequence_parallel > 1:  # scans begin from a state, which the kernels do not
            yield Misfit(
                "model.scan", "ranks share sequences and scan in chunks. Set it to chunked."
            )
    if (ranks := model.sequence_parallel) > 1:
        for what, size in _shared(shape, preset, model.sequence_length):
            if size % ranks:
                message = f"{what}, no multiple of {ranks}. Choose a number that divides it."
                yield Misfit("model.sequence_parallel", message)
        if isinstance(shape.mixer, Resonators):
            message = f"{preset} ({shape.family}) cannot share sequences. Set it to 1, or choose"
            yield Misfit("model.sequence_parallel", f"{message} another model.preset.")
    if config.precision.fp8 == "none":
        return
    if not has_attention:
        message = f"needs blocks of attention; {preset} is {shape.family}. Set it to none."
        yield Misfit("precision.fp8", message)
        return
    # The sizes of the blocks' products, by a description.
    of_ranks = "" if model.sequence_parallel == 1 else "a rank's part of "
    sizes = {
        f"{preset} is {shape.width} wide": shape.width,
        f"{preset}'s feed-forward part is {shape.ffn_width} wide": shape.ffn_width,
        f"{of_ranks}model.sequence_length is {model.slice_tokens}": model.slice_tokens,
    }
    for of in ("queries", "keys"):
        if (size := shape.widths[of]) != shape.width:
            sizes[f"{preset}'s {of} are {size} wide"] = size
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            message = f"needs multiples of {FP8_MULTIPLE}; {what}. Change that, or set it to none."
            yield Misfit("precision.fp8", message)


def _shared(shape: ModelShape, preset: str, sequence_length: int) -> Iterator[tuple[str, int]]:
    """Yield what ranks divide that share sequences, with a description."""
    yield f"model.sequence_length is {sequence_length}", sequence_length
    if isinstance(shape.mixer, Eigenstates):
        for scale in shape.mixer.scales:
            groups = 1 if sequence_length % scale else sequence_length // scale
            yield f"{preset} averages {scale} of {sequence_length} tokens", groups
        if shape.mixer.recall.attention_every:
            heads = shape.mixer.recall.attention_heads
            yield f"{preset} has {heads} heads", heads
    if isinstance(shape.mixer, Attention):
        yield f"{preset} has {shape.mixer.heads} heads", shape.mixer.heads
        if shape.mixer.key_heads != shape.mixer.heads:
            yield f"{preset} has {shape.mixer.key_heads} heads of keys", shape.mixer.key_heads
