import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from refocused.models import ten as ten_scan
from refocused.models.ten import (
    TenCells,
    chunked_scan,
    initial_spectrum,
    last_state,
    shifted_spectrum,
)

ROWS, MODES, LENGTH = 2, 6, 150
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
CHUNKS = [1, 7, 32, 150, 1000]

Arguments = tuple[Tensor, Tensor, Tensor, Tensor]


def sample(dtype: torch.dtype, *, length: int = LENGTH, with_state: bool = True) -> Arguments:
    """Return inputs with outputs near one, the modes, and a state."""
    draw = torch.Generator().manual_seed(7)
    spectrum = initial_spectrum(MODES, longest=length)
    beta = torch.randn((2, MODES, ROWS, length), generator=draw, dtype=torch.float64)
    beta *= spectrum.gain[:, None, None]
    state = torch.randn((2, MODES, ROWS), generator=draw, dtype=torch.float64) * with_state
    tensors = (beta, spectrum.log_decay, spectrum.frequency, state)
    return tuple(tensor.to(dtype).requires_grad_() for tensor in tensors)  # type: ignore[return-value]


def sequential_scan(
    beta: Tensor, log_decay: Tensor, frequency: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Re(c) `[K, B, T]` and the last c `[2, K, B]`, token by token: the definition."""
    inputs = torch.complex(*beta)
    multiplier = torch.polar(log_decay.double().exp(), frequency.double()).to(inputs.dtype)[:, None]
    c = torch.zeros_like(inputs[..., 0]) if state is None else torch.complex(*state)
    outputs = []
    for token in inputs.unbind(-1):
        c = multiplier * c + token
        outputs.append(c.real)
    return torch.stack(outputs, dim=-1), torch.stack((c.real, c.imag))


def gradients(output: Tensor, arguments: Arguments) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output).cos()
    return torch.autograd.grad((output * weights).sum(), arguments)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("dtype", "within"), TOLERANCES)
def test_the_chunked_form_equals_the_recurrence(
    chunk: int, dtype: torch.dtype, within: float
) -> None:
    arguments = sample(dtype)
    beta, log_decay, frequency, state = arguments
    wanted, _ = sequential_scan(beta, log_decay, frequency, state=state)
    found = chunked_scan(beta, log_decay, frequency, chunk=chunk, state=state)
    assert found.dtype == dtype
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=within * scale)
    for mine, plain in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=within * float(plain.abs().max()))


@pytest.mark.parametrize(("dtype", "within"), TOLERANCES)
def test_the_last_state_equals_the_recurrences(dtype: torch.dtype, within: float) -> None:
    arguments = sample(dtype)
    *modes, state = arguments
    _, wanted = sequential_scan(*modes, state=state)
    found = last_state(*modes, state=state)
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=within * scale)


def test_float32_stays_accurate_over_32768_tokens() -> None:
    modes, length = 8, 32768
    spectrum = initial_spectrum(modes, longest=length)
    draw = torch.Generator().manual_seed(1)
    beta = torch.randn((2, modes, 1, length), generator=draw)
    arguments = (spectrum.log_decay, spectrum.frequency)
    exact = chunked_scan(beta.double(), *arguments, chunk=100)
    for chunk in (64, 256):
        found = chunked_scan(beta, *arguments, chunk=chunk)
        error = (found - exact).abs().amax(dim=(1, 2)) / exact.abs().amax(dim=(1, 2))
        assert float(error.max()) < 1e-5


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_product_of_the_scan_runs_in_tf32(
    device: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    if device == "cpu":
        monkeypatch.setattr(ten_scan, "_could_be_tf32", lambda factor: True)
    beta, *modes, _ = (one.detach().to(device).requires_grad_() for one in sample(torch.float32))
    scan = functools.partial(chunked_scan, chunk=16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as precision.tf32 does
    try:
        graph = torch.compile(scan, fullgraph=True, backend="aot_eager") if compiles else scan
        graph(beta, *modes)
        for name in ("bmm", "baddbmm"):
            monkeypatch.setattr(torch, name, noting(getattr(torch, name), taken))
        found = graph(beta, *modes)
        mine = torch.autograd.grad(found, (beta, *modes), found.detach())
        assert torch.get_float32_matmul_precision() == "high"  # the rest of the model's
    finally:
        torch.set_float32_matmul_precision(before)
    assert taken == ["highest"] * (3 + 6)  # forward and backward
    exact = [one.detach().double().requires_grad_() for one in (beta, *modes)]
    wanted = scan(*exact)
    plain = torch.autograd.grad(wanted, exact, wanted.detach())
    for result, right in zip((found, *mine), (wanted, *plain), strict=True):
        right = right.detach()
        torch.testing.assert_close(
            result.detach().double(), right.double(), rtol=0, atol=1e-5 * float(right.abs().max())
        )


@pytest.mark.parametrize(
    ("precision", "on_gpu", "dtype", "held"),
    [
        ("high", True, torch.float32, True),
        ("highest", True, torch.float32, False),
        ("high", False, torch.float32, False),  # a CPU has no TF32
        ("high", True, torch.float64, False),
    ],
)
def test_products_are_forced_to_float32_only_if_tf32_is_possible(
    precision: str, on_gpu: bool, dtype: torch.dtype, held: bool
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        factor: Any = SimpleNamespace(is_cuda=on_gpu, dtype=dtype)
        assert ten_scan._could_be_tf32(factor) is held
    finally:
        torch.set_float32_matmul_precision(before)


def noting(product: Callable[..., Tensor], taken: list[str]) -> Callable[..., Tensor]:
    """Record the precision of each product."""

    def noted(*arguments: Tensor) -> Tensor:
        taken.append(torch.get_float32_matmul_precision())
        return product(*arguments)

    return noted


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_gradient_of_token_32000_reaches_token_100(chunk: int) -> None:
    length, first, last = 32768, 100, 32000
    spectrum = initial_spectrum(16, longest=length)
    beta = torch.zeros((2, 16, 1, length), requires_grad=True)
    found = chunked_scan(beta, spectrum.log_decay, spectrum.frequency, chunk=chunk)
    (gradient,) = torch.autograd.grad(found[:, 0, last].sum(), beta)
    lag = last - first
    size = torch.exp(lag * spectrum.log_decay)
    wanted = torch.stack(
        (size * (lag * spectrum.frequency).cos(), -size * (lag * spectrum.frequency).sin())
    )
    torch.testing.assert_close(gradient[:, :, 0, first], wanted.float(), rtol=1e-4, atol=1e-8)
    assert float(gradient[:, -1, 0, first].norm()) > 0.1  # the slowest mode: exp(-31,900 / 23,700)
    assert not gradient[..., last + 1 :].any()


def test_cells_average_their_recurrences_read_out_through_r() -> None:
    draw = torch.Generator().manual_seed(4)
    cells = TenCells(8, eigenstates=3, longest=64, chunk=4).double()
    with torch.no_grad():
        for parameter in cells.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        inputs = torch.randn((2, 20, 8), generator=draw, dtype=torch.float64)
        found, _ = cells(inputs)
        spectrum, total = cells.spectrum(), torch.zeros_like(found)
        for cell in range(2):
            modes = slice(3 * cell, 3 * cell + 3)
            weight = cells.in_weight[:, modes] * spectrum.gain[modes, None]
            beta = torch.einsum("pkd,btd->pkbt", weight, inputs)
            real, _ = sequential_scan(beta, spectrum.log_decay[modes], spectrum.frequency[modes])
            mixing = cells.mixing[cell]
            coupling = torch.eye(3, dtype=torch.float64) + 0.01 * mixing / mixing.norm()
            total += real.permute(1, 2, 0) @ coupling @ cells.out_weight[cell]
    torch.testing.assert_close(found, total / 2, rtol=1e-10, atol=1e-10)


def test_the_gain_keeps_the_variance_of_every_mode() -> None:
    modes, length = 8, 20000
    spectrum = initial_spectrum(modes, longest=200)
    draw = torch.Generator().manual_seed(3)
    beta = torch.randn((2, modes, 1, length), generator=draw) * spectrum.gain[:, None, None].float()
    real = chunked_scan(beta, spectrum.log_decay, spectrum.frequency, chunk=64)
    assert ((real[:, 0].std(dim=1) - 1).abs() < 0.15).all()


@pytest.mark.parametrize("moved", [0.3, -0.7, 1.0])
def test_rounding_the_learned_numbers_to_bf16_is_harmless_at_every_horizon(moved: float) -> None:
    initial = initial_spectrum(64, longest=32768)
    shift = torch.full((64,), moved * 1.001)
    exact = shifted_spectrum(initial, rate_shift=shift, frequency_shift=shift)
    rounded = shifted_spectrum(
        initial, rate_shift=shift.bfloat16(), frequency_shift=shift.bfloat16()
    )
    assert float((rounded.log_decay / exact.log_decay - 1).abs().max()) < 0.004
    horizon = -1 / exact.log_decay
    phase = (rounded.frequency - exact.frequency).abs() * horizon
    assert float(phase.max()) < 0.01  # radians, at the horizon
    # What rounding nu and omega themselves would do:
    nu = (-exact.log_decay).log()
    assert float((nu.bfloat16().double() - nu).abs().max()) > 0.02
    naive = (exact.frequency.bfloat16().double() - exact.frequency).abs() * horizon
    assert float(naive.max()) > 10
