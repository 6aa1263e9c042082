"""The engine: accumulate, clip and update with DeepSpeed; save and load shards."""

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor

from refocused.engine import deepspeed_patches, shard_files
from refocused.engine.bit_checks import BitChecks
from refocused.engine.finite_updates import FiniteUpdates, Judge, UpdateOutcome
from refocused.engine.optimizer import MOMENTUM, capture_settings, set_rates
from refocused.engine.resharding import SWAPPED, FillWeights, load_weights, reshard
from refocused.engine.shard_files import HashingCheckpointEngine
from refocused.engine.state_files import WrittenFile, read_state
from refocused.engine.zero_layout import FORM_ERRORS
from refocused.metrics.meter import Meter
from refocused.metrics.trackers import Histogram
from refocused.system.errors import CheckpointError, TrainingError, as_typed

TAG = "zero"
BINS = 64  # of a histogram
_TOGETHER = 2**22  # elements of a histogram, copied at once


@dataclasses.dataclass(frozen=True, slots=True)
class ShardsWritten:
    """The files that this rank wrote of a checkpoint, and its errors."""

    files: tuple[WrittenFile, ...]
    errors: tuple[OSError, ...]


class Engine:
    """A model and its optimizer, partitioned over the ranks; all ranks call the methods together.

    One step is `accumulation` calls of `accumulate`, unless `begin_step` says how many, and then
    one `update`.

    Attributes:
        meter: How long this rank's steps compute, and wait for other ranks.
        can_skip: Whether the device judges updates before it applies them.
    """

    def __init__(
        self,
        deepspeed_engine: Any,
        *,
        device: torch.device,
        rank: int,
        guard: FiniteUpdates | None = None,
        meter: Meter | None = None,
        checks: BitChecks | None = None,
    ) -> None:
        """Wrap a DeepSpeed engine; without a guard DeepSpeed checks each update on the host."""
        self.meter = meter or Meter()
        self._engine = deepspeed_engine
        self._guard, self.can_skip = guard, guard is not None
        self._checks = checks
        self._device = device
        self._norm_scale = 1.0
        self._rank_file = f"ranks/rank_{rank:05d}.pt"
        self._swap_folder = f"{SWAPPED}/rank{rank:02d}"
        self._restore_settings = capture_settings(deepspeed_engine.optimizer)
        self._files = HashingCheckpointEngine()
        deepspeed_patches.own_engine(deepspeed_engine, self._files)
        self._is_plain = isinstance(deepspeed_engine.optimizer, torch.optim.Optimizer)

    def begin_step(self, micro_batches: int) -> None:
        """Make the next `update` follow so many calls of `accumulate`, and average over them."""
        self._engine.micro_steps = 0  # DeepSpeed finds a step's last pass by this
        each = self._engine.train_micro_batch_size_per_gpu() * self._engine.dp_world_size
        self._engine.set_train_batch_size(micro_batches * each)
        self.meter.begin_step()

    def accumulate(self, input_ids: Tensor, labels: Tensor, *, weight: float = 1.0) -> Tensor:
        """Add one micro-batch's gradient; return its weighted loss `[]`, on the device.

        A non-finite loss makes the whole gradient non-finite, so that the update is skipped.

        Args:
            input_ids: Tokens `[B, T]`.
            labels: The next tokens `[B, T]`; -100 is not counted.
            weight: Of the loss; 1 if all micro-batches of the step have the same number of labels.
        """

        def train() -> Tensor:
            self.meter.begin("forward")
            loss = self._loss(input_ids, labels)
            loss = loss * (weight + (loss - loss).detach())  # a non-finite loss becomes NaN
            self.meter.begin("backward")
            self._engine.backward(loss * deepspeed_patches.loss_factor(self._engine.optimizer))
            if not self._engine.is_gradient_accumulation_boundary():
                self._engine.step()
            return loss.detach()

        return train() if self._checks is None else self._checks.accumulate(train)

    def update(
        self,
        learning_rate: float,
        judge: Judge | None = None,
        *,
        momentum: float = MOMENTUM,
        decay_share: float = 1.0,
    ) -> UpdateOutcome:
        """Apply the accumulated gradient, if it is finite on all ranks.

        `learning_rate` is of parameters without a rate of their own; those with one take the same
        share of it. `momentum` is Muon's, `decay_share` the factor of every weight decay. With a
        judge the outcome has figures; one that skips, which needs `can_skip`, lets a spike change
        no weight or state.

        In fp16 an overflow skips one update; in other precisions all later ones are skipped too.

        Raises:
            TrainingError: On every rank: fp16 overflows at the smallest loss scale.
        """
        self.meter.begin("update")
        set_rates(self._engine.optimizer, learning_rate, momentum=momentum, decay_share=decay_share)
        self._norm_scale = deepspeed_patches.loss_factor(self._engine.optimizer)
        if self._guard is not None:
            self._guard.judge = judge
        failed = self._checks is not None and self._checks.failed(self._guard)
        outcome = UpdateOutcome(False) if failed else self._update(judge)
        self.meter.end_step()
        if self._checks is not None:
            outcome.explain = self._checks.explain
            self._checks.after_update()
        return outcome

    def _update(self, judge: Judge | None) -> UpdateOutcome:
        if self._is_plain:  # stage 0 in float32, where DeepSpeed discards the norm
            norm = torch.nn.utils.clip_grad_norm_(
                self._engine.module.parameters(), self._engine.gradient_clipping() or math.inf
            )
            self._engine._global_grad_norm = norm
            if self._guard is not None:
                self._guard.check(norm)
            elif not torch.isfinite(norm):
                return UpdateOutcome(False)
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed raises a bare Exception
            if "loss scale already at minimum" not in str(error):
                raise
            raise TrainingError(
                "Gradients overflow in fp16 even at the smallest loss scale: the weights have "
                "diverged or exceed fp16's range. Resume from the last checkpoint with a lower "
                "optimizer.lr, or train with precision.dtype=bf16."
            ).agreed() from error  # the ranks have agreed on the overflow
        if self._guard is not None:
            return self._guard.outcome()
        figures = None if judge is None else judge.figures(self.gradient_norm())
        return UpdateOutcome(not getattr(self._engine.optimizer, "overflow", False), figures)

    def histograms(self) -> list[Histogram]:
        """Describe weights and gradients, between the last `accumulate` and the `update`.

        Collective. Gathers one parameter at a time in float32. Gradients are of the whole step,
        before clipping, without fp16's loss scale. Non-finite tensors have no histogram.
        """
        histograms, scale = [], self.loss_scale() or 1.0
        for name, parameter in self._engine.module.named_parameters():
            master = safe_get_full_fp32_param(parameter)  # None at stage 0
            weights = parameter if master is None else master
            histograms.append(histogram_of(f"weights/{name}", weights))
            if (gradient := safe_get_full_grad(parameter)) is not None:
                histograms.append(histogram_of(f"gradients/{name}", gradient, scale=scale))
        return [histogram for histogram in histograms if histogram is not None]

    def gradient_norm(self) -> float | None:
        """Return the last step's global gradient norm before clipping, if known."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm) / self._norm_scale

    def loss_scale(self) -> float | None:
        """Return fp16's current loss scale; None in other precisions."""
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    @property
    def skipped_steps(self) -> int:
        """Updates that fp16 skipped because the scaled gradient overflowed."""
        return int(self._engine.skipped_steps)

    @property
    def steps_made(self) -> int:
        """Updates since step 0, including those that fp16 skipped."""
        return int(self._engine.global_steps)

    def validation_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss `[]` of one batch, without gradient or dropout."""
        with self._evaluating():
            return self._loss(input_ids, labels)

    def label_losses(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each label of a batch, and the labels; see `CausalLM.loss`."""
        input_ids, labels = self._on_device(input_ids, labels)
        with self._evaluating():
            losses: Tensor = self._engine(input_ids, labels, of_each=True)
        group = self._engine.module.sequence
        return losses, labels if group is None else group.own(labels)

    def _loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._engine(*self._on_device(input_ids, labels))
        return loss

    def _on_device(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if input_ids.device != self._device:  # views would be copied through pageable memory
            both = torch.stack([input_ids, labels]).pin_memory()
            input_ids, labels = both.to(self._device, non_blocking=True)
        return input_ids, labels

    @contextlib.contextmanager
    def weights_gathered(self) -> Iterator[None]:
        """Gather all weights once for the forward passes inside, unless they are offloaded."""
        offloaded = self._engine.zero_offload_param() is not None
        gathered = deepspeed_patches.gathered_once(self._engine.module)
        with contextlib.nullcontext() if offloaded else gathered:
            yield

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits `[B, V]` after the last token of each sequence."""
        with self._evaluating():
            logits: Tensor = self._engine(input_ids.to(self._device), compute="logits", last=1)
        return logits[:, 0].float()

    def label_scores(
        self, input_ids: Tensor, labels: Tensor, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Score the labels; see `CausalLM.label_scores`."""
        with self._evaluating():
            scores: tuple[Tensor, Tensor] = self._engine(
                input_ids.to(self._device),
                labels.to(self._device),
                compute="label_scores",
                vocabulary=vocabulary,
            )
        return scores

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def save_shards(self, folder: Path) -> ShardsWritten:
        """Write this rank's part to `zero/` and `ranks/` below `folder`, between two steps.

        Errors are returned, not raised, so that no rank is left in a collective.
        """
        self._save(folder)
        return self._written()

    def copy_shards(self, folder: Path) -> Callable[[], ShardsWritten]:
        """Copy the state to host memory; return a function that writes it as `save_shards` does.

        Call that function once, from any thread, before the next copy, which reuses the memory.
        """
        with self._files.copying():
            self._save(folder)

        def write() -> ShardsWritten:
            self._files.write_copies()
            return self._written()

        return write

    def load_shards(self, folder: Path) -> None:
        """Load the state that `save_shards` wrote; the files' checksums must have been verified.

        Raises CheckpointError if the files have an unknown form.
        """
        with self._loading(folder):
            with contextlib.redirect_stdout(io.StringIO()):  # bf16 at stage 1 prints to it
                path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
            if path is None:
                raise ValueError("DeepSpeed finds nothing in it")

    def load_resharded(self, folder: Path, *, ranks: int) -> None:
        """Load the state that `ranks` ranks saved under ZeRO 1, 2 or 3.

        The number of ranks, the stage (of these), precision and offload may differ. Ranks beyond
        the saved ones keep their freshly seeded random generators. Raises CheckpointError if the
        files have an unknown form, or are of another model.
        """
        with self._loading(folder):
            reshard(self._engine, folder / TAG, ranks=ranks)

    def load_weights(self, fill: FillWeights) -> None:
        """Replace the weights, before the first step; `fill` gets names of the wrapped module."""
        load_weights(self._engine, fill)

    @contextlib.contextmanager
    def _loading(self, folder: Path) -> Iterator[None]:
        """After a load, restore the optimizer's settings and this rank's random state.

        Raises CheckpointError in place of DeepSpeed's errors about files of an unknown form.
        """
        try:
            yield
            self._restore_settings(self._engine.optimizer)
            if self._checks is not None:
                self._checks.forget()
            if self._guard is not None:
                self._guard.reset()
            if (file := folder / self._rank_file).exists():
                shard_files.restore(read_state(file))
        except (*FORM_ERRORS, AssertionError) as error:
            raise CheckpointError(
                f"{folder / TAG} has an unknown form ({type(error).__name__}: {error!s:.100}). Use "
                "the version of refocused that wrote the checkpoint, or choose another: "
                f"{as_typed('checkpoints list')}"
            ) from error

    def _save(self, folder: Path) -> None:
        with (
            deepspeed_patches.without_copying_swapped(self._engine) as swapped,
            deepspeed_patches.without_regathering(self._engine.optimizer),
        ):
            self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        if swapped is not None:
            self._files.save_swapped(swapped, folder / TAG / self._swap_folder)
        self._files.save(shard_files.capture(), str(folder / self._rank_file))
        # Checked after it was copied, the state is what was copied.
        if self._checks is not None and self._checks.failed():
            self._checks.explain(self.steps_made)

    def _written(self) -> ShardsWritten:
        return ShardsWritten(tuple(self._files.written), tuple(self._files.errors))

    def close(self) -> None:
        """Release the engine's memory and hooks."""
        self._engine.destroy()


def histogram_of(name: str, values: Tensor, *, scale: float = 1.0) -> Histogram | None:
    """Return the histogram of `values / scale`; None if some are not finite."""
    values = values.detach().float().flatten() / scale
    low, high = (float(one) for one in torch.aminmax(values))
    squares = float(values.square().sum())
    if not all(map(math.isfinite, (low, high, squares))):
        return None
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.zeros(BINS, dtype=torch.long, device=values.device)
    for part in torch.split(values, _TOGETHER):  # `histc` raises in a deterministic run on a GPU
        bins = ((part - low) / (high - low) * BINS).long().clamp_(0, BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
    return Histogram(name, low, high, counts.tolist(), float(values.sum()), squares)
