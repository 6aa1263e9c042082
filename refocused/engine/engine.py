"""The engine: one model over all ranks, trained by gradient accumulation and saved in shards."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.engine import shard_files
from refocused.engine.checksum_writer import WrittenFile
from refocused.engine.finite_updates import FiniteUpdates, Verdict
from refocused.engine.gathered_weights import held_whole, kept_gathered
from refocused.engine.histograms import Histograms, histograms_of
from refocused.engine.optimizer import keep_settings
from refocused.engine.resharding import SWAPPED, reshard
from refocused.engine.shard_files import HashingCheckpointEngine
from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import FORM_ERRORS
from refocused.system.errors import CheckpointError, TrainingError

TAG = "zero"


@dataclasses.dataclass(frozen=True, slots=True)
class ShardsWritten:
    """What this rank wrote of a checkpoint, and why not all of it."""

    files: tuple[WrittenFile, ...]
    errors: tuple[OSError, ...]


class Engine:
    """A model, its optimizer and their shards on this rank.

    One optimizer step is `accumulation` calls of `accumulate` and then one `update`.

    Attributes:
        last_batch: Tokens `[B, T]` of the last micro-batch trained on; None before the first.
    """

    def __init__(
        self,
        deepspeed_engine: Any,
        *,
        device: torch.device,
        rank: int,
        guard: FiniteUpdates | None = None,
    ) -> None:
        """Wrap an initialized DeepSpeed engine.

        Without a guard DeepSpeed itself refuses updates, and the host waits for the device.
        """
        self._engine = deepspeed_engine
        self._guard = guard
        self._device = device
        self.last_batch: Tensor | None = None
        self._norm_scale = 1.0
        self._rank_file = f"ranks/rank_{rank:05d}.pt"
        self._swap_folder = f"{SWAPPED}/rank{rank:02d}"
        self._put_settings_back = keep_settings(deepspeed_engine.optimizer)
        self._files = HashingCheckpointEngine()
        self._engine.checkpoint_engine = self._files
        # Rank 0 alone copies two scripts: raising there would leave the others in a collective.
        copy_scripts = self._files.bearing(deepspeed_engine._copy_recovery_script)
        self._engine._copy_recovery_script = copy_scripts
        self._is_plain = isinstance(deepspeed_engine.optimizer, torch.optim.Optimizer)
        self._engine.clip_fp32_gradients = lambda: None  # `_judge_and_clip` does it

    def accumulate(self, input_ids: Tensor, labels: Tensor, *, weight: float = 1.0) -> Tensor:
        """Add one micro-batch's gradient; return its weighted loss `[]`, still on the device.

        A loss that is not finite makes the whole gradient so, on every rank once it is summed: the
        update is refused then.

        Tokens and labels, the tokens that follow, are `[B, T]`; a label of -100 is not counted. The
        loss is multiplied by `weight`: 1 where all micro-batches of the step have as many labels.
        """
        self.last_batch = input_ids
        loss = self._loss(input_ids, labels)
        loss = loss * (weight + (loss - loss).detach())  # inf - inf is NaN, as NaN - NaN is
        self._engine.backward(loss * self._missing_scale())
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
        return loss.detach()

    def update(self, learning_rate: float) -> Verdict:
        """Apply the accumulated gradient, if it is finite on all ranks: one optimizer step.

        Returns:
            Whether it was applied, which may not be known yet. In fp16 an overflow is a reason not
            to; in other precisions training is over.

        Raises:
            TrainingError: On every rank: fp16 overflows at the smallest loss scale.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._norm_scale = self._missing_scale()
        if self._is_plain and not self._judge_and_clip():
            return Verdict(False)
        try:
            self._engine.step()
        except Exception as error:  # all that DeepSpeed raises here is a bare Exception
            if "loss scale already at minimum" not in str(error):
                raise
            stopping = TrainingError(
                "Gradients overflow in fp16 even at the smallest loss scale: the weights have "
                "diverged, or need more range. Resume from the last checkpoint with a lower "
                "optimizer.lr, or train with precision.dtype=bf16."
            )
            stopping.on_every_rank = True  # the ranks agree on an overflow before they raise
            raise stopping from error
        if self._guard is not None:
            return self._guard.verdict()
        return Verdict(not getattr(self._engine.optimizer, "overflow", False))

    def histograms(self) -> Histograms:
        """Describe weights and gradient; between the last `accumulate` and `update` of a step.

        Every rank must call.
        """
        return histograms_of(self._engine.module, gradient_scale=self.loss_scale() or 1.0)

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's whole gradient before clipping, where known."""
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
        """Updates made since step 0, those that fp16 skipped included."""
        return int(self._engine.global_steps)

    def validation_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of one batch without gradient or dropout; every rank must call."""
        with self._evaluating():
            return self._loss(input_ids, labels)

    def _loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        on_device = (one.to(self._device, non_blocking=True) for one in (input_ids, labels))
        loss: Tensor = self._engine(*on_device)
        return loss

    @contextlib.contextmanager
    def weights_held(self) -> Iterator[None]:
        """Gather all weights once for the forward passes inside; every rank must call.

        A training step holds them whole too, from the forward to the backward pass. Parameters
        that are offloaded are gathered for each pass, because memory comes first.
        """
        offloaded = self._engine.zero_offload_param() is not None
        with contextlib.nullcontext() if offloaded else held_whole(self._engine.module):
            yield

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        """Return the predictions `[B, V]` after each row's last token; every rank must call."""
        with self._evaluating():
            logits: Tensor = self._engine.module.logits(input_ids.to(self._device))[:, -1]
        return logits.float()

    def label_scores(
        self, input_ids: Tensor, labels: Tensor, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Rate the labels as `CausalLM.label_scores` does; every rank must call as often."""
        with self._evaluating():
            found: tuple[Tensor, Tensor] = self._engine.module.label_scores(
                input_ids.to(self._device), labels.to(self._device), vocabulary=vocabulary
            )
        return found

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def save_shards(self, folder: Path) -> ShardsWritten:
        """Write this rank's part below `folder`, in `zero/` and `ranks/`; every rank must call.

        Only between two steps: an unfinished accumulation is not saved. A failure to write is
        returned, not raised, so that the other ranks are not left inside a collective.
        """
        self._save(folder)
        return self._written()

    def copy_shards(self, folder: Path) -> Callable[[], ShardsWritten]:
        """Copy what `save_shards` writes to host memory; every rank must call.

        Returns:
            What writes the copy, to be called once, by any thread, before the next copy is made:
            that one takes the same memory.
        """
        with self._files.copying():
            self._save(folder)

        def write() -> ShardsWritten:
            self._files.write_copies()
            return self._written()

        return write

    def load_shards(self, folder: Path) -> None:
        """Take over the state that `save_shards` wrote; every rank must call.

        The files' digests must have been verified: a flipped bit in a tensor is loaded.

        Raises:
            CheckpointError: The files are of another form.
        """
        with self._taking_over(folder):
            with contextlib.redirect_stdout(io.StringIO()):  # bf16 at stage 1 prints a line a rank
                path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
            if path is None:
                raise ValueError("DeepSpeed finds nothing in it")

    def load_resharded(self, folder: Path, *, ranks: int) -> None:
        """Take over the state that `ranks` ranks saved under ZeRO 1, 2 or 3; every rank must call.

        The number of ranks, the stage (of these), the precision and the offload may be others.
        A rank that did not save keeps the random generators it was seeded with.

        Raises:
            CheckpointError: The files are of another form, or of another model.
        """
        with self._taking_over(folder):
            reshard(self._engine, folder / TAG, ranks=ranks)

    @contextlib.contextmanager
    def _taking_over(self, folder: Path) -> Iterator[None]:
        """After a load, configure the optimizer again and restore this rank's random state.

        What files of an unexpected form make DeepSpeed raise becomes a `CheckpointError`.
        """
        try:
            yield
            self._put_settings_back(self._engine.optimizer)
            if (file := folder / self._rank_file).exists():
                shard_files.restore(read_state(file))
        except (*FORM_ERRORS, AssertionError) as error:
            raise CheckpointError(
                f"{folder / TAG} is not as this version writes it ({type(error).__name__}: "
                f"{error!s:.100}). Use the version of refocused that wrote the checkpoint, or "
                "choose another: python launch/checkpoints.py list"
            ) from error

    def _save(self, folder: Path) -> None:
        """Hand this rank's part to `_files`."""
        # DeepSpeed would copy an NVMe drive's files itself, and raise on one rank alone.
        is_swapped = self._engine.zero_nvme_offload_optimizer()
        self._engine.zero_nvme_offload_optimizer = lambda: False
        try:
            with kept_gathered(self._engine.optimizer):
                self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        finally:
            del self._engine.zero_nvme_offload_optimizer
        if is_swapped:
            swapped = Path(self._engine.optimizer.optimizer_swapper.swap_folder)
            self._files.save_swapped(swapped, folder / TAG / self._swap_folder)
        self._files.save(shard_files.capture(), str(folder / self._rank_file))

    def _written(self) -> ShardsWritten:
        return ShardsWritten(tuple(self._files.written), tuple(self._files.errors))

    def close(self) -> None:
        """Give back what the engine holds."""
        self._engine.destroy()

    def _judge_and_clip(self) -> bool:
        """Clip at stage 0 in float32, where DeepSpeed throws the norm away; False: do not update.

        With a guard the answer is on the device, and True here.
        """
        norm = torch.nn.utils.clip_grad_norm_(
            self._engine.module.parameters(), self._engine.gradient_clipping() or math.inf
        )
        self._engine._global_grad_norm = norm
        if self._guard is None:
            return bool(torch.isfinite(norm))
        self._guard.judge(norm)
        return True

    def _missing_scale(self) -> float:
        """Return the loss scale where DeepSpeed 0.19 leaves it to us, otherwise 1.

        Its optimizer of stage 0 divides fp16's gradients by the scale, but only those of the
        other stages multiply the loss by it; and it reports the norm of the scaled gradient.
        """
        optimizer = self._engine.optimizer
        return float(optimizer.loss_scale) if hasattr(optimizer, "fp32_groups") else 1.0
