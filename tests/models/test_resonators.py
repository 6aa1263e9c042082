import pytest
import torch
from small_families import relative
from torch import Tensor

from refocused.models.resonance import ResonatorBank, Tuning, grid, kernel, powers, ring_on, silence

WIDTH, COUNT, LENGTH = 3, 5, 96
TOLERANCES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)


def resonators(*, width: int = WIDTH, count: int = COUNT, max_length: int = 64) -> ResonatorBank:
    """Return resonators with all parameters changed, in float64."""
    torch.manual_seed(0)
    module = ResonatorBank(width, count, max_length=max_length).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rung_token_by_token(module: ResonatorBank, inputs: Tensor) -> Tensor:
    """The definition: the recurrence, the interference and the read-out at each token."""
    decay, frequency = grid(module.count, module.max_length)
    decay_now = decay * module.decay_shift.exp()
    multiplier = torch.polar((-decay_now).exp(), frequency + decay * module.frequency_shift)
    magnitude = module.weight.magnitude * (2 * (1 - (-2 * decay_now).exp()) / COUNT).sqrt()[:, None]
    weight = torch.polar(magnitude, module.weight.phase.view(COUNT, WIDTH))
    state = torch.zeros(len(inputs), COUNT, WIDTH, dtype=torch.complex128)
    outputs = []
    for token in inputs.unbind(1):
        state = multiplier[:, None] * state + token[:, None, :]
        mixed = state + module.interference.to(state.dtype) @ state
        outputs.append((weight * mixed).sum(1).real)
    return torch.stack(outputs, dim=1)


@TOLERANCES
def test_the_convolution_is_the_recurrence_in_values_and_every_gradient(
    dtype: torch.dtype, tolerance: float
) -> None:
    inputs, gradient = drawn(2, LENGTH, WIDTH), drawn(2, LENGTH, WIDTH, seed=2)
    plain, fast = resonators(), resonators().to(dtype)
    plain.load_state_dict(fast.state_dict())  # both start from the same rounded numbers
    driven = [inputs.to(dtype).double().requires_grad_(), inputs.to(dtype).requires_grad_()]
    wanted, found = rung_token_by_token(plain, driven[0]), fast(driven[1])
    wanted.backward(gradient)
    found.backward(gradient.to(dtype))
    assert found.dtype == dtype
    assert relative(found.detach(), wanted.detach()) < tolerance
    assert relative(driven[1].grad, driven[0].grad) < tolerance
    for (name, mine), other in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert relative(mine.grad, other.grad) < tolerance, name


@pytest.mark.parametrize("chunk", [1, 7, 32, 96, 100])
@TOLERANCES
def test_chunks_equal_one_pass(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    module, inputs = resonators().to(dtype), drawn(2, LENGTH, WIDTH).to(dtype)
    with torch.no_grad():
        whole, tuning = module(inputs), module.tuning(dtype)
        chunked, state = ring_on(inputs, tuning, silence(inputs, tuning), chunk=chunk)
        assert relative(chunked, whole) < tolerance
        first, half = ring_on(inputs[:, :50], tuning, silence(inputs, tuning), chunk=chunk)
        second, end = ring_on(inputs[:, 50:], tuning, half, chunk=chunk)
    assert relative(torch.cat((first, second), dim=1), whole) < tolerance
    assert relative(end, state) < tolerance


def test_powers_stay_exact_over_a_whole_long_context() -> None:
    decay, frequency = grid(16, 32768)
    tuning = Tuning(decay, frequency, torch.zeros(2, 16, 1))
    found = powers(tuning, 32768)
    lags = torch.arange(32768, dtype=torch.float64)
    wanted = torch.polar((-decay[:, None] * lags).exp(), frequency[:, None] * lags)
    assert float((torch.complex(*found.double()) - wanted).abs().max()) < 1e-6


def test_bfloat16_parameters_hardly_detune_a_long_kernel() -> None:
    """The kernel of 32,768 lags stays accurate with rounded shifts of a line width."""
    torch.manual_seed(0)
    module = ResonatorBank(4, 16, max_length=32768)
    torch.nn.init.uniform_(module.decay_shift, -1, 1)
    torch.nn.init.uniform_(module.frequency_shift, -1, 1)
    exact = kernel(module.tuning(torch.float32), 32768)
    tail = slice(16384, None)
    rounded = kernel(module.bfloat16().tuning(torch.bfloat16), 32768)
    assert rounded.dtype == torch.float32
    difference = (rounded - exact)[:, tail].norm() / exact[:, tail].norm()
    assert difference.item() < 0.02
    # Rounding omega itself would change the kernel.
    tuning = module.float().tuning(torch.float32)
    cast = Tuning(tuning.decay, tuning.frequency.bfloat16().double(), tuning.weights)
    detuned = (kernel(cast, 32768) - exact)[:, tail].norm() / exact[:, tail].norm()
    assert detuned.item() > 0.5
