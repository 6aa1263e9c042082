"""Settings under which an interrupted training must equal an uninterrupted one, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Literal

STEPS = 18
# Not before the tenth: Adam's bias corrections as powers and as running products agree up to there.
SAVED_AT = (12, 15)

Dtype = Literal["bf16", "fp32", "fp16"]
Offload = Literal["none", "optimizer", "all"]


@dataclasses.dataclass(frozen=True)
class ExactnessCase:
    """One way to train; the optimizer always has its two groups, with and without decay."""

    dtype: Dtype
    offload: Offload
    family: str
    dropout: float
    activation_checkpointing: bool
    accumulation: int

    @property
    def name(self) -> str:
        parts = [self.dtype, f"offload {self.offload}", self.family]
        parts += ["dropout"] if self.dropout else []
        parts += ["checkpointed"] if self.activation_checkpointing else []
        return ", ".join([*parts, f"{self.accumulation} passes"])


# Each pair of two settings' values comes together at least once.
EXACTNESS_CASES = [
    ExactnessCase("bf16", "none", "gpt2", 0.2, True, 2),
    ExactnessCase("bf16", "optimizer", "gpt_neox", 0.0, False, 2),
    ExactnessCase("bf16", "all", "gpt2", 0.2, True, 1),
    ExactnessCase("fp32", "none", "gpt_neox", 0.2, False, 1),
    ExactnessCase("fp32", "optimizer", "gpt2", 0.0, True, 1),
    ExactnessCase("fp32", "all", "gpt_neox", 0.2, True, 2),
    ExactnessCase("fp16", "none", "gpt2", 0.0, False, 1),
    ExactnessCase("fp16", "optimizer", "gpt_neox", 0.2, True, 2),
    ExactnessCase("fp16", "all", "gpt2", 0.0, False, 2),
]
