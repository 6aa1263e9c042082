import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refocused.models import scan_choice, timed_trial
from refocused.models.recall import Memory, ScanModule
from refocused.models.scan_choice import choose_scans, failure
from refocused.models.ten.cells import TenMixer
from refocused.system.world import DeviceKind

CPU = torch.device("cpu")


def fake_world(kind: DeviceKind) -> Any:
    """One rank, whose GPU may be this CPU."""
    return types.SimpleNamespace(
        device=CPU,
        device_kind=kind,
        gather=lambda reason: [reason],
        on_rank_0=lambda action: action(),
    )


def mixer() -> TenMixer:
    torch.manual_seed(0)
    built = TenMixer(8, eigenstates=3, longest=64, chunk=4, scales=[1, 2])
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_()
    return built


def memory() -> Memory:
    torch.manual_seed(0)
    return Memory(8, heads=2, longest=64)


@pytest.mark.parametrize(
    ("kind", "deterministic", "reason"),
    [
        ("cpu", False, "the kernel is for GPUs"),
        ("cuda", True, "a deterministic run"),
        ("cuda", False, "chunked 2.0 ms; kernel left out: no triton"),
    ],
)
def test_without_a_kernel_every_scan_runs_in_chunks_with_a_reason(
    kind: DeviceKind, deterministic: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_choice, "failure", lambda *given: "no triton")
    monkeypatch.setattr(timed_trial, "fastest_seconds", lambda *given: 0.002)
    model, given = nn.Sequential(mixer(), memory()), {"batch_shape": (2, 16), "compiles": False}
    torch.use_deterministic_algorithms(deterministic)
    try:
        said = choose_scans(model, dtype=torch.float32, world=fake_world(kind), **given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == [f"eigenstates in chunks ({reason})", f"memories in chunks ({reason})"]
    assert all(one.kernel is None for one in model.modules() if isinstance(one, ScanModule))


@pytest.mark.parametrize(("kernel_ms", "wins"), [(1.0, True), (3.0, False)])
@pytest.mark.parametrize("build", [mixer, memory])
def test_the_faster_form_is_used_and_both_times_are_reported(
    build: Any, kernel_ms: float, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, calls = build(), []
    scan = next(one for one in built.modules() if isinstance(one, ScanModule))

    def kernel(*arguments: Tensor) -> Any:
        calls.append(arguments[0].shape)
        return scan.in_chunks(*arguments)

    def seconds(run: Any, device: torch.device) -> float:
        run()
        return kernel_ms / 1e3 if run.args[0] is kernel else 0.002

    monkeypatch.setattr(scan_choice, "kernel_of", lambda module: kernel)
    monkeypatch.setattr(timed_trial, "fastest_seconds", seconds)
    inputs = torch.randn(2, 16, 8)
    before = built(inputs)
    given = {"batch_shape": (2, 16), "compiles": False, "dtype": torch.float32}
    (said,) = choose_scans(built, world=fake_world("cuda"), **given)
    assert ("by the Triton kernel" in said) == wins
    assert f"(chunked 2.0 ms; kernel {kernel_ms} ms)" in said
    calls.clear()
    torch.testing.assert_close(built(inputs), before, rtol=1e-5, atol=1e-5)
    shapes = [(2, 6, 2, 16), (2, 6, 2, 8)] if build is mixer else [(2, 2, 16, 4)]
    assert calls == (shapes if wins else [])


def test_a_state_uses_the_chunked_form() -> None:
    built, remembered = mixer(), memory()
    for one in (*built.cells, remembered):
        one.kernel = lambda *_: pytest.fail("the kernel begins from zero")
    for cells in built.cells:
        cells(torch.randn(1, 4, 8), torch.zeros(2, 6, 1))
    remembered(torch.randn(1, 4, 8), {"memory": torch.zeros(1, 2, 4, 5)})


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 1.05 * gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [mixer, memory])
def test_a_wrong_scan_is_found_in_its_values_and_in_each_gradient(
    build: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = next(one for one in build().modules() if isinstance(one, ScanModule))
    file = types.ModuleType("kernel_file")
    monkeypatch.setitem(sys.modules, "kernel_file", file)
    monkeypatch.setattr(type(scan), "kernel_place", "kernel_file:kernel")

    def why(change: Any) -> str | None:
        file.kernel = lambda *inputs: scan.in_chunks(*change(inputs))  # type: ignore[attr-defined]
        return failure(scan, scan.scan_inputs(2, 300, dtype=dtype, device=CPU))

    torch.manual_seed(0)
    assert why(lambda inputs: inputs) is None
    assert "relative errors" in str(why(lambda inputs: (1.05 * inputs[0], *inputs[1:])))
    for place in range(len(scan.scan_inputs(1, 1, dtype=dtype, device=CPU))):
        wrong = why(
            lambda inputs, at=place: [
                WrongGradient.apply(one) if i == at else one for i, one in enumerate(inputs)
            ]
        )
        assert re.search(r"(4\.[5-9]|5\.[0-5])e-02", str(wrong))
