"""The whole of one run file."""

from __future__ import annotations

import re
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
from refocused.config.section import Count, CountOrAuto, CountOrZero, Fraction, Positive, Section


class ModelConfig(Section):
    """The model of a run.

    Attributes:
        preset: Name of a shape in `config/models/NAME.json` (the transformers config form), or a
            path to such a file.
        vocabulary: Token ids the model knows: a number; `auto`, as many as `data.tokenizer` has,
            else as the data's `manifest.json` says, else as the shape; None, as the shape.
        sequence_length: Tokens a window trains on; at most what the shape allows.
        dropout: Probability at every dropout of the model; 0 in pre-training by default.
        vocabulary_multiple: The embedding's rows are padded up to a multiple of this; matrix
            units want 64 or 128. The padding is never a label.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its
            activations: about 30 % more time for about 80 % less activation memory.
        compile: `auto` compiles the blocks on GPUs, `on` on CPUs too, where it stops without a C++
            compiler; `off` runs them as written. If torch's compiler fails, a warning says why and
            they run as written. The batches of training and validation use it.
        attention: Kernel of attention: `auto` is the fastest of a timed trial on GPUs, and
            FlexAttention for masked documents; `flash`, which has no masks, is FlashAttention-3
            where it is installed and the GPU is a Hopper.
        head: How the loss is computed: `chunked` by torch's operations, `fused` by torch's own
            form, `kernel` by our Triton kernel; `auto` is the fastest of a timed trial on GPUs.
        head_chunk_tokens: Tokens whose logits exist at once in the loss.
    """

    preset: str
    vocabulary: CountOrAuto | None = None
    sequence_length: Count
    dropout: Fraction = 0.0
    vocabulary_multiple: Count = 128
    activation_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    head: Literal["auto", "chunked", "fused", "kernel"] = "auto"
    head_chunk_tokens: Count = 2048


def _safe_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("a run's name is letters, digits, '.', '_' and '-', at most 100")
    return value


class RunSection(Section):
    """The run itself.

    Attributes:
        name: The run's folder below `directory`; the run file's own name when not given.
        directory: Folder of all runs, on a disk that all machines share or on each one's own.
        steps: Optimizer steps of the whole run.
        seed: Seed of the initial weights, the dropout and the order of the data.
        device: `cuda` refuses to start without GPUs; `auto` takes them when there are any, and else
            trains small models on the CPU; `cpu` trains any model there.
        deterministic: Use only GPU kernels whose results do not depend on timing: the same run then
            gives the same bits on the same GPUs, at some cost in speed.
        time_limit_hours: Of one session, from the command's start: then the run is saved and
            stops, with exit code 4; None: no limit.
    """

    name: Annotated[str, pydantic.AfterValidator(_safe_name)]
    directory: str = "runs"
    steps: Count
    seed: CountOrZero = 1337
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deterministic: bool = False
    time_limit_hours: Positive | None = None


class RunConfig(Section):
    """Everything a run may say; only what builds or examines a run reads it whole."""

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
