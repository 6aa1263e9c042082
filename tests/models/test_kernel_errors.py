"""Forms of the loss and of the scans against float64, and that a wrong one is found."""

import re
import sys
import types
from typing import Any

import kernel_errors
import pytest
import torch
from kernel_errors import SCANS, why_wrong
from torch import Tensor, nn
from triton_interpreter import needs_interpreter

CPU = torch.device("cpu")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMS = [("head", "float32"), ("head", "float16"), ("eigenstates", "float32")]
FORMS += [("memories", "float32"), ("memories", "float16")]
ON_A_GPU = [*FORMS, ("head", "bfloat16"), ("memories", "bfloat16")]


@needs_interpreter  # which truncates to bfloat16
@pytest.mark.parametrize(("what", "dtype"), FORMS)
def test_a_kernel_is_right_in_tritons_interpreter(what: Any, dtype: str) -> None:
    short = {} if what == "head" else {"length": 300}
    assert why_wrong(what, "kernel", DTYPES[dtype], CPU, **short) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "dtype"), ON_A_GPU)
def test_a_kernel_is_right_on_a_gpu(what: Any, dtype: str) -> None:
    assert why_wrong(what, "kernel", DTYPES[dtype], torch.device("cuda")) is None


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="needs a newer torch, such as 2.13"
)
def test_torchs_fused_form_is_right_in_float32_and_rounds_in_16_bits() -> None:
    assert why_wrong("head", "fused", torch.float32, CPU) is None
    assert "relative errors are" in str(why_wrong("head", "fused", torch.bfloat16, CPU))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 1.05 * gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("what", "inputs"), [("head", 2), ("eigenstates", 3), ("memories", 4)])
def test_a_wrong_form_is_found_in_its_values_and_in_each_gradient(
    what: Any, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = kernel_errors.results_of

    def why(change: Any) -> str | None:
        calls = []

        def first_changed(form: Any, given: list[Tensor]) -> list[Tensor]:
            calls.append(form)
            return results(
                (lambda *leaves: form(*change(leaves))) if len(calls) == 1 else form, given
            )

        monkeypatch.setattr(kernel_errors, "results_of", first_changed)
        short = {} if what == "head" else {"length": 300}
        return why_wrong(what, "chunked", dtype, CPU, **short)

    torch.manual_seed(0)
    assert why(lambda leaves: leaves) is None
    assert "relative errors" in str(why(lambda leaves: (1.05 * leaves[0], *leaves[1:])))
    for place in range(inputs):
        wrong = why(
            lambda leaves, at=place: [
                WrongGradient.apply(one) if i == at else one for i, one in enumerate(leaves)
            ]
        )
        assert re.search(r"(4\.[5-9]|5\.[0-5])e-02", str(wrong))


def test_a_kernel_that_cannot_run_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for scan, module in SCANS.items():
        monkeypatch.setitem(sys.modules, module, types.ModuleType("empty"))
        reason = why_wrong(scan, "kernel", torch.float32, CPU, length=9)  # type: ignore[arg-type]
        assert str(reason).startswith("AttributeError: ")
