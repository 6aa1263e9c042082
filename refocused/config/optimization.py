"""Settings of a step: batch, optimizer, schedule, precision and ZeRO."""

import math
from typing import Annotated, Literal, Self, get_args

import pydantic

from refocused.config.section import (
    Count,
    CountOrAuto,
    CountOrZero,
    DecayRate,
    Flag,
    Fraction,
    NotNegative,
    PathText,
    Positive,
    Section,
    number_or_word,
    setting,
)

Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerKind = Literal["adamw", "muon"]
# Parameters with a peak rate of their own, `optimizer.ROLE_lr`; `matrix`: those that Muon updates.
Role = Literal["matrix", "embedding", "head", "scalar"]
ROLES: tuple[Role, ...] = get_args(Role)
# Gives Muon's update the root mean square of AdamW's, so that one learning rate serves both (Liu et
# al. 2025, Muon is scalable for LLM training, 2.2).
RMS_OF_ADAMW = 0.2
DECAY_FRACTION = 0.2  # Hägele et al. 2024: as good as a cosine of the same length


class BatchConfig(Section):
    """The sequences of one step.

    Set `global_batch_size`, from which the accumulation follows for any number of GPUs, or
    `gradient_accumulation_steps`.
    """

    micro_batch_size: CountOrAuto = pydantic.Field(examples=["8"])
    """Sequences of one forward and backward pass on one GPU. `auto`: the most that fit into its
    memory and divide `global_batch_size`; on CPUs up to 4,096 tokens."""
    gradient_accumulation_steps: Count | None = setting(None, "16")
    """Micro-batches whose gradients are summed for one update."""
    global_batch_size: Count | None = setting(None, "512")
    """Sequences of one step on all GPUs together."""
    warmup_steps: Count | None = setting(None, "1000")
    """Steps over which the micro-batches of a step grow from 1 to all, and the batch with them."""

    @pydantic.model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.gradient_accumulation_steps is None) == (self.global_batch_size is None):
            raise ValueError("set either gradient_accumulation_steps or global_batch_size")
        if self.micro_batch_size == "auto" and self.global_batch_size is None:
            raise ValueError("micro_batch_size: auto needs global_batch_size, which it divides")
        return self


OF_MUON = (
    "matrix_lr",
    "matrix_decay",
    "cautious_decay",
    "normuon",
    "momentum",
    "momentum_warmup_steps",
    "momentum_end",
)


class OptimizerConfig(Section):
    """AdamW or Muon; weight decay applies to matrices only, not to biases and norms."""

    kind: OptimizerKind = "adamw"
    """`muon` updates the linear layers of the blocks with Muon and everything else with AdamW."""
    lr: Positive = pydantic.Field(examples=["3e-4"])
    """Peak learning rate."""
    matrix_lr: Positive | None = setting(None, "2e-3")
    """Peak learning rate of Muon's matrices, whose updates have the size of AdamW's; unset:
    `lr`. It follows the same schedule."""
    betas: tuple[DecayRate, DecayRate] = setting((0.9, 0.95), "[0.9, 0.98]")
    """Decay rates of the first and second moment."""
    eps: Positive = setting(1e-8, "1e-6")
    """Constant added to the square root of the second moment."""
    weight_decay: NotNegative = setting(0.1, "0.05")
    """Decoupled weight decay of matrices and embeddings; each step's is multiplied by its learning
    rate."""
    decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Every weight decay over the run: `constant`, or falling to 0 at its last step along a line or
    half a cosine."""
    embedding_lr: Positive | None = setting(None, "0.3")
    """Peak learning rate of the embeddings (with a tied head, of both); unset: `lr`."""
    embedding_betas: tuple[DecayRate, DecayRate] | None = setting(None, "[0.8, 0.995]")
    """The embeddings' `betas`."""
    embedding_decay: NotNegative | None = setting(None, "0.001")
    """The embeddings' `weight_decay`."""
    head_lr: Positive | None = setting(None, "8e-3")
    """Peak learning rate of the head, if it is not tied to the embedding; unset: `lr`."""
    head_betas: tuple[DecayRate, DecayRate] | None = setting(None, "[0.8, 0.96]")
    """The head's `betas`."""
    head_decay: NotNegative | None = setting(None, "0.01")
    """The head's `weight_decay`."""
    scalar_lr: Positive | None = setting(None, "1e-2")
    """Peak learning rate of biases, norms and other vectors; unset: `lr`."""
    scalar_betas: tuple[DecayRate, DecayRate] | None = setting(None, "[0.8, 0.95]")
    """The vectors' `betas`."""
    matrix_decay: NotNegative | None = setting(None, "0.05")
    """Weight decay of Muon's matrices; unset: `weight_decay`."""
    cautious_decay: Flag = False
    """Decay elements of Muon's matrices only where the update also moves them towards 0."""
    normuon: Flag = False
    """Give each output of Muon's matrices an update of the same size over time (NorMuon)."""
    momentum: DecayRate = setting(0.95, "0.97")
    """Muon's momentum."""
    momentum_warmup_steps: CountOrZero = setting(0, "300")
    """Steps in which Muon's momentum rises from 0.85."""
    momentum_end: DecayRate | None = setting(None, "0.9")
    """Muon's momentum in the last step, to which it falls while the learning rate decays."""
    clip: NotNegative = setting(1.0, "0.5")
    """Clip the gradient to this global norm; 0: no clipping."""

    @pydantic.model_validator(mode="after")
    def _muon_for_its_settings(self) -> Self:
        fields = type(self).model_fields
        changed = [name for name in OF_MUON if getattr(self, name) != fields[name].default]
        if self.kind != "muon" and changed:
            raise ValueError(f"set kind: muon to use {', '.join(changed)}")
        return self

    def peak(self, role: Role | None = None) -> float:
        """Return the peak learning rate of a role, or of all parameters without a rate."""
        return (role and getattr(self, f"{role}_lr")) or self.lr

    def has_group(self, role: Role) -> bool:
        """Whether the embeddings or the head have any setting of their own."""
        names = (f"{role}_lr", f"{role}_betas", f"{role}_decay")
        return any(getattr(self, name) is not None for name in names)


class ScheduleConfig(Section):
    """The learning rate over the steps of a run."""

    kind: Literal["cosine", "linear", "wsd", "one_cycle", "warm_restarts", "constant"] = "cosine"
    """`cosine` (warmup, then half a cosine to the floor), `linear` (warmup, then a line to the
    floor), `wsd` (warmup, stable at the peak, decay to the floor by the last step), `one_cycle`
    (cosine up during the warmup, cosine down to the floor), `warm_restarts` (a cosine every
    `cycle_steps`, each `cycle_growth` times as long as the previous one), or `constant` (after the
    warmup)."""
    warmup_steps: CountOrZero = setting(0, "2000")
    """Steps of the warmup from 0 to the peak."""
    min_lr_ratio: Fraction = setting(0.1, "0.05")
    """Learning rate of the last update as a share of the peak."""
    cycle_steps: Count | None = setting(None, "5000")
    """Length of the first cycle of `warm_restarts`, in steps."""
    cycle_growth: Positive = setting(1.0, "2")
    """Length of each cycle as a multiple of the previous one."""
    decay: Literal["linear", "1-sqrt"] | None = None
    """Form of the decay of `wsd`; null: `1-sqrt`, which falls fast at first."""
    decay_fraction: Fraction | None = setting(None, "0.1")
    """Length of the decay of `wsd` as a share of `run.steps`; null: 0.2, or `decay_steps`."""
    decay_steps: Count | None = setting(None, "2000")
    """Length of the decay of `wsd` in steps."""

    @pydantic.model_validator(mode="after")
    def _settings_of_its_kind(self) -> Self:
        if (self.kind == "warm_restarts") != (self.cycle_steps is not None):
            raise ValueError("set cycle_steps if, and only if, kind is warm_restarts")
        if self.cycle_growth < 1:
            raise ValueError("expected at least 1 for cycle_growth")
        given = [self.decay, self.decay_fraction, self.decay_steps]
        if self.kind != "wsd" and given != [None] * 3:
            raise ValueError("decay, decay_fraction and decay_steps need kind: wsd")
        if None not in given[1:]:
            raise ValueError("set either decay_fraction or decay_steps")
        return self

    def decay_begins(self, total_steps: int) -> int:
        """Return the step after which the rate falls in a run of `total_steps`."""
        if self.kind != "wsd":
            return self.warmup_steps
        if self.decay_steps is not None:
            return total_steps - self.decay_steps
        share = DECAY_FRACTION if self.decay_fraction is None else self.decay_fraction
        return total_steps - round(share * total_steps)


def share_of_peak(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of the update after `step` updates as a share of the peak."""
    warmup, floor = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        risen = (step + 1) / warmup
        if schedule.kind == "one_cycle":
            return half_cosine(1.0 - risen, floor=0.0)
        return risen
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "warm_restarts":
        position, length = cycle_at(step, schedule)
        return half_cosine(position / length, floor=floor)
    progress = decayed_share(step, total_steps, schedule)
    if schedule.kind == "linear" or schedule.decay == "linear":
        return 1.0 - (1.0 - floor) * progress
    if schedule.kind == "wsd":  # Haegele et al. 2024, eq. 2
        return 1.0 - (1.0 - floor) * math.sqrt(progress)
    return half_cosine(progress, floor=floor)


def decayed_share(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Return the share of the decay that a step has behind it.

    From the last update at the peak to the run's last update, which is at the floor.
    """
    begin, last = max(0, schedule.decay_begins(total_steps) - 1), total_steps - 1
    return min(1.0, max(0, step - begin) / max(1, last - begin))


def cycle_at(step: int, schedule: ScheduleConfig) -> tuple[float, float]:
    """Return how far a step is in its cycle of `warm_restarts`, and the cycle's length."""
    assert schedule.cycle_steps is not None  # checked with the run file
    position, length = float(step - schedule.warmup_steps), float(schedule.cycle_steps)
    while position >= length:  # a cycle is `cycle_growth` times as long as the one before
        position -= length
        length *= schedule.cycle_growth
    return position, length


def half_cosine(progress: float, *, floor: float) -> float:
    """Fall from 1 at progress 0 to the floor at progress 1 (Loshchilov & Hutter 2017, eq. 5)."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class PrecisionConfig(Section):
    """Precision of the forward and backward passes; master weights and moments are float32."""

    dtype: Literal["bf16", "fp16", "fp32", "auto"] = "auto"
    """Type of the passes. `fp16` uses a dynamic loss scale. `auto`: bf16 if the hardware computes
    in it, else fp16 on GPUs and fp32 on CPUs; a resumed run keeps its type."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the blocks' linear layers in 8 bits during training (needs bf16), with one scale for
    each matrix (`tensorwise`) or each row (`rowwise`: more exact, slower)."""
    tf32: Flag = True
    """Use TF32 for float32 matrix products on NVIDIA GPUs, except in TEN's scan."""
    initial_scale_power: CountOrZero = setting(16, "12")
    """With fp16, the initial loss scale is 2 to this power. An update that overflows is skipped;
    its step and tokens count."""
    scale_window: Count = setting(1000, "500")
    """With fp16, steps without overflow before the loss scale doubles."""

    @pydantic.model_validator(mode="after")
    def _fp8_beside_bf16(self) -> Self:
        if self.fp8 != "none" and self.dtype not in ("bf16", "auto"):
            raise ValueError(f"fp8: {self.fp8} needs dtype: bf16 for all that is not 8 bits")
        return self

    @property
    def resolved(self) -> Dtype:
        """The dtype; `auto` must have been decided."""
        assert self.dtype != "auto"
        return self.dtype


class ZeroSettings(Section):
    """How DeepSpeed partitions the training state over the ranks.

    `auto` takes the fastest choice that fits into GPU memory: stage 1, 2, 3, and an offload to
    `cpu` only if nothing else fits.
    """

    stage: Annotated[Literal[0, 1, 2, 3, "auto"], pydantic.BeforeValidator(number_or_word)] = (
        setting(3, "auto")
    )
    """0 replicates everything (and sums 16-bit gradients in 16 bits), 1 partitions the optimizer
    states, 2 also the gradients, 3 also the parameters."""
    offload_optimizer: Literal["none", "cpu", "nvme", "auto"] = "none"
    """Where to keep the optimizer states."""
    offload_parameters: Literal["none", "cpu", "nvme", "auto"] = "none"
    """Where to keep the parameters, in stage 3."""
    partition: Literal["world", "node"] = "world"
    """Ranks that the backward pass gathers weights from, in stage 3: `node` keeps a second copy,
    partitioned inside each node (ZeRO++ hpZ), so that no weights cross the network then."""
    nvme_path: PathText | None = setting(None, "/mnt/nvme/states")
    """Folder on a local NVMe drive for offloads to `nvme`."""
    fragment: PathText | None = setting(None, "gather_once_a_step")
    """Name of a file in `config/deepspeed/` with DeepSpeed settings that have no place in the run
    file (bucket sizes, overlap, aio)."""

    @pydantic.model_validator(mode="after")
    def _offload_fits(self) -> Self:
        if self.offload_parameters in ("cpu", "nvme") and self.stage not in (3, "auto"):
            raise ValueError("offload_parameters needs stage: 3")
        if self.partition == "node" and (self.stage != 3 or self.offload_parameters != "none"):
            raise ValueError("partition: node needs stage: 3 and offload_parameters: none")
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
        """Whether nothing is `auto`."""
        return "auto" not in (self.stage, self.offload_optimizer, self.offload_parameters)


class ZeroConfig(ZeroSettings):
    """`ZeroSettings` without `auto`."""

    stage: Literal[0, 1, 2, 3] = 3
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
