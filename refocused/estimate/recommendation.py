"""Recommend model, batch, learning rate, steps and saves for a number of sequences (pure)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import Attention, ModelShape
from refocused.config.optimization import BatchConfig, OptimizerConfig, PrecisionConfig
from refocused.config.outputs import CheckpointConfig, EvaluationConfig
from refocused.config.run_config import ModelConfig, RunConfig, RunSection
from refocused.estimate.flops import count_parameters
from refocused.estimate.memory_plan import choose
from refocused.estimate.run_cost import estimate_on, run_cost
from refocused.system.errors import ConfigError, counted
from refocused.system.hardware import GpuSpec

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022 (Chinchilla), table 3: about 20
MOST_EPOCHS = 4.0  # Muennighoff et al. 2023: up to four passes are nearly as good as new data
LONGEST_SEQUENCE = 2048  # by default
SHORTEST_CONTEXT = 256  # models with less are for tests
STEP_TOKENS = 2**20
FEWEST_STEPS = 1000  # shrink the step rather than have fewer steps
SAVE_HOURS = 0.5
FEWEST_SAVES = 5
WARMUP_SHARE = 0.02
LONGEST_WARMUP = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Recommendation:
    """A run that fits the data."""

    data_tokens: int  # to train on, in whole sequences
    ideal_parameters: int  # at 20 tokens each
    preset: str
    parameters: int
    sequence_length: int
    tokens_per_parameter: float
    epochs: float
    steps: int
    step_sequences: int  # over all GPUs
    step_tokens: int
    learning_rate: float  # at its peak
    warmup_steps: int
    save_interval: int  # steps: about half an hour of work
    recomputes: bool  # it fits only with activation checkpointing
    mfu_fraction: float  # expected or given
    tokens_per_second: float  # of the whole machine
    hours: float  # of the whole machine, with validations, saves and start-up
    cost_usd: float | None
    notes: tuple[str, ...]  # warnings


def choose_model(
    tokens: float, shapes: Mapping[str, ModelShape], *, sequence_length: int | None
) -> str:
    """Return the model with attention and a sufficient context nearest to 20 tokens a parameter.

    `tokens` counts all epochs.

    Raises:
        ConfigError: No model has such a context.
    """
    least = sequence_length or SHORTEST_CONTEXT
    sizes = {
        name: count_parameters(shape).total
        for name, shape in shapes.items()
        if isinstance(shape.mixer, Attention) and shape.max_length >= least
    }
    if not sizes:
        raise ConfigError(
            f"--sequence-length {least}: no model with attention has such a context. Use a shorter "
            "sequence, or a --preset without attention."
        )
    best = tokens / TOKENS_PER_PARAMETER
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / best)))


def recommend(
    sequences: int,
    *,
    preset: str,
    shape: ModelShape,
    epochs: float | None,
    step_tokens: int | None,
    sequence_length: int,
    gpus: int,
    gpu: GpuSpec,
    mfu: float | None,
    per_hour_usd: float | None,
) -> Recommendation:
    """Plan a run of a model.

    Args:
        sequences: Sequences of one epoch.
        epochs: None: as many as give 20 tokens a parameter.
        step_tokens: Most tokens of a step; None: 2^20, or less for at least 1,000 steps.
        mfu: Share of the peak; None: the expected one.

    Raises:
        ConfigError: The data are less than one step, nothing fits, or `mfu` is not credible.
    """
    if not sequences:
        raise ConfigError(
            f"The data have no whole sequence of {sequence_length:,} tokens to train on. Use a "
            "shorter --sequence-length or more data."
        )
    count = count_parameters(shape)
    data_tokens = sequences * sequence_length
    passes = epochs or count.total * TOKENS_PER_PARAMETER / data_tokens
    trained = int(sequences * passes)
    if step_tokens is not None:
        step_sequences = gpus * max(1, step_tokens // (sequence_length * gpus))
    else:  # a power of two for each GPU
        most = min(STEP_TOKENS // sequence_length, trained // FEWEST_STEPS)
        step_sequences = gpus << max(0, (most // gpus).bit_length() - 1)
    if trained < step_sequences:
        raise ConfigError(
            f"{counted(trained, 'sequence')} of {sequence_length:,} tokens are less than one step "
            f"of {counted(step_sequences, 'sequence')} on {counted(gpus, 'GPU')}. "
            "Use fewer --gpus or --step-tokens, a shorter --sequence-length, or more data."
        )
    steps, rate = trained // step_sequences, learning_rate(count.without_embeddings)
    config = RunConfig(
        run=RunSection(name="recommended", steps=steps),
        model=ModelConfig(preset=preset, sequence_length=sequence_length),
        batch=BatchConfig(micro_batch_size="auto", global_batch_size=step_sequences),
        data=DataConfig(source="any"),
        optimizer=OptimizerConfig(lr=rate),
        precision=PrecisionConfig(dtype="bf16"),
    )
    reason = ""
    for recomputes in (False, True):  # activation checkpointing only if it does not fit without
        model = config.model.model_copy(update={"activation_checkpointing": recomputes})
        loaded = LoadedRun(config.model_copy(update={"model": model}), shape, {}, [], Path())
        try:
            choice = choose(loaded, ranks=gpus, memory_bytes=gpu.memory_gib * 2**30)
            break
        except ConfigError as error:
            reason = str(error)
    else:
        raise ConfigError(f"{reason} Or use a smaller --preset or more --gpus.")
    on = estimate_on(loaded, choice, gpus=gpus, gpu=gpu, per_hour_usd=per_hour_usd, mfu=mfu)
    interval = save_interval(steps, steps_per_hour=3600 / on.step.seconds)
    intervals = {
        "checkpoint": CheckpointConfig(interval=interval),
        "evaluation": EvaluationConfig(interval=interval),
    }
    work = dataclasses.replace(on.work, config=loaded.config.model_copy(update=intervals))
    cost = run_cost(work, on.step, gpus=gpus, per_hour_usd=per_hour_usd)
    tokens_per_parameter = trained * sequence_length / count.total
    return Recommendation(
        data_tokens=data_tokens,
        ideal_parameters=round(data_tokens * (epochs or 1.0) / TOKENS_PER_PARAMETER),
        preset=preset,
        parameters=count.total,
        sequence_length=sequence_length,
        tokens_per_parameter=tokens_per_parameter,
        epochs=passes,
        steps=steps,
        step_sequences=step_sequences,
        step_tokens=on.plan.tokens,
        learning_rate=rate,
        warmup_steps=min(LONGEST_WARMUP, math.ceil(WARMUP_SHARE * steps), steps - 1),
        save_interval=interval,
        recomputes=recomputes,
        mfu_fraction=on.step.mfu_fraction,
        tokens_per_second=cost.tokens_per_second,
        hours=cost.hours,
        cost_usd=cost.cost_usd,
        notes=tuple(_notes(tokens_per_parameter, passes)),
    )


def learning_rate(parameters: int) -> float:
    """Return a peak rate for AdamW, rounded to one digit (Kaplan et al. 2020, equation D.1).

    `parameters` excludes embeddings.
    """
    return float(f"{max(1e-4, 0.003239 - 0.0001395 * math.log(parameters)):.0e}")


def save_interval(steps: int, *, steps_per_hour: float) -> int:
    """Return a round number of steps in half an hour, few enough for five saves a run."""
    most = max(1.0, min(SAVE_HOURS * steps_per_hour, steps / FEWEST_SAVES))
    unit = 10 ** math.floor(math.log10(most))
    return int(next(factor for factor in (5, 2, 1) if factor * unit <= most) * unit)


def _notes(tokens_per_parameter: float, epochs: float) -> Iterator[str]:
    if epochs > MOST_EPOCHS:
        passes = f"{epochs:.1f} epochs: beyond {MOST_EPOCHS:.0f}, repeated data add less and less"
        yield f"{passes}. Use a smaller model or more data."
    if tokens_per_parameter < TOKENS_PER_PARAMETER / 2:
        large = f"{tokens_per_parameter:.1f} tokens a parameter: the model is large for the data"
        yield f"{large}; a smaller one would be as good and cost less."
