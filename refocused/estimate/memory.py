"""Memory of a training step on one GPU: states, gathered weights, activations."""

from __future__ import annotations

import dataclasses

from refocused.config.deepspeed import reduce_bucket_elements
from refocused.config.model_shape import ModelShape
from refocused.config.optimization import Dtype, ZeroConfig
from refocused.config.run_config import ModelConfig
from refocused.estimate.activations import activation_memory
from refocused.estimate.flops import count_parameters


@dataclasses.dataclass(frozen=True, slots=True)
class StateMemory:
    """What the training state takes for one rank, in bytes, without activations."""

    gpu: int  # during the optimizer's step
    gathered: int  # on the device besides, while ZeRO-3 has all parameters in place
    host: int
    nvme: int


def state_memory(parameters: int, *, zero: ZeroConfig, dtype: Dtype, ranks: int) -> StateMemory:
    """Return the memory of parameters, gradients and optimizer states on one rank.

    Bytes an element: 2 (16 bit) or 4 for parameters; 4 for the gradients' sum (2 in a 16-bit run
    without ZeRO); 8 for AdamW's two moments; 4 for the float32 master copy, which ZeRO keeps in
    float32 runs too; and 4 for the gradient's copy during the step of a 16-bit run (Rajbhandari et
    al. 2020, ZeRO, 3.1, with float32 sums, plus that last copy). Stage 1 spreads the optimizer's
    part over the ranks, 2 the gradients, 3 the parameters.
    """
    size = 4 if dtype == "fp32" else 2
    share = -(-parameters // ranks)
    weights = size * (share if zero.stage == 3 else parameters)
    gradients = (4 if zero.stage else size) * (share if zero.stage >= 2 else parameters)
    master = 4 if dtype != "fp32" or zero.stage else 0
    offloads = zero.offload_optimizer != "none"
    step_copy = 4 if dtype != "fp32" or (offloads and zero.stage >= 2) else 0
    optimizer = (8 + master + step_copy) * (share if zero.stage else parameters)
    at = {"none": 0, "cpu": 0, "nvme": 0}
    at[zero.offload_parameters] += weights
    at[zero.offload_optimizer] += optimizer
    # Spread gradients wait in the host's memory for an optimizer that works there. Below stage 3
    # DeepSpeed 0.19.8 keeps copies of gradients and new weights in the type of the passes besides
    # (counted on two ranks, `tests/estimate/test_memory.py`).
    if offloads and zero.stage == 2:
        gradients = (4 + size) * share
    elif offloads and zero.stage == 1 and dtype != "fp32":
        at["cpu"] += size * (parameters + share)
    at["cpu" if offloads and zero.stage >= 2 else "none"] += gradients
    gathered = size * parameters if zero.stage == 3 else 0
    return StateMemory(gpu=at["none"], gathered=gathered, host=at["cpu"], nvme=at["nvme"])


# What no tensor holds: the CUDA context, NCCL's buffers, cuBLAS's workspace; and the share that
# torch's allocator loses between blocks of memory. Assumed, not measured here.
CONTEXT_BYTES = 1.5 * 2**30
LOST_SHARE = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a step takes for one rank, in bytes; `host` and `nvme` hold offloaded states."""

    states: int  # parameters, gradients and optimizer states on the device, during a pass
    gathered: int  # parameters of the whole model, which ZeRO-3 gathers for a pass
    peak: int  # most of everything at once on the device
    host: int
    nvme: int

    @property
    def activations(self) -> int:
        """What the passes take at the peak, with DeepSpeed's buffers."""
        return self.peak - self.states - self.gathered

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device with so much memory can make the step."""
        return self.peak + CONTEXT_BYTES <= memory_bytes * (1 - LOST_SHARE)


def plan_memory(
    shape: ModelShape,
    *,
    model: ModelConfig,
    micro: int,
    zero: ZeroConfig,
    dtype: Dtype,
    ranks: int,
    masked: bool = False,
    activation_factor: float = 1.0,
) -> MemoryPlan:
    """Plan the memory of a step with gradient accumulation.

    The peak is the highest of three moments: the end of the forward pass, with all activations and
    the head's; the reduction of the first full bucket of gradients, when the blocks behind it have
    given theirs back; and the optimizer's step.

    Args:
        shape: The model.
        model: How it is computed.
        micro: Windows of a pass.
        zero: How the states are spread.
        dtype: What the passes compute in.
        ranks: Of the run.
        masked: Whether attention stays within documents.
        activation_factor: Measured memory of a pass over the computed one.
    """
    parameters = count_parameters(shape, vocabulary_multiple=model.vocabulary_multiple).allocated
    bucket = reduce_bucket_elements(parameters)
    update = state_memory(parameters, zero=zero, dtype=dtype, ranks=ranks)
    states, buffer = _states_of_a_pass(parameters, zero=zero, dtype=dtype, ranks=ranks)
    passing = activation_memory(shape, model=model, micro=micro, dtype=dtype, masked=masked)
    gathered = update.gathered if ranks > 1 or zero.offload_parameters != "none" else 0
    resident = states + gathered + buffer * bucket
    kept = passing.blocks * activation_factor
    early, flushed = _reduction_bytes(zero.stage, dtype=dtype, ranks=ranks)
    reduced_later = max(0.0, 1 - bucket / parameters)
    moments = (
        kept + passing.head * activation_factor,
        kept + passing.recomputed * activation_factor + early * bucket,
        kept * reduced_later + (early + flushed) * bucket,
    )
    peak = max(resident + max(moments), update.gpu + buffer * bucket)
    return MemoryPlan(states, gathered, int(peak), update.host, update.nvme)


def _states_of_a_pass(
    parameters: int, *, zero: ZeroConfig, dtype: Dtype, ranks: int
) -> tuple[int, int]:
    """Return the bytes of the states on the device at the start of a step's last pass.

    And those of the buckets that DeepSpeed 0.19.8 keeps meanwhile, for each of a bucket's elements.
    Counted on one and two ranks (`tests/estimate/test_memory.py`). Below stage 2 every rank has all
    gradients, in 16-bit runs twice: the last pass's in 16 bits and their sum in float32.
    """
    size = 4 if dtype == "fp32" else 2
    share = -(-parameters // ranks)
    optimizer = 8 + (4 if size == 2 or zero.stage else 0)
    weights = size * (share if zero.stage == 3 else parameters)
    gradients, buffer = {
        0: (size * parameters, 0),
        1: ((4 + size) * parameters if size == 2 else 4 * parameters, 0 if size == 2 else 8),
        2: (4 * share, size if size == 2 else 2 * size),
        3: (4 * share, size),
    }[zero.stage]
    if zero.offload_parameters != "none":
        weights = 0
    if zero.offload_optimizer != "none":
        return weights + (gradients if zero.stage < 2 else 0), buffer
    return weights + gradients + optimizer * (share if zero.stage else parameters), buffer


def _reduction_bytes(stage: int, *, dtype: Dtype, ranks: int) -> tuple[float, float]:
    """Return what reducing takes for each element of a bucket.

    First from the first gradient on, then besides while a full bucket is reduced: stage 1 sums in
    float32 and copies the sums, stage 2 copies them, stage 3 packs a bucket and takes its share of
    the result in float32, twice where the passes compute in it.
    """
    size = 4 if dtype == "fp32" else 2
    if stage == 3:
        return 0, size + (8 if size == 4 else 4) / ranks
    return {0: (0, 0), 1: (0, 4 + size), 2: (size if size == 2 else 0, size)}[stage]
