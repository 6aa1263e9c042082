"""Settings of the update: batch, optimizer, schedule, precision and ZeRO."""

from __future__ import annotations

from typing import Literal, Self

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
)

Dtype = Literal["bf16", "fp16", "fp32"]


class BatchConfig(Section):
    """How many windows one optimizer step sees.

    Give `accumulation`, or `windows` (the global batch, from which the accumulation follows for
    any number of GPUs), not both.

    Attributes:
        micro: Windows of one forward and backward pass on one GPU; `auto`: the most that its memory
            holds and that divide `windows`; on CPUs the most that are no more than 4,096 tokens.
        accumulation: Passes summed before one update.
        windows: Windows of one step over all GPUs.
    """

    micro: CountOrAuto
    accumulation: Count | None = None
    windows: Count | None = None

    @pydantic.model_validator(mode="after")
    def _one_of_two(self) -> BatchConfig:
        if (self.accumulation is None) == (self.windows is None):
            raise ValueError("give either accumulation or windows (the global batch), one of them")
        if self.micro == "auto" and self.windows is None:
            raise ValueError("micro: auto needs windows (the global batch), which it divides")
        return self


class OptimizerConfig(Section):
    """AdamW or Muon; only matrices decay (no biases, no norms).

    Attributes:
        kind: `adamw`, or `muon` for the weights of linear layers inside blocks, with AdamW for
            embeddings, positions, head, norms and biases; one learning rate serves both.
        lr: Peak learning rate.
        betas: Decay rates of the two moments; 1 would divide by zero in the bias correction.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices and embeddings.
        clip: Largest norm of the whole gradient; 0 clips nothing.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Positive
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0


class ScheduleConfig(Section):
    """How the learning rate moves over the run's steps.

    Attributes:
        kind: `cosine` (warmup, then half a cosine to the floor), `one_cycle` (cosine up over the
            warmup, cosine down to the floor), `warm_restarts` (a cosine every `cycle_steps`,
            each `cycle_growth` times as long as the one before), `constant` (after the warmup).
        warmup_steps: Steps of the rise from 0 to the peak.
        floor_fraction: Lowest learning rate as a share of the peak.
        cycle_steps: Steps of the first cycle of `warm_restarts`.
        cycle_growth: Length of a cycle over that of the one before.
    """

    kind: Literal["cosine", "one_cycle", "warm_restarts", "constant"] = "cosine"
    warmup_steps: CountOrZero = 0
    floor_fraction: Fraction = 0.1
    cycle_steps: Count | None = None
    cycle_growth: Positive = 1.0

    @pydantic.model_validator(mode="after")
    def _cycle_when_it_restarts(self) -> ScheduleConfig:
        if (self.kind == "warm_restarts") != (self.cycle_steps is not None):
            raise ValueError("cycle_steps belongs to kind: warm_restarts, and to it alone")
        if self.cycle_growth < 1:
            raise ValueError("cycle_growth is at least 1")
        return self


class PrecisionConfig(Section):
    """What the forward and backward passes compute in; masters and moments are float32.

    Attributes:
        dtype: `bf16`, `fp16` (with a dynamic loss scale), `fp32`, or `auto`: bf16 where GPUs or
            processors compute in it, else fp16 on GPUs and fp32 on CPUs; a resumed run keeps the
            precision of its checkpoint.
        fp8: Products of the blocks' linear layers in 8 bits while training, with one scale for a
            whole matrix (`tensorwise`) or one for each of its rows (`rowwise`, finer and slower);
            `none`: in `dtype`. For dtype: bf16.
        tf32: Let float32 matrix products on NVIDIA GPUs use TF32, but for those of TEN's scan.
        initial_scale_power: fp16: the loss scale starts at 2 to this power.
        scale_window: fp16: steps without overflow before the scale doubles.
    """

    dtype: Dtype | Literal["auto"] = "auto"
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    tf32: bool = True
    initial_scale_power: CountOrZero = 16
    scale_window: Count = 1000

    @pydantic.model_validator(mode="after")
    def _fp8_beside_bf16(self) -> PrecisionConfig:
        if self.fp8 != "none" and self.dtype not in ("bf16", "auto"):
            raise ValueError(f"fp8: {self.fp8} needs dtype: bf16 for all that is not 8 bits")
        return self

    @property
    def resolved(self) -> Dtype:
        """The dtype, once `refocused.estimate.precision` has decided what `auto` is."""
        assert self.dtype != "auto"
        return self.dtype


class ZeroSettings(Section):
    """How DeepSpeed spreads the training state over the ranks, with what is left to the plan.

    `auto` is the fastest that fits the GPUs' memory: 1 before 2 before 3, and an offload (to `cpu`)
    only when nothing else fits.

    Attributes:
        stage: 0 replicates all (and sums 16-bit gradients in 16 bits; the others in 32), 1
            spreads optimizer states, 2 gradients as well, 3 parameters too; `auto`: 1, 2 or 3.
        offload_optimizer: Where the optimizer's states live instead of the GPU.
        offload_parameters: Where parameters live between uses (stage 3).
        nvme_path: Folder on a local NVMe drive, for the offloads to `nvme`.
        fragment: Name of a file in `config/deepspeed/` with DeepSpeed settings that no section
            here owns (bucket sizes, overlap, aio).
    """

    stage: Literal[0, 1, 2, 3, "auto"] = 3
    offload_optimizer: Literal["none", "cpu", "nvme", "auto"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme", "auto"] = "none"
    nvme_path: str | None = None
    fragment: str | None = None

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
        """Whether nothing is left to the plan."""
        return "auto" not in (self.stage, self.offload_optimizer, self.offload_parameters)


class ZeroConfig(ZeroSettings):
    """`ZeroSettings` in which everything is decided."""

    stage: Literal[0, 1, 2, 3] = 3
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
