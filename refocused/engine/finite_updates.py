"""Skip optimizer updates with non-finite gradients, without a host synchronization."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class UpdateOutcome:
    """Whether an update was applied; the same on all ranks. Reading it may wait for the device."""

    # Raises on every rank if another check skipped it; takes the number of updates before it.
    explain: Callable[[int], None] = staticmethod(lambda updates: None)

    def __init__(self, was_finite: bool | Tensor) -> None:
        """Start copying a flag `[]` from the device, or take one from the host."""
        self._flag, self._arrived = was_finite, None
        if isinstance(was_finite, Tensor) and was_finite.device.type == "cuda":
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(was_finite, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def was_applied(self) -> bool:
        """Return the flag, once the device has computed it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


class FiniteUpdates:
    """Makes a fused torch optimizer skip non-finite gradients on the device.

    DeepSpeed reads the gradient norm on the host before each update, which stalls the device. Here
    the norm, already reduced over all ranks, becomes the `found_inf` flag that fused optimizers
    read on the device, as with torch's own gradient scaler. After one skipped update all later
    ones are skipped too, so the host may check the outcome late.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._skip: Tensor | None = None

    @staticmethod
    def can_guard(optimizer: Any) -> bool:
        """Whether an optimizer reads `found_inf` on the device."""
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def check(self, norm: Tensor) -> None:
        """Skip the next update if the global gradient norm `[]` is not finite, or is -1."""
        self.skip_if(~torch.isfinite(norm) | (norm < 0))

    def skip_if(self, failed: Tensor) -> None:
        """Skip the next update, and all later ones, if a flag `[]` is set."""
        skip = failed.float()
        if self._skip is not None:
            skip = torch.maximum(skip, self._skip)
        self._skip = self._optimizer.found_inf = skip

    def outcome(self) -> UpdateOutcome:
        """Return the outcome of the last update."""
        assert self._skip is not None  # `check` precedes every update
        return UpdateOutcome(self._skip == 0)


def guard_partitioned(optimizer: Any, guard: FiniteUpdates) -> None:
    """Make a ZeRO optimizer use the guard instead of reading the norm on the host.

    Each of DeepSpeed's optimizer modules calls its global `is_invalid_grad_norm` with the norm (-1
    if not finite); that is replaced during a step.
    """
    module, step = sys.modules[type(optimizer).__module__], optimizer.step

    def check(norm: Tensor) -> bool:
        guard.check(norm)
        return False

    replaced: dict[str, Callable[..., Any]] = {"is_invalid_grad_norm": check}
    if hasattr(module, "clip_tensors_by_global_norm"):
        replaced["clip_tensors_by_global_norm"] = _clip_on_the_device

    kept = {name: getattr(module, name) for name in replaced}

    def step_on_device(*args: Any, **named: Any) -> None:
        vars(module).update(replaced)
        try:
            step(*args, **named)
        finally:
            vars(module).update(kept)

    # Stages 1 and 2 would check once more, by a pass over all gradients.
    optimizer.check_overflow = lambda *args, **named: None
    optimizer.step = step_on_device
    if (stream := getattr(optimizer, "reduce_and_partition_stream", None)) is not None:
        # Stage 3 makes the host wait for the gradients' stream after each pass. Only the device
        # reads the gradients here, so let its current stream wait instead.
        stream.synchronize = lambda: _accelerator().current_stream().wait_stream(stream)


def _clip_on_the_device(
    input_tensors: list[Tensor], *, max_norm: float, global_norm: Tensor, **_: Any
) -> Tensor:
    """Clip as DeepSpeed's bf16 optimizer does, without reading the norm on the host."""
    factor = torch.clamp(max_norm / (global_norm + 1e-6), max=1.0)
    torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
    return global_norm


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
