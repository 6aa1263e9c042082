"""The host's memory that a run takes on one machine, by arithmetic alone."""

from __future__ import annotations

import dataclasses
from typing import Literal

from refocused.config.optimization import Dtype
from refocused.estimate.memory_plan import Choice
from refocused.estimate.run_cost import checkpoint_bytes

Device = Literal["cuda", "cpu"]

# Private memory of a rank without its tensors: Python, torch, DeepSpeed; with CUDA its context
# besides. The first is measured (docs/decisions.md), the second assumed.
RANK_BYTES = {"cpu": 0.4e9, "cuda": 1.5e9}
# What runs beside the ranks: DeepSpeed's launchers, the supervisor, the sampler, the mirror.
BESIDE_BYTES = 0.4e9
BUILT_BYTES = 4  # a parameter of the whole model, which each rank builds before it is spread
# What a step's temporaries may come to when freed memory is kept: glibc cuts holes into which the
# next request of the same size does not fit. Measured: 2.0 to 2.9 times (docs/decisions.md).
KEPT_TIMES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class HostPlan:
    """What a run takes of one machine's memory, in bytes.

    Attributes:
        building: The whole model, which each rank builds on the host before it is spread.
        tensors: Of all ranks afterwards: offloaded states and gradients; on CPUs everything.
        copies: That saves in the background write from.
        processes: All that is no tensor.
        temporaries: Of all ranks, what a step takes of the host beside the states that stay.
    """

    building: int
    tensors: int
    copies: int
    processes: int
    temporaries: int

    @property
    def for_keeping(self) -> int:
        """What must be left when the states are built, so that freed memory can be kept."""
        return self.copies + KEPT_TIMES * self.temporaries

    @property
    def total(self) -> int:
        """Most of it at once: what is built is gone when training begins."""
        return max(self.building, self.tensors + self.copies) + self.processes


def plan_host(
    choice: Choice,
    *,
    parameters: int,
    dtype: Dtype,
    ranks: int,
    ranks_here: int,
    device: Device,
    in_background: bool,
) -> HostPlan:
    """Plan what the ranks of one machine take of its memory.

    Token files are not counted: they are read through the page cache, which gives way.

    Args:
        choice: How the states are spread, and what a step takes of a rank.
        parameters: With the padding.
        dtype: What the passes compute in.
        ranks: Of the run.
        ranks_here: On this machine.
        device: What computes; a CPU's memory is the host's.
        in_background: Whether saves are written from copies.
    """
    memory = choice.memory
    rank = memory.host + (memory.peak if device == "cpu" else 0)
    step = checkpoint_bytes(parameters, stage=choice.zero.stage, dtype=dtype)
    return HostPlan(
        building=ranks_here * BUILT_BYTES * parameters,
        tensors=ranks_here * rank,
        # Without ZeRO rank 0 saves for all.
        copies=step * (ranks_here if choice.zero.stage else ranks) // ranks if in_background else 0,
        processes=process_bytes(device, ranks_here=ranks_here),
        # Those of an offloaded step are not counted: they are taken to be as large as its states.
        temporaries=ranks_here * (memory.peak - memory.states if device == "cpu" else memory.host),
    )


def process_bytes(device: Device, *, ranks_here: int) -> int:
    """Return what the processes of a run take on one machine beside tensors."""
    return int(ranks_here * RANK_BYTES[device] + BESIDE_BYTES)
