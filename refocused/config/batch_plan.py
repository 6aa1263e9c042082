"""The batch of a step from micro-batch, accumulation and ranks."""

import bisect
import dataclasses

from refocused.config.optimization import BatchConfig
from refocused.system.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch of one optimizer step."""

    micro: int  # windows of one pass on one rank, or on the ranks that share them
    accumulation: int  # passes of one step
    world_size: int
    sequence_length: int  # tokens a window trains on
    warmup_steps: int = 0  # the steps before this one make fewer passes
    sequence_parallel: int = 1  # neighbouring ranks that share the tokens of their windows

    @property
    def shares(self) -> int:
        """Groups of ranks with windows of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def windows(self) -> int:
        """Windows of one step over all ranks, after the warm-up: the global batch."""
        return self.micro * self.accumulation * self.shares

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks, after the warm-up."""
        return self.windows * self.sequence_length

    def passes(self, step: int) -> int:
        """Return the passes of the step that follows `step` steps: from 1 to all of them."""
        if step >= self.warmup_steps:
            return self.accumulation
        return 1 + (self.accumulation - 1) * step // self.warmup_steps

    def windows_between(self, first: int, last: int) -> int:
        """Return the windows of the steps after step `first`, up to `last`, over all ranks."""
        grown = max(first, min(self.warmup_steps, last))
        passes = sum(map(self.passes, range(first, grown))) + (last - grown) * self.accumulation
        return passes * self.micro * self.shares

    def step_of(self, window: int) -> int:
        """Return the number, from 1, of the step that takes a window of the stream."""
        steps = range(window + 1)
        return bisect.bisect_right(steps, window, key=lambda n: self.windows_between(0, n))


def plan_batch(
    batch: BatchConfig, *, world_size: int, sequence_length: int, sequence_parallel: int = 1
) -> BatchPlan:
    """Compute the accumulation for a number of ranks.

    Raises:
        ConfigError: The ranks cannot divide `batch.windows` or form groups of `sequence_parallel`,
            or `batch.micro` is `auto`.
    """
    shares, rest = divmod(world_size, sequence_parallel)
    if rest:
        raise ConfigError(
            f"model.sequence_parallel={sequence_parallel}: {world_size} ranks are no multiple of "
            "it. Start another number of ranks, or change it."
        )
    micro, accumulation = batch.micro, batch.accumulation
    if micro == "auto":
        raise ConfigError("batch.micro=auto is chosen on the GPUs that train. Give a number here.")
    if accumulation is None:
        assert batch.windows is not None  # BatchConfig gives one of the two
        accumulation, rest = divmod(batch.windows, micro * shares)
        if rest or not accumulation:
            raise ConfigError(
                f"batch.windows={batch.windows} is not a multiple of batch.micro={micro} x "
                f"{shares} {'ranks' if sequence_parallel == 1 else 'groups of ranks'}. Set "
                f"batch.windows to a multiple of {micro * shares}, or another batch.micro."
            )
    if batch.warmup_steps and accumulation == 1:
        raise ConfigError(
            f"batch.warmup_steps={batch.warmup_steps}: a step has one pass and cannot have fewer. "
            "Lower batch.micro, or leave this out."
        )
    return BatchPlan(
        micro, accumulation, world_size, sequence_length, batch.warmup_steps or 0, sequence_parallel
    )


def times_left(step: int, total_steps: int, interval: int) -> int:
    """Count how often something with an interval is due after a step, including the last step.

    With an interval of 0 it is due only after the last step.
    """
    if step >= total_steps:
        return 0
    between = (total_steps - 1) // interval - step // interval if interval else 0
    return max(0, between) + 1
