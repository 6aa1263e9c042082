"""What a number of tokens is good for: model size, steps, saves, hours and dollars (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from refocused.config.outputs import CheckpointConfig, EvaluationConfig
from refocused.config.shape import ModelShape
from refocused.errors import ConfigError
from refocused.estimate.run_cost import Machine, run_cost, work_of
from refocused.estimate.storage import checkpoint_bytes
from refocused.estimate.work import count_parameters, flops_per_token, tokens_per_second_at

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022 (Chinchilla), table 3: about 20
MOST_EPOCHS = 4.0  # Muennighoff et al. 2023: up to four passes are nearly as good as new data
SAVE_HOURS = 0.5
FEWEST_SAVES = 5
WARMUP_SHARE = 0.02
LONGEST_WARMUP = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Recommendation:
    """A run that fits the data.

    Attributes:
        data_tokens: Tokens there are.
        ideal_parameters: Parameters at 20 tokens each.
        preset: Name of the model.
        parameters: Of it.
        tokens_per_parameter: Trained tokens for each parameter.
        epochs: Passes over the data.
        steps: Optimizer steps.
        step_tokens: Tokens of a step.
        warmup_steps: Of the learning rate.
        save_interval: Steps between checkpoints: about half an hour of work.
        tokens_per_second: Of the whole machine, at the assumed share of its peak.
        hours: Of the whole machine, with validations, saves and start-up.
        cost_usd: None when the price is unknown.
        notes: What speaks against it.
    """

    data_tokens: int
    ideal_parameters: int
    preset: str
    parameters: int
    tokens_per_parameter: float
    epochs: float
    steps: int
    step_tokens: int
    warmup_steps: int
    save_interval: int
    tokens_per_second: float
    hours: float
    cost_usd: float | None
    notes: tuple[str, ...]


def recommend(
    data_tokens: int,
    *,
    shapes: Mapping[str, ModelShape],
    preset: str | None,
    epochs: float | None,
    step_tokens: int,
    sequence_length: int,
    machine: Machine,
) -> Recommendation:
    """Choose a model and a run for a number of tokens.

    Args:
        data_tokens: Tokens there are.
        shapes: The models to choose from, by name.
        preset: The one that is wanted; None: the nearest to 20 tokens a parameter.
        epochs: Passes; None: one, or with `preset` as many as give 20 tokens a parameter.
        step_tokens: Tokens of an optimizer step.
        sequence_length: Of a window.
        machine: What the run is to be done with.

    Raises:
        ConfigError: The data are less than one step, or the assumed speed cannot be.
    """
    sizes = {name: count_parameters(shape).total for name, shape in shapes.items()}
    wanted = data_tokens * (epochs or 1.0) / TOKENS_PER_PARAMETER
    name = preset or min(sizes, key=lambda one: abs(math.log(sizes[one] / wanted)))
    if epochs is None:
        ideal = sizes[name] * TOKENS_PER_PARAMETER / data_tokens
        epochs = 1.0 if preset is None else ideal
    trained = data_tokens * epochs
    steps = int(trained // step_tokens)
    if not steps:
        raise ConfigError(
            f"{trained:,.0f} tokens are less than one step of {step_tokens:,}. Name fewer "
            "--step-tokens, or more data."
        )
    flops = flops_per_token(shapes[name], sequence_length=sequence_length)
    speed = tokens_per_second_at(
        machine.mfu_fraction,
        flops_per_token=flops,
        gpus=machine.gpus,
        peak_flops=machine.peak_flops,
    )
    interval = save_interval(steps, steps_per_hour=3600 * speed / step_tokens)
    work = work_of(
        steps=steps,
        step_tokens=step_tokens,
        sequence_length=sequence_length,
        flops_per_token=flops,
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(interval=interval),
        save_bytes=checkpoint_bytes(sizes[name], stage=3, dtype="bf16"),
    )
    cost = run_cost(work, machine)
    return Recommendation(
        data_tokens=data_tokens,
        ideal_parameters=round(wanted),
        preset=name,
        parameters=sizes[name],
        tokens_per_parameter=trained / sizes[name],
        epochs=epochs,
        steps=steps,
        step_tokens=step_tokens,
        warmup_steps=min(LONGEST_WARMUP, math.ceil(WARMUP_SHARE * steps)),
        save_interval=interval,
        tokens_per_second=cost.tokens_per_second,
        hours=cost.hours,
        cost_usd=cost.cost_usd,
        notes=tuple(_notes(trained / sizes[name], epochs)),
    )


def save_interval(steps: int, *, steps_per_hour: float) -> int:
    """Return the steps of about half an hour, round, and few enough for five saves a run."""
    most = max(1.0, min(SAVE_HOURS * steps_per_hour, steps / FEWEST_SAVES))
    unit = 10 ** math.floor(math.log10(most))
    return int(next(factor for factor in (5, 2, 1) if factor * unit <= most) * unit)


def _notes(tokens_per_parameter: float, epochs: float) -> list[str]:
    notes = []
    if epochs > MOST_EPOCHS:
        notes.append(
            f"{epochs:.1f} passes: beyond {MOST_EPOCHS:.0f}, repeated data teach less and less. "
            "Take a smaller model, or more data."
        )
    if tokens_per_parameter < TOKENS_PER_PARAMETER / 2:
        notes.append(
            f"{tokens_per_parameter:.1f} tokens a parameter: the model is large for the data; a "
            "smaller one would be as good for less."
        )
    return notes
