"""The whole of one run file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pydantic

from refocused.config.data import DataConfig
from refocused.config.model import ModelConfig
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
from refocused.config.section import Count, CountOrZero, Positive, Section


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
