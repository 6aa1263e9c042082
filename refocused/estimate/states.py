"""The memory of parameters, gradients and optimizer states, by arithmetic alone."""

from __future__ import annotations

import dataclasses
from typing import Literal

from refocused.config.optimization import ZeroConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StateMemory:
    """What the training state takes on one rank, in bytes, without activations.

    Attributes:
        gpu: On the device, during the optimizer's step.
        gathered: On the device besides, while ZeRO-3 has the whole model's parameters in place.
        host: In the host's memory, for this rank.
        nvme: On the NVMe drive, for this rank.
    """

    gpu: int
    gathered: int
    host: int
    nvme: int


def state_memory(
    parameters: int,
    *,
    zero: ZeroConfig,
    dtype: Literal["bf16", "fp16", "fp32"],
    ranks: int,
) -> StateMemory:
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
