"""The whole of one run file, and whether its sections fit together and the model's shape."""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self

import pydantic

from refocused.config.data import DataConfig
from refocused.config.model_shape import Attention, Eigenstates, ModelShape, Recall, Resonators
from refocused.config.optimization import (
    BatchConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    ZeroSettings,
)
from refocused.config.outputs import (
    HIDDEN,
    CheckpointConfig,
    CostConfig,
    EvaluationConfig,
    LogConfig,
    TrackingConfig,
)
from refocused.config.section import (
    Count,
    CountOrAuto,
    CountOrZero,
    Flag,
    Fraction,
    NotNegative,
    PathText,
    Positive,
    Section,
    matching,
    setting,
)
from refocused.system.errors import ConfigError


class ModelConfig(Section):
    """The model of a run."""

    preset: PathText = pydantic.Field(examples=["gpt2_124m"])
    """Model shape: a name in `config/models/`, or the path of a transformers configuration."""
    start_from: PathText | None = setting(None, "hub:openai-community/gpt2")
    """Weights to start from, in place of random ones: `hub:MODEL[@REVISION]`, a transformers
    folder, the `gs://` address of an export or a checkpoint, or `RUN[:STEP]`. Optimizer, schedule,
    data and step are new. A checkpoint of the run itself has precedence."""
    resize_vocabulary: Flag | None = setting(None, "true")
    """Allow `start_from` a model of another vocabulary: the embedding and the head are cut, or get
    new rows, drawn around the mean of the others."""
    vocabulary: CountOrAuto | None = setting(None, "50257")
    """Number of token ids; `auto`: that of `data.tokenizer`, else of the data's manifest, else of
    the preset; null: that of the preset."""
    sequence_length: Count = pydantic.Field(examples=["1024"])
    """Tokens of a sequence, at most the context of the shape."""
    sequence_parallel: Count = setting(1, "2")
    """Neighbouring ranks that share the tokens of each sequence, for sequences that are too long
    for one GPU. Attention exchanges tokens for heads between them (DeepSpeed Ulysses), TEN its
    states.
    """
    embedding_std: Positive | None = setting(None, "0.8")
    """Standard deviation of the initial token embedding; null: that of the preset
    (`initializer_range`), as for the next three."""
    head_std: NotNegative | None = setting(None, "1e-3")
    """Standard deviation of the initial head, if it is not tied to the embedding."""
    matrix_init: Literal["preset", "fan_in"] = "preset"
    """Initial matrices of the blocks' linear layers; `fan_in`: uniform, with the variance 1 /
    inputs."""
    zero_projections: Flag = False
    """Begin with zero for the matrices that write into the residual stream, so that each block
    begins as the identity."""
    dropout: Fraction = setting(0.0, "0.1")
    """Dropout probability, everywhere in the model."""
    vocabulary_multiple: Count = setting(128, "64")
    """Pad the embedding's rows to a multiple of this (64 or 128 suit matrix units). The padding is
    never a label."""
    activation_checkpointing: Flag = False
    """Recompute each block in the backward pass instead of keeping its activations: about 80 % less
    activation memory for about 30 % more time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """`auto` compiles the blocks on GPUs; `on` also on CPUs, with a C++ compiler; `off` runs
    eagerly. If torch's compiler fails, the run warns and continues eagerly."""
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    """Attention kernel. `auto` is torch's own choice, and FlexAttention for masked documents on
    GPUs. `flash` has no masks; it is FlashAttention-3 on Hopper GPUs if installed."""
    head: Literal["chunked", "fused", "kernel"] = "chunked"
    """Implementation of the loss: `chunked` in torch operations, `fused` as torch's fused form (in
    fp32; torch 2.11 has none), `kernel` as our Triton kernel."""
    scan: Literal["chunked", "kernel"] = "chunked"
    """Implementation of the scans of TEN's eigenstates and of memories: `chunked` in torch
    operations, `kernel` as our Triton kernels."""
    z_loss: Annotated[float, pydantic.Field(ge=0, le=1)] = setting(0.0, "1e-4")
    """Weight of the squared log-sum-exp of the logits, whose gradient keeps them from drifting. The
    losses shown, of training and validation, stay without it."""
    head_chunk_tokens: Count = setting(2048, "4096")
    """Tokens whose logits are in memory at once."""

    @property
    def slice_tokens(self) -> int:
        """Tokens of a sequence on one rank."""
        return self.sequence_length // self.sequence_parallel

    @property
    def sequence(self) -> dict[str, int]:
        """What `batch_plan.plan_batch` needs of this section."""
        return self.model_dump(include={"sequence_length", "sequence_parallel"})


class RunSection(Section):
    """The run itself."""

    name: Annotated[
        str,
        matching(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
            "a run's name is letters, digits, '.', '_' and '-', at most 100",
        ),
    ] = pydantic.Field(examples=["gpt2-124m-a"])
    """Name of the run and of its folder in `directory`; by default the name of the run file."""
    directory: PathText = setting("runs", "/mnt/disk/runs")
    """Folder of all runs, on a shared disk or on the disk of each machine."""
    steps: Count | None = setting(None, "20000")
    """Optimizer steps of the whole run; null: as many as `tokens` or `epochs` take."""
    tokens: Count | None = setting(None, "10e9")
    """Tokens to train on, in place of `steps`, rounded up to a whole step. A resume with another
    batch still trains on as many in all."""
    epochs: Positive | None = setting(None, "1.5")
    """Passes over the training data, in place of `steps`: the run reads how many tokens they are at
    its start. Not for a mixture, each of whose sources has passes of its own."""
    seed: CountOrZero = setting(1337, "1")
    """Seed of the initial weights, of dropout and of the data order."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` requires GPUs; `auto` uses GPUs if there are any, else trains small models on the CPU;
    `cpu` trains any model on the CPU."""
    ranks: Count | None = setting(None, "16")
    """Number of ranks (GPUs) of the whole run; any other ends the start. Null: as many as were
    started, unless SLURM, MPI or Kubernetes started more."""
    join_seconds: Positive = setting(40.0, "300")
    """Longest wait, at the start, for the ranks of other hosts."""
    deterministic: Flag = False
    """Use only deterministic GPU kernels: the same run gives the same bits on the same GPUs, but
    runs slower."""
    replay_every: Count | None = setting(None, "1000")
    """Look for silent corruption: every so many steps compute one micro-batch of each rank twice
    and compare, and compare weights and optimizer state before each update with those after the
    one before. Null: off."""
    time_limit_hours: Positive | None = setting(None, "11.5")
    """Limit of one session in hours; then the run saves and stops with exit code 4."""
    spot_notice: Annotated[
        PathText,
        matching("auto|none|gce|aws|azure|.*/.*", "expected auto, none, gce, aws, azure or a path"),
    ] = setting("auto", "/run/preempted")
    """Who says that a machine will be taken away, so that the run saves and stops: the metadata
    server of `gce`, `aws` or `azure`; `auto`: of the cloud that the firmware names, if any; `none`;
    else the path of a file on each machine, once it exists."""
    on_spike: Literal["warn", "skip", "rewind"] = "warn"
    """What follows if loss or gradient norm jump far above those of the last 128 steps. `warn`
    reports it; `skip` leaves the update out; `rewind` goes back to the last checkpoint before a
    spike of the loss, on a new branch, and leaves its sequences out."""
    max_rewinds: Count = setting(5, "10")
    """Times that `on_spike: rewind` may go back in the whole run; the next spike stops it."""
    hang_minutes: NotNegative | None = setting(None, "15")
    """Without progress of any rank for so long, the run explains the hang and stops with exit code
    6; validations may take three times as long, saves and the first steps an hour. Null: the time
    of 20 steps, at least 5 minutes; 0: never, as with `log.sample_seconds: 0`."""
    on_end: Annotated[str, matching(r"(?s:.*\S.*)", "expected a shell command")] | None = setting(
        None, "sudo shutdown -h +5"
    )
    """Shell command that each machine runs once, when the run has ended by itself (by its last
    step, a limit, or under `launch` a failure that is not restarted) and its mirror is complete; so
    it may shut the machine down. `REFOCUSED_RUN`, `_FOLDER`, `_EXIT_CODE`, `_STEP` and `_NODE` are
    set. A run that somebody stops does not run it. Logs, `run.yaml` and trackers do not show it."""

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps, self.tokens, self.epochs).count(None) != 2:
            raise ValueError("set one of steps, tokens and epochs")
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; of tokens they follow from the batch of the ranks."""
        if self.steps is None:
            raise ConfigError(f"{self.length}: the steps are not known here. Set run.steps.")
        return self.steps

    @property
    def length(self) -> str:
        """The setting of the length, as in `run.tokens = 600`."""
        if self.epochs is None:
            name = "steps" if self.tokens is None else "tokens"
            return f"run.{name} = {getattr(self, name)}"
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        return f"run.epochs = {self.epochs:g}{tokens}"

    @pydantic.field_serializer("steps")
    def _leave_out_steps_that_follow(self, steps: int | None) -> int | None:
        return steps if self.tokens is self.epochs is None else None

    @pydantic.field_serializer("tokens")
    def _leave_out_tokens_that_follow(self, tokens: int | None) -> int | None:
        return tokens if self.epochs is None else None

    @pydantic.field_serializer("on_end")
    def _hide_command(self, text: str | None) -> str | None:
        return None if text is None else HIDDEN


class RunConfig(Section):
    """All settings of a run."""

    run: RunSection
    model: ModelConfig
    batch: BatchConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    zero: ZeroSettings = ZeroSettings()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    log: LogConfig = LogConfig()
    tracking: TrackingConfig = TrackingConfig()
    cost: CostConfig = CostConfig()


FP8_MULTIPLE = 16  # of each side of a product of 8 bits, on every NVIDIA GPU that has them


class Misfit(NamedTuple):
    """A setting to change, as `section.key`, and why."""

    key: str
    message: str


def check_run(config: RunConfig) -> Iterator[Misfit]:
    """Yield the settings of a run that do not fit together."""
    steps, schedule, batch, data = config.run.steps, config.schedule, config.batch, config.data
    warmup, offload = schedule.warmup_steps, config.zero.offload_optimizer
    if steps is not None and warmup >= steps:
        message = f"the warmup must end before run.steps = {steps}. Lower it, or raise run.steps."
        yield Misfit("schedule.warmup_steps", message)
    if schedule.cycle_steps is not None and schedule.cycle_steps <= warmup:
        message = f"a cycle must be longer than schedule.warmup_steps = {warmup}."
        yield Misfit("schedule.cycle_steps", message)
    if steps is not None and (begin := schedule.decay_begins(steps)) < warmup:
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
    if config.run.epochs is not None and data.mixture:
        yield Misfit("run.epochs", "each source of a mixture has its own passes. Set run.tokens.")
    model, places = config.model, (offload, config.zero.offload_parameters)
    if model.start_from is not None and "nvme" in places:
        message = "weights cannot be loaded to an NVMe drive. Offload to cpu, or leave this out."
        yield Misfit("model.start_from", message)
    if config.run.replay_every is not None and "nvme" in places:
        message = "states on an NVMe drive cannot be compared. Offload to cpu, or leave this out."
        yield Misfit("run.replay_every", message)
    if model.resize_vocabulary and model.start_from is None:
        yield Misfit("model.resize_vocabulary", "needs model.start_from. Set it, too.")
    if config.optimizer.momentum_end is not None and schedule.kind in ("constant", "warm_restarts"):
        message = f"schedule.kind = {schedule.kind} has no decay in which it would be reached."
        yield Misfit("optimizer.momentum_end", f"{message} Set wsd, or leave this out.")
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
    for section in ("model", "optimizer") if shape.tied else ():
        for key, value in getattr(config, section):
            if key in ("head_std", "head_lr", "head_betas", "head_decay") and value is not None:
                other = f"{section}.{key.replace('head', 'embedding')}"
                message = (
                    f"{preset} ties its head to the embedding. Set {other}, or leave this out."
                )
                yield Misfit(f"{section}.{key}", message)
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
