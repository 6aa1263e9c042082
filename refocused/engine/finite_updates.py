"""Skip optimizer updates with non-finite gradients or spikes, without a host synchronization."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Limits(NamedTuple):
    """Above these values a step is a spike."""

    loss: float = math.inf  # mean over all ranks, in nats a token
    norm: float = math.inf  # of the whole gradient before clipping
    skips: bool = False  # leave out the update of a spike


class Figures(NamedTuple):
    """What a step was judged by, the same on all ranks."""

    loss: float  # as in `Limits`
    norm: float  # likewise; NaN: unknown
    loss_spiked: float  # 1: above its limit
    norm_spiked: float  # likewise


class Judge(NamedTuple):
    """Compares a step with its limits, on the device and without a wait."""

    loss: Tensor  # this rank's mean loss `[]`
    limits: Limits

    def figures(self, norm: Tensor | float | None) -> Tensor:
        """Return the `Figures` of a step `[4]`, with its gradient norm `[]`; all ranks call."""
        loss = self.loss.detach().float().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        norm = torch.as_tensor(math.nan if norm is None else norm, dtype=loss.dtype)
        norm = norm.to(loss.device)
        spiked = (loss > self.limits.loss).float(), (norm > self.limits.norm).float()
        return torch.stack([loss, norm, *spiked])


class UpdateOutcome:
    """How an update ended; the same on all ranks. Reading it may wait for the device."""

    # Raises on every rank if another check skipped it; takes the number of updates before it.
    explain: Callable[[int], None] = staticmethod(lambda updates: None)

    def __init__(self, was_finite: bool | Tensor, figures: Tensor | None = None) -> None:
        """Start to copy a flag `[]`, which may be on the host, and figures `[4]` if there are."""
        values = torch.as_tensor(was_finite, dtype=torch.float32).reshape(1)
        if figures is not None:
            values = torch.cat([values.to(figures.device), figures])
        self._values, self._arrived = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def was_finite(self) -> bool:
        """Return whether loss and gradient were finite; otherwise the update was left out."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._values[0])

    def figures(self) -> Figures | None:
        """Return what it was judged by, once `was_finite` was called; None if it was not."""
        values = self._values[1:].tolist()
        return Figures(*values) if values else None


class FiniteUpdates:
    """Makes a fused torch optimizer skip non-finite gradients on the device, and spikes if told.

    DeepSpeed reads the gradient norm on the host before each update, which stalls the device. Here
    the norm, already reduced over all ranks, becomes the `found_inf` flag that fused optimizers
    read on the device, as with torch's own gradient scaler. After one non-finite update all later
    ones are skipped too, so the host may check the outcome late. A skipped spike is one update.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.judge: Judge | None = None  # of the next update
        self.reset()

    def reset(self) -> None:
        """Forget earlier updates, once other states were loaded."""
        self._skip: Tensor | None = None
        self._figures: Tensor | None = None

    def check(self, norm: Tensor) -> None:
        """Skip the next update if the global gradient norm `[]` is not finite, or is -1."""
        self.skip_if(~torch.isfinite(norm) | (norm < 0))
        if self.judge is not None and self._skip is not None:
            self._figures = self.judge.figures(norm)
            if self.judge.limits.skips:
                spiked = self._figures[2:].amax()
                self._optimizer.found_inf = torch.maximum(self._skip, spiked)

    def skip_if(self, failed: Tensor) -> None:
        """Skip the next update, and all later ones, if a flag `[]` is set."""
        skip = failed.float()
        if self._skip is not None:
            skip = torch.maximum(skip, self._skip)
        self._skip = self._optimizer.found_inf = skip

    def outcome(self) -> UpdateOutcome:
        """Return the outcome of the last update."""
        assert self._skip is not None  # `check` precedes every update
        return UpdateOutcome(self._skip == 0, self._figures)
