import pytest
import torch
from small_families import relative
from torch import Tensor

from refocused.models import resonance as module
from refocused.models.resonance import causal_convolution


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def direct(inputs: Tensor, kernel: Tensor) -> Tensor:
    """The definition, lag by lag."""
    outputs = torch.zeros_like(inputs)
    for lag in range(kernel.shape[1]):
        shifted = inputs[:, : inputs.shape[1] - lag] * kernel[:, lag]
        outputs = outputs + torch.nn.functional.pad(shifted, (0, 0, lag, 0))
    return outputs


@pytest.mark.parametrize("length", [1, 2, 37, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_the_output_and_gradients_are_sums_over_all_lags(
    length: int, dtype: torch.dtype, tolerance: float
) -> None:
    inputs, kernel, gradient = drawn(2, length, 3), drawn(3, length, seed=1), drawn(2, length, 3)
    wanted = [t.requires_grad_() for t in (inputs.clone(), kernel.clone())]
    found = [t.to(dtype).requires_grad_() for t in (inputs, kernel)]
    plain, fast = direct(*wanted), causal_convolution(*found)
    plain.backward(gradient)
    fast.backward(gradient.to(dtype))
    assert relative(fast.detach(), plain.detach()) < tolerance
    for mine, other in zip(found, wanted, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert relative(mine.grad, other.grad) < tolerance


@pytest.mark.parametrize("cut", ["transformed", "transposed by tokens", "transposed by channels"])
def test_grouping_channels_does_not_change_the_result(
    cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, kernel = drawn(2, 16, 7), drawn(7, 16, seed=1)

    def both() -> list[Tensor]:
        tensors = [t.clone().requires_grad_() for t in (inputs, kernel)]
        outputs = causal_convolution(*tensors)
        outputs.square().sum().backward()
        return [outputs.detach(), *(t.grad for t in tensors)]

    together = both()
    if cut == "transformed":
        monkeypatch.setattr(module, "BYTES_ON_CPU", 8 * 2 * 17 * 3)  # groups of 3, 3 and 1
    elif cut == "transposed by tokens":
        monkeypatch.setattr(module, "TOKENS_TRANSPOSED", 5)  # 5, 5, 5 and 1
    else:  # as on a GPU
        channels = [slice(0, 4), slice(4, 8)]
        monkeypatch.setattr(module, "_transposed_at_once", lambda _: channels)
    for one, other in zip(together, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_half_precision_is_rounded_once() -> None:
    inputs, kernel = drawn(1, 64, 4).bfloat16(), drawn(4, 64, seed=1).float()
    outputs = causal_convolution(inputs, kernel)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, causal_convolution(inputs.float(), kernel).bfloat16())


def test_torchs_operator_checks_pass() -> None:
    inputs = drawn(2, 8, 3).requires_grad_()
    kernel = drawn(3, 8, seed=1).requires_grad_()
    torch.library.opcheck(causal_convolution, (inputs, kernel))
