"""What one step measured, as a record and as a line for a person."""

from __future__ import annotations

import dataclasses
import math

# The line shows the wait for batches and the memory only where they ask for attention.
LEAST_WAIT, LEAST_MEMORY = 0.01, 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """The measurements at one optimizer step; None is unknown.

    Attributes:
        step: Optimizer steps made.
        total_steps: Steps of the whole run.
        tokens: Tokens trained on since the run's first start.
        epoch: Passes over the data begun before this one.
        loss: Mean over accumulation and ranks of this step's loss, in nats a token.
        loss_mean: Mean of the losses of this session's steps since the last line.
        best_loss: Lowest validation loss so far.
        learning_rate: Of this step's update.
        gradient_norm: Of the whole gradient before clipping.
        loss_scale: fp16's.
        skipped_steps: Updates that fp16 left out.
        step_seconds: Mean of the steps since the last line, without validations and saves.
        tokens_per_second: Over all ranks, by all the time since the last line, validations and
            saves included.
        mfu_fraction: Share of the GPUs' dense peak that the model's FLOPs take in steps.
        data_wait_fraction: Share of the time since the last line spent waiting for batches.
        gpu_memory_fraction: Peak share of the GPU's memory.
        seconds_left: Until the run ends, with validations, saves and the final model.
        seconds_trained: Of all sessions since the run's first start, from each one's begin.
        cost_usd: Of that time.
        cost_left_usd: Of the time left.
        mfu_refused: More came out than any run reaches, so that something it is computed from is
            wrong; the figure is left out.
    """

    step: int
    total_steps: int
    tokens: int
    epoch: int
    loss: float
    loss_mean: float
    best_loss: float | None
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    skipped_steps: int
    step_seconds: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    data_wait_fraction: float | None
    gpu_memory_fraction: float | None
    seconds_left: float | None
    seconds_trained: float
    cost_usd: float | None
    cost_left_usd: float | None
    mfu_refused: bool = False

    def as_record(self) -> dict[str, object]:
        """Return the fields under their own names, for JSON."""
        return dataclasses.asdict(self)

    def as_line(self) -> str:
        """Return the line a person follows."""
        parts = [
            f"step {self.step:>7,}/{self.total_steps:,} {self.step / self.total_steps:.1%}",
            self._losses(),
            f"lr {self.learning_rate:.2e}".replace("e-0", "e-"),
        ]
        if self.gradient_norm is not None:
            parts.append(f"gnorm {self.gradient_norm:.2f}")
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:.0f} ({self.skipped_steps} skipped)")
        if self.step_seconds is not None and self.tokens_per_second is not None:
            parts.append(f"{self.step_seconds:.3g} s {self.tokens_per_second:,.0f} tok/s")
        if self.mfu_fraction is not None:
            parts.append(f"MFU {self.mfu_fraction:.1%}")
        elif self.mfu_refused:
            parts.append("MFU ?")
        if self.data_wait_fraction is not None and self.data_wait_fraction >= LEAST_WAIT:
            parts.append(f"data {self.data_wait_fraction:.1%}")
        if self.gpu_memory_fraction is not None and self.gpu_memory_fraction >= LEAST_MEMORY:
            parts.append(f"mem {self.gpu_memory_fraction:.0%}")
        money = [] if self.cost_usd is None else [f"spent{dollars(self.cost_usd)}"]
        if self.seconds_left is not None:
            money.append(f"left {duration(self.seconds_left)}{dollars(self.cost_left_usd)}")
        return " | ".join([*parts, *([", ".join(money)] if money else [])])

    def _losses(self) -> str:
        mean = "" if self.loss_mean == self.loss else f" mean {self.loss_mean:.4f}"
        best = "" if self.best_loss is None else f" best val {self.best_loss:.4f}"
        return f"loss {self.loss:.4f}{mean}{best}"


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def duration(seconds: float) -> str:
    """Return a time span as a person says it: 48 s, 12.5 min, 23.6 h; 0.04 s."""
    if seconds < 0.995:
        return f"{round(seconds, 2):g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def dollars(cost_usd: float | None, *, before: str = " ") -> str:
    """Spell an amount behind a time; nothing where it is unknown."""
    return "" if cost_usd is None else f"{before}${cost_usd:,.2f}"
