"""The batch of a step from micro-batch, accumulation and ranks."""

import bisect
import dataclasses
import functools

from refocused.config.optimization import BatchConfig
from refocused.system.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch of one optimizer step."""

    micro_batch_size: int  # sequences of a micro-batch on a rank, or on the ranks that share them
    gradient_accumulation_steps: int  # micro-batches of one step
    world_size: int
    sequence_length: int  # tokens a sequence trains on
    warmup_steps: int = 0  # the steps before this one make fewer micro-batches
    sequence_parallel: int = 1  # neighbouring ranks that share the tokens of their sequences

    @property
    def shares(self) -> int:
        """Groups of ranks with sequences of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step over all ranks, after the warm-up."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.shares

    @property
    def text(self) -> str:
        """The sizes of a step on one rank, as in `8 x 2048 x 4`."""
        return (
            f"{self.micro_batch_size} x {self.sequence_length} x {self.gradient_accumulation_steps}"
        )

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks, after the warm-up."""
        return self.global_batch_size * self.sequence_length

    def micro_batches(self, step: int) -> int:
        """Return the micro-batches of the step that follows `step` steps: from 1 to all of them."""
        if step >= self.warmup_steps:
            return self.gradient_accumulation_steps
        return 1 + (self.gradient_accumulation_steps - 1) * step // self.warmup_steps

    def sequences_between(self, first: int, last: int) -> int:
        """Return the sequences of the steps after step `first`, up to `last`, over all ranks."""
        grown = max(first, min(self.warmup_steps, last))
        micro_batches = (
            sum(map(self.micro_batches, range(first, grown)))
            + (last - grown) * self.gradient_accumulation_steps
        )
        return micro_batches * self.micro_batch_size * self.shares

    def steps_for(self, tokens: int, *, made: int = 0) -> int:
        """Return the steps of a run that trains on so many tokens after `made` ones, rounded up."""
        sequences = max(0, -(-tokens // self.sequence_length))
        steps = range(made, made + sequences + 1)
        key = functools.partial(self.sequences_between, made)
        return made + bisect.bisect_left(steps, sequences, key=key)

    def step_of(self, sequence: int) -> int:
        """Return the number, from 1, of the step that takes a sequence of the stream."""
        steps = range(sequence + 1)
        return bisect.bisect_right(steps, sequence, key=lambda n: self.sequences_between(0, n))


def plan_batch(
    batch: BatchConfig, *, world_size: int, sequence_length: int, sequence_parallel: int = 1
) -> BatchPlan:
    """Compute the accumulation for a number of ranks.

    Raises:
        ConfigError: The ranks cannot divide `batch.global_batch_size` or form groups of
            `sequence_parallel`, or `batch.micro_batch_size` is `auto`.
    """
    shares, rest = divmod(world_size, sequence_parallel)
    if rest:
        raise ConfigError(
            f"model.sequence_parallel={sequence_parallel}: {world_size} ranks are no multiple of "
            "it. Start another number of ranks, or change it."
        )
    micro_batch_size, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
    if micro_batch_size == "auto":
        raise ConfigError(
            "batch.micro_batch_size=auto is chosen on the GPUs that train. Give a number here."
        )
    if accumulation is None:
        assert batch.global_batch_size is not None  # BatchConfig gives one of the two
        accumulation, rest = divmod(batch.global_batch_size, micro_batch_size * shares)
        if rest or not accumulation:
            raise ConfigError(
                f"batch.global_batch_size={batch.global_batch_size} is not a multiple of "
                f"batch.micro_batch_size={micro_batch_size} x {shares} "
                f"{'ranks' if sequence_parallel == 1 else 'groups of ranks'}. Set it to a multiple "
                f"of {micro_batch_size * shares}, or change batch.micro_batch_size."
            )
    if batch.warmup_steps and accumulation == 1:
        raise ConfigError(
            f"batch.warmup_steps={batch.warmup_steps}: a step has only one micro-batch. "
            "Lower batch.micro_batch_size, or leave this out."
        )
    sizes = (micro_batch_size, accumulation, world_size, sequence_length)
    return BatchPlan(*sizes, batch.warmup_steps or 0, sequence_parallel)
