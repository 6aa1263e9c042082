"""Settings of the update: batch, optimizer, schedule, precision and ZeRO."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic

from refocused.config.section import (
    Count,
    CountOrAuto,
    CountOrZero,
    DecayRate,
    Fraction,
    NotNegative,
    Positive,
    Section,
    as_yaml,
)

Dtype = Literal["bf16", "fp16", "fp32"]


class BatchConfig(Section):
    """How many windows one optimizer step sees.

    Give `accumulation`, or `windows`, from which the accumulation follows for any number of GPUs.
    """

    micro: CountOrAuto
    """Windows of one forward and backward pass on one GPU. `auto`: the most that fit its memory and
    divide `windows`; on CPUs the most of at most 4,096 tokens."""
    accumulation: Count | None = None
    """Passes summed before one update."""
    windows: Count | None = None
    """Windows of one step over all GPUs: the global batch."""

    @pydantic.model_validator(mode="after")
    def _one_of_two(self) -> BatchConfig:
        if (self.accumulation is None) == (self.windows is None):
            raise ValueError("give either accumulation or windows (the global batch), one of them")
        if self.micro == "auto" and self.windows is None:
            raise ValueError("micro: auto needs windows (the global batch), which it divides")
        return self


class OptimizerConfig(Section):
    """AdamW or Muon; only matrices decay (no biases, no norms)."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` updates the linear layers inside blocks, and AdamW the embeddings, positions, head,
    norms and biases; one learning rate serves both."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Number added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    clip: NotNegative = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""


class ScheduleConfig(Section):
    """How the learning rate moves over the run's steps."""

    kind: Literal["cosine", "one_cycle", "warm_restarts", "constant"] = "cosine"
    """`cosine` (warmup, then half a cosine to the floor), `one_cycle` (cosine up over the warmup,
    cosine down to the floor), `warm_restarts` (a cosine every `cycle_steps`, each `cycle_growth`
    times as long as the one before), `constant` (after the warmup)."""
    warmup_steps: CountOrZero = 0
    """Steps of the rise from 0 to the peak."""
    floor_fraction: Fraction = 0.1
    """Lowest learning rate, as a share of the peak."""
    cycle_steps: Count | None = None
    """Steps of the first cycle of `warm_restarts`."""
    cycle_growth: Positive = 1.0
    """Length of a cycle, as a multiple of the one before."""

    @pydantic.model_validator(mode="after")
    def _cycle_when_it_restarts(self) -> ScheduleConfig:
        if (self.kind == "warm_restarts") != (self.cycle_steps is not None):
            raise ValueError("cycle_steps belongs to kind: warm_restarts, and to it alone")
        if self.cycle_growth < 1:
            raise ValueError("cycle_growth is at least 1")
        return self


class PrecisionConfig(Section):
    """What the forward and backward passes compute in; masters and moments are float32."""

    dtype: Dtype | Literal["auto"] = "auto"
    """Type of the passes. `fp16` has a dynamic loss scale. `auto`: bf16 where the GPU or processor
    computes in it, else fp16 on GPUs and fp32 on CPUs; a resume keeps the checkpoint's."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Products of the blocks' linear layers in 8 bits while training, beside dtype: bf16, with one
    scale for a whole matrix (`tensorwise`) or for each of its rows (`rowwise`, finer, slower)."""
    tf32: bool = True
    """Use TF32 in float32 matrix products on NVIDIA GPUs, but not in TEN's scan."""
    initial_scale_power: CountOrZero = 16
    """With fp16, the loss scale starts at 2 to this power."""
    scale_window: Count = 1000
    """With fp16, steps without overflow before the loss scale doubles."""

    @pydantic.model_validator(mode="after")
    def _fp8_beside_bf16(self) -> PrecisionConfig:
        if self.fp8 != "none" and self.dtype not in ("bf16", "auto"):
            raise ValueError(f"fp8: {self.fp8} needs dtype: bf16 for all that is not 8 bits")
        return self

    @property
    def resolved(self) -> Dtype:
        """The dtype, once `auto` has been decided for the machine."""
        assert self.dtype != "auto"
        return self.dtype


class ZeroSettings(Section):
    """How DeepSpeed spreads the training state over the ranks.

    `auto` is the fastest choice that fits the GPUs' memory: stage 1 before 2 before 3, and an
    offload (to `cpu`) only when nothing else fits.
    """

    stage: Annotated[Literal[0, 1, 2, 3, "auto"], pydantic.BeforeValidator(as_yaml)] = 3
    """0 replicates everything (and sums 16-bit gradients in 16 bits, not 32), 1 partitions the
    optimizer states, 2 also the gradients, 3 also the parameters."""
    offload_optimizer: Literal["none", "cpu", "nvme", "auto"] = "none"
    """Where the optimizer states are."""
    offload_parameters: Literal["none", "cpu", "nvme", "auto"] = "none"
    """Where the parameters are, in stage 3."""
    nvme_path: str | None = None
    """Folder on a local NVMe drive, for the offloads to `nvme`."""
    fragment: str | None = None
    """Name of a file in `config/deepspeed/` with DeepSpeed settings that no section here owns
    (bucket sizes, overlap, aio)."""

    @pydantic.model_validator(mode="after")
    def _offload_fits(self) -> Self:
        if self.offload_parameters in ("cpu", "nvme") and self.stage not in (3, "auto"):
            raise ValueError("offload_parameters needs stage: 3")
        if self.offload_optimizer in ("cpu", "nvme") and self.stage == 0:
            raise ValueError("offload_optimizer needs stage: 1, 2 or 3")
        if self.offload_optimizer == "nvme" and self.stage not in (3, "auto"):
            raise ValueError("offload_optimizer: nvme needs stage: 3")
        uses_nvme = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if uses_nvme and not self.nvme_path:
            raise ValueError("an offload to nvme needs nvme_path, a folder on a local NVMe drive")
        return self

    @property
    def decided(self) -> bool:
        """Whether no setting is left to the plan."""
        return "auto" not in (self.stage, self.offload_optimizer, self.offload_parameters)


class ZeroConfig(ZeroSettings):
    """`ZeroSettings` in which everything is decided."""

    stage: Literal[0, 1, 2, 3] = 3
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
