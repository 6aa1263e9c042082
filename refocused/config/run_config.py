"""The whole of one run file."""

from typing import Annotated, Literal

import pydantic

from refocused.config.data import DataConfig
from refocused.config.optimization import (
    BatchConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    ZeroSettings,
)
from refocused.config.outputs import (
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
    new rows, initialized as in an untrained model."""
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
    steps: Count = pydantic.Field(examples=["20000"])
    """Optimizer steps of the whole run."""
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
