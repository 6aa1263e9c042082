"""The whole of one run file."""

from __future__ import annotations

from typing import Annotated, Literal

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
    Fraction,
    Positive,
    Section,
    matching,
)


class ModelConfig(Section):
    """The model of a run."""

    preset: str
    """A shape in `config/models/NAME.json` (transformers' configuration), or the path of one."""
    vocabulary: CountOrAuto | None = None
    """Token ids of the model; `auto`: as many as `data.tokenizer` has, else the data's manifest,
    else the preset; null: those of the preset."""
    sequence_length: Count
    """Tokens a window trains on; at most what the shape allows."""
    dropout: Fraction = 0.0
    """Probability at every dropout of the model."""
    vocabulary_multiple: Count = 128
    """The embedding's rows are padded to a multiple of this, because matrix units want 64 or 128.
    The padding is never a label."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations: about 30 % more
    time for about 80 % less activation memory."""
    compile: Literal["auto", "on", "off"] = "auto"
    """`auto` compiles the blocks on GPUs; `on` also on CPUs, where it needs a C++ compiler; `off`
    runs them as written, and so does a failure of torch's compiler, with a warning."""
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    """Attention kernel. `auto` times them on GPUs, and takes FlexAttention for masked documents;
    `flash`, which has no masks, is FlashAttention-3 on Hopper GPUs where it is installed."""
    head: Literal["auto", "chunked", "fused", "kernel"] = "auto"
    """Form of the loss: `chunked` by torch's operations, `fused` by torch's own form, `kernel` by
    our Triton kernel; `auto` times them on GPUs."""
    head_chunk_tokens: Count = 2048
    """Tokens whose logits exist at once in the loss."""


class RunSection(Section):
    """The run itself."""

    name: Annotated[
        str,
        matching(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
            "a run's name is letters, digits, '.', '_' and '-', at most 100",
        ),
    ]
    """Folder of the run below `directory`; by default the run file's own name."""
    directory: str = "runs"
    """Folder of all runs, on a disk that all machines share or on each machine's own."""
    steps: Count
    """Optimizer steps of the whole run."""
    seed: CountOrZero = 1337
    """Seed of the initial weights, the dropout and the order of the data."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` refuses to start without GPUs; `auto` takes GPUs, and trains small models on the CPU
    without them; `cpu` trains any model there."""
    deterministic: bool = False
    """Only GPU kernels whose results do not depend on timing: the same run gives the same bits on
    the same GPUs, at some cost in speed."""
    time_limit_hours: Positive | None = None
    """Limit of one session; then the run is saved and stops with exit code 4."""


class RunConfig(Section):
    """All settings of a run; only code that builds or examines a run reads it whole."""

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
