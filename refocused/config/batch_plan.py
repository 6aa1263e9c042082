"""The batch of a step from micro-batch, accumulation and ranks."""

import dataclasses

from refocused.config.optimization import BatchConfig
from refocused.system.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch of one optimizer step."""

    micro: int  # windows of one pass on one rank
    accumulation: int  # passes of one step
    world_size: int
    sequence_length: int  # tokens a window trains on

    @property
    def windows(self) -> int:
        """Windows of one step over all ranks: the global batch."""
        return self.micro * self.accumulation * self.world_size

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.windows * self.sequence_length


def plan_batch(batch: BatchConfig, *, world_size: int, sequence_length: int) -> BatchPlan:
    """Compute the accumulation for a number of ranks.

    Raises:
        ConfigError: The ranks cannot divide `batch.windows`, or `batch.micro` is `auto`.
    """
    micro, accumulation = batch.micro, batch.accumulation
    if micro == "auto":
        raise ConfigError("batch.micro=auto is chosen on the GPUs that train. Give a number here.")
    if accumulation is None:
        assert batch.windows is not None  # BatchConfig gives one of the two
        accumulation, rest = divmod(batch.windows, micro * world_size)
        if rest or not accumulation:
            raise ConfigError(
                f"batch.windows={batch.windows} is not a multiple of batch.micro={micro} x "
                f"{world_size} ranks. Set batch.windows to a multiple of "
                f"{micro * world_size}, or another batch.micro."
            )
    return BatchPlan(micro, accumulation, world_size, sequence_length)


def times_left(step: int, total_steps: int, interval: int) -> int:
    """Count how often something with an interval is due after a step, including the last step.

    With an interval of 0 it is due only after the last step.
    """
    if step >= total_steps:
        return 0
    between = (total_steps - 1) // interval - step // interval if interval else 0
    return max(0, between) + 1
