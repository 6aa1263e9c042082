"""Updates that are made only when the gradient is finite, decided on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Verdict:
    """Whether an update was made, the same on every rank; asking may wait for the device."""

    def __init__(self, was_finite: bool | Tensor) -> None:
        """Begin to copy a flag `[]` to the host, or take what the host knows already."""
        self._flag, self._arrived = was_finite, None
        if isinstance(was_finite, Tensor) and was_finite.device.type == "cuda":
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(was_finite, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def was_made(self) -> bool:
        """Return the flag, when the device has computed it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


class FiniteUpdates:
    """Keeps torch's fused optimizers from applying a gradient that is not finite.

    DeepSpeed asks the device for the norm before each update, and waits. Here the norm, which is
    that of all ranks, becomes the `found_inf` that fused optimizers read on the device (as they do
    for torch's own gradient scaler). Once an update was refused, all later ones are: the host may
    ask as late as it likes.
    """

    def __init__(self, optimizer: Any) -> None:
        """Take torch's optimizer, which must be fused."""
        self._optimizer = optimizer
        self._refused: Tensor | None = None

    @staticmethod
    def can_guard(optimizer: Any) -> bool:
        """Tell whether an optimizer reads `found_inf` on the device."""
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def judge(self, norm: Tensor) -> None:
        """Let the coming update depend on the norm `[]` of the whole gradient; -1 is refused."""
        refused = (~torch.isfinite(norm) | (norm < 0)).float()
        if self._refused is not None:
            refused = torch.maximum(refused, self._refused)
        self._refused = self._optimizer.found_inf = refused

    def verdict(self) -> Verdict:
        """Tell, when asked, whether the last update was made."""
        assert self._refused is not None  # every update is judged
        return Verdict(self._refused == 0)


def guard_partitioned(optimizer: Any, guard: FiniteUpdates) -> None:
    """Let one of DeepSpeed's optimizers, each of which has a module, ask the guard and not wait.

    All of them call `is_invalid_grad_norm` with the norm, in which -1 stands for what is not
    finite; it is a name of their module, replaced while the optimizer makes a step.
    """
    module, step = sys.modules[type(optimizer).__module__], optimizer.step

    def judge(norm: Tensor) -> bool:
        guard.judge(norm)
        return False

    replaced: dict[str, Callable[..., Any]] = {"is_invalid_grad_norm": judge}
    if hasattr(module, "clip_tensors_by_global_norm"):
        replaced["clip_tensors_by_global_norm"] = _clip_on_the_device

    kept = {name: getattr(module, name) for name in replaced}

    def step_on_device(*args: Any, **named: Any) -> None:
        vars(module).update(replaced)
        try:
            step(*args, **named)
        finally:
            vars(module).update(kept)

    # Stages 1 and 2: the same question once more, by a pass over all gradients.
    optimizer.check_overflow = lambda *args, **named: None
    optimizer.step = step_on_device
    if (stream := getattr(optimizer, "reduce_and_partition_stream", None)) is not None:
        # Stage 3 makes the host wait for the gradients' stream after each pass. Only the device
        # reads them here, so its next work waits for that stream instead.
        stream.synchronize = lambda: _accelerator().current_stream().wait_stream(stream)


def _clip_on_the_device(
    input_tensors: list[Tensor], *, max_norm: float, global_norm: Tensor, **_: Any
) -> Tensor:
    """Clip as DeepSpeed's bf16 optimizer does, which reads from the device whether it has to."""
    factor = torch.clamp(max_norm / (global_norm + 1e-6), max=1.0)
    torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
    return global_norm


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
