import functools

import pytest
import torch
from torch import Tensor

from refocused.models.ten import ten_choice
from refocused.models.ten.cells import TenMixer
from refocused.models.ten.scan import chunked_scan
from refocused.models.ten.ten_choice import choose_scan, largest_error, use_faster
from refocused.system.world import DeviceKind, World

SHAPE = (2, 16)
in_chunks = functools.partial(chunked_scan, chunk=8)


def mixer() -> TenMixer:
    torch.manual_seed(0)
    built = TenMixer(8, eigenstates=3, longest=64, chunk=4, scales=[1, 2])
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_()
    return built


@pytest.mark.parametrize(
    ("kind", "deterministic", "reason"),
    [
        ("cpu", False, "the kernel is for GPUs"),
        ("cuda", True, "a deterministic run"),
        ("cuda", False, "the kernel does not work here: ModuleNotFoundError: no triton"),
    ],
)
def test_without_the_kernel_the_scan_runs_in_chunks_with_a_reason(
    kind: DeviceKind, deterministic: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ten_choice, "_failure", lambda device: "ModuleNotFoundError: no triton")
    built, world = mixer(), World(device_kind=kind)
    torch.use_deterministic_algorithms(deterministic)
    try:
        said = choose_scan(built, batch_shape=SHAPE, compiles=False, world=world)
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == f"eigenstates in chunks ({reason})"
    assert all(cells.kernel is None for cells in built.cells)


@pytest.mark.parametrize(("kernel_ms", "wins"), [(1.0, True), (3.0, False)])
def test_the_faster_form_is_used_and_both_times_are_reported(kernel_ms: float, wins: bool) -> None:
    built, calls = mixer(), []

    def kernel(*arguments: Tensor) -> Tensor:
        calls.append(arguments[0].shape)
        return in_chunks(*arguments)

    inputs = torch.randn(2, 16, 8)
    before = built(inputs)
    said = use_faster(list(built.cells), kernel, by_kernel=kernel_ms / 1e3, by_chunks=0.002)
    assert ("by the Triton kernel (1.0 ms" in said) == wins
    assert "2.0 ms" in said
    torch.testing.assert_close(built(inputs), before, rtol=1e-5, atol=1e-5)
    assert calls == ([(2, 6, 2, 16), (2, 6, 2, 8)] if wins else [])


def test_a_state_uses_the_chunked_form() -> None:
    built = mixer()
    for cells in built.cells:
        cells.kernel = lambda *_: pytest.fail("the kernel begins from zero")
        cells(torch.randn(1, 4, 8), torch.zeros(2, 6, 1))


def test_a_wrong_scan_is_found_in_its_values_and_in_each_gradient() -> None:
    def slow(*arguments: Tensor) -> Tensor:
        return chunked_scan(arguments[0], arguments[1] * 1.001, arguments[2], chunk=8)

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, beta: Tensor) -> Tensor:
            return beta.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 1.01 * gradient

    def biased(*arguments: Tensor) -> Tensor:
        return in_chunks(WrongGradient.apply(arguments[0]), *arguments[1:])

    device = torch.device("cpu")
    assert largest_error(in_chunks, device) < 1e-5
    assert largest_error(slow, device) > ten_choice.LARGEST_ERROR
    assert largest_error(biased, device) == pytest.approx(0.01, rel=0.1)
