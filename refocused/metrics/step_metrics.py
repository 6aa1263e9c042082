"""Measurements of one step, as a record and as a log line."""

import dataclasses
import math

from refocused.metrics.rank_times import SlowestRank

# The log line shows the wait for batches and the memory only from these values on.
LEAST_WAIT, LEAST_MEMORY = 0.01, 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """The measurements at one optimizer step; None is unknown. Losses are in nats a token."""

    step: int  # optimizer steps made
    total_steps: int  # of the whole run
    tokens: int  # trained on since the run's first start
    epoch: int  # passes over the data begun before this one
    loss: float  # of this step, mean over accumulation and ranks
    loss_mean: float  # of this session's steps since the last line
    best_loss: float | None  # lowest validation loss so far
    learning_rate: float  # of this step's update
    gradient_norm: float | None  # of the whole gradient before clipping
    loss_scale: float | None  # fp16's
    skipped_steps: int  # updates that fp16 left out
    step_seconds: float | None  # mean since the last line, without validations and saves
    tokens_per_second: float | None  # of all ranks and all the time since the last line
    mfu_fraction: float | None  # share of the GPUs' dense peak that the model's FLOPs take
    data_wait_fraction: float | None  # of the time since the last line, waiting for batches
    gpu_memory_fraction: float | None  # peak share of the GPU's memory
    seconds_left: float | None  # with validations, saves and the final model
    seconds_trained: float  # of all sessions since the run's first start
    cost_usd: float | None  # of that time
    cost_left_usd: float | None  # of the time left
    stream_sequences: int | None = None  # of the stream up to here, with those of `data.skip`
    goodput_fraction: float | None = None  # of the time since the first start, in steps that count
    mfu_refused: bool = False  # the MFU is impossibly high, and therefore not shown
    slowest: SlowestRank | None = None  # the rank that works longest in a step

    def as_record(self) -> dict[str, object]:
        """Return the fields under their own names, for JSON."""
        return dataclasses.asdict(self)

    def as_line(self) -> str:
        """Return the log line."""
        mean = "" if self.loss_mean == self.loss else f" mean {self.loss_mean:.4f}"
        best = "" if self.best_loss is None else f" best val {self.best_loss:.4f}"
        parts = [
            f"step {self.step:>7,}/{self.total_steps:,} {self.step / self.total_steps:.1%}",
            f"loss {self.loss:.4f}{mean}{best}",
            f"lr {self.learning_rate:.2e}".replace("e-0", "e-"),
        ]
        if self.gradient_norm is not None:
            parts.append(f"gnorm {self.gradient_norm:.2f}")
        if self.loss_scale is not None:
            counted = "; their steps and tokens count" * (self.skipped_steps > 0)
            parts.append(f"scale {self.loss_scale:.0f} ({self.skipped_steps} skipped{counted})")
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
        if self.slowest is not None and self.slowest.is_slow:
            slow = self.slowest
            parts.append(f"{slow.place} slow +{slow.excess_fraction:.0%} ({slow.phase})")
        money = [] if self.cost_usd is None else [f"spent{dollars(self.cost_usd)}"]
        if self.seconds_left is not None:
            money.append(f"left {duration(self.seconds_left)}{dollars(self.cost_left_usd)}")
        return " | ".join([*parts, *([", ".join(money)] if money else [])])


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def duration(seconds: float) -> str:
    """Format a time span: 0.04 s, 48 s, 12.5 min, 23.6 h."""
    if seconds < 0.995:
        return f"{round(seconds, 2):g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def dollars(cost_usd: float | None, *, before: str = " ") -> str:
    """Format an amount that follows a time; nothing where it is unknown."""
    return "" if cost_usd is None else f"{before}${cost_usd:,.2f}"
