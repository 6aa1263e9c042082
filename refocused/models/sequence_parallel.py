"""Divide the tokens of each sequence among ranks; attention sees whole sequences of some heads."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The N ranks that share the tokens of their sequences, each a slice, in the order of ranks.

    Attention exchanges tokens for heads before it and back after it (Jacobs et al. 2023, DeepSpeed
    Ulysses): a rank then has all tokens `T` of `H / N` heads. A recurrence continues from the
    states of the ranks before, whose size does not depend on T. To ZeRO the ranks are ordinary
    ones, whose mean gradient is that of the mean loss.
    """

    ranks: int
    index: int  # of this rank's slice
    name: Any  # of the process group

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's slice `[B, T / N, ...]` of `[B, T, ...]`."""
        return tokens.chunk(self.ranks, dim=1)[self.index]

    def label_share(self, labels: Tensor) -> Tensor:
        """Return N times the share of the labels `[B, T]` that count and are in this rank's slice.

        A slice's mean loss times this, averaged over the ranks, is the mean loss of the sequences.
        """
        counted = (labels != IGNORED_LABEL).sum(dim=0)
        return self.ranks * self.own(counted[None]).sum() / counted.sum().clamp(min=1)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over the ranks, without a gradient."""
        collectives = _collectives()
        total: Tensor = collectives.wait_tensor(collectives.all_reduce(value, "sum", self.name))
        return total / self.ranks

    def heads_of_all_tokens(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices of all heads, `[B, H, T / N, E]` each, for `[B, H / N, T, E]`."""
        states, sizes = (query, key, value), []
        parts = []
        for one in states:
            rows, heads, tokens, width = one.shape
            sizes.append(heads // self.ranks)
            parts.append(one.reshape(rows, self.ranks, sizes[-1], tokens, width))
        received = self._exchange(torch.cat(parts, dim=2).movedim(1, 0))
        whole = received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # ranks and their tokens: T
        query, key, value = torch.split(whole, sizes, dim=1)
        return query, key, value

    def tokens_of_all_heads(self, output: Tensor) -> Tensor:
        """Exchange `[B, T, H / N, E]` for this rank's slice of all heads, `[B, T / N, H, E]`."""
        rows, tokens, heads, width = output.shape
        parts = output.reshape(rows, self.ranks, tokens // self.ranks, heads, width)
        received = self._exchange(parts.movedim(1, 0))
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def from_all(self, value: Tensor) -> Tensor:
        """Return the value of each rank, `[N, ...]`."""
        return self._exchange(value.expand(self.ranks, *value.shape))

    def from_previous(self, value: Tensor) -> Tensor:
        """Return the value of the rank with the tokens before; zeros on the first rank."""
        return self.weighted(self.from_all(value), self.ranks_before(value) == 1)

    def ranks_before(self, like: Tensor) -> Tensor:
        """Return how many ranks before this one each rank is, `[N]`; 0 or less: it is not."""
        return self.index - torch.arange(self.ranks, device=like.device)

    @staticmethod
    def weighted(values: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of `[N, ...]` by weights `[N, ...]`, which may have fewer dimensions.

        Also if all weights are 0: a rank without a gradient to exchange would let the others wait.
        """
        shape = (*weights.shape, *[1] * (values.dim() - weights.dim()))
        return (values * weights.view(shape).to(values.dtype)).sum(dim=0)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part n of `[N, ...]` to rank n of the group; return what each of them sent."""
        collectives, whole = _collectives(), parts.contiguous()
        sent = collectives.all_to_all_single_autograd(whole, None, None, self.name)
        received: Tensor = collectives.wait_tensor(sent)
        return received


def _collectives() -> Any:
    """Return torch's collectives that compile and differentiate; some builds have none."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


def join_sequence_group(rank: int, world_size: int, *, ranks: int) -> SequenceGroup | None:
    """Return this rank's group of so many neighbours, if sequences are divided; collective."""
    if ranks == 1:
        return None
    import torch.distributed as dist

    firsts = range(0, world_size, ranks)
    groups = [dist.new_group(list(range(first, first + ranks))) for first in firsts]
    return SequenceGroup(ranks, rank % ranks, groups[rank // ranks].group_name)
