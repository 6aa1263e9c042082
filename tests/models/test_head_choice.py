import os
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refocused.models import head_choice, timed_trial
from refocused.models.head_choice import FORMS, choose_head, failure
from refocused.models.head_loss import LossHead
from refocused.system.errors import ConfigError
from refocused.system.world import World

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_fused = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="needs a newer torch, such as 2.13"
)


def small_head() -> LossHead:
    return LossHead(nn.Parameter(torch.zeros(20, 8)), chunk_tokens=4)


def fake_gpus(*, reason_elsewhere: str | None = None) -> Any:
    """Two ranks whose GPUs are this CPU; the other one may fail with every form."""
    return types.SimpleNamespace(
        device=CPU,
        device_kind="cuda",
        gather=lambda reason: [reason, reason_elsewhere],
        on_rank_0=lambda action: action(),
    )


def chosen(head: LossHead, asked: Any, *, world: Any) -> str:
    return choose_head(head, asked, tokens=32, dtype=torch.float32, world=world)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | Exception]:
    """Milliseconds of each form, or its error in training's shape; all forms are right."""
    found: dict[str, float | Exception] = {"chunked": 3.0, "fused": 2.0, "kernel": 1.0}

    def fastest_seconds(run: Any, device: torch.device) -> float:
        form, _, hidden, weight, labels = run.args
        assert (hidden.shape, weight.shape, labels.shape) == ((32, 8), (20, 8), (32,))
        taken = found[form]
        if isinstance(taken, Exception):
            raise taken
        return taken / 1e3

    monkeypatch.setattr(head_choice, "failure", lambda *args: None)
    monkeypatch.setattr(timed_trial, "fastest_seconds", fastest_seconds)
    return found


@pytest.mark.parametrize("fastest", FORMS)
def test_a_gpu_uses_the_fastest_form_and_reports_all_times(
    times: dict[str, float | Exception], fastest: str
) -> None:
    head = small_head()
    times[fastest] = 0.5
    said = chosen(head, "auto", world=fake_gpus())
    assert head.form == fastest
    assert said.startswith(f"loss {FORMS[head.form]} (chunked ")
    assert f"{fastest} 0.5 ms" in said and said.count(" ms") == 3


def test_a_form_out_of_memory_is_excluded_and_reported(times: dict[str, float | Exception]) -> None:
    head = small_head()
    times["kernel"] = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
    said = chosen(head, "auto", world=fake_gpus())
    assert head.form == "fused"
    assert "kernel left out: OutOfMemoryError: CUDA out of memory. Tried" in said


def test_a_form_that_fails_on_one_rank_runs_on_none(times: Any) -> None:
    head = small_head()
    said = chosen(head, "auto", world=fake_gpus(reason_elsewhere="no driver"))
    assert head.form == "chunked"
    assert "kernel left out: no driver" in said and " ms" not in said


@pytest.mark.parametrize(("gpu", "reason"), [(False, "on a CPU"), (True, "in a deterministic run")])
def test_without_a_gpu_or_timings_the_loss_is_chunked(times: Any, gpu: bool, reason: str) -> None:
    head = small_head()
    torch.use_deterministic_algorithms(gpu)
    try:
        said = chosen(head, "auto", world=fake_gpus() if gpu else World())
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == f"loss in chunks (model.head=auto {reason})"
    assert head.form == "chunked"


@needs_fused
def test_a_requested_form_runs_if_it_is_correct() -> None:
    head = small_head()
    assert chosen(head, "fused", world=World()) == "loss by torch's fused form (model.head=fused)"
    assert head.form == "fused"


def test_a_requested_form_that_cannot_run_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_choice, "failure", lambda *args: "no triton")
    with pytest.raises(ConfigError, match=r"model.head is kernel, .* here: no triton. Set model"):
        chosen(small_head(), "kernel", world=World())


@needs_fused
def test_torchs_fused_form_is_excluded_if_it_sums_in_16_bits() -> None:
    assert failure("fused", torch.float32, CPU) is None
    reason = failure("fused", torch.bfloat16, CPU)
    assert reason == "its loss is in torch.bfloat16"


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # the interpreter truncates to bfloat16
def test_the_kernel_is_correct_in_tritons_interpreter(dtype: torch.dtype) -> None:
    assert failure("kernel", dtype, CPU) is None


@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET unset")
def test_without_triton_or_a_gpu_the_kernel_reports_why() -> None:
    assert "Error: " in (failure("kernel", torch.float32, CPU) or "")


@pytest.mark.parametrize("wrong", range(3))
def test_a_wrong_loss_and_each_wrong_gradient_are_found(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    right = head_choice._pass

    def one_is_wrong(form: Any, *tensors: Tensor, chunk: int) -> list[Tensor]:
        found = right("chunked", *tensors, chunk=chunk)
        if form == "kernel":
            found[wrong] = found[wrong] * 1.001
        return found

    monkeypatch.setattr(head_choice, "_pass", one_is_wrong)
    assert failure("fused", torch.float32, CPU) is None
    assert "relative errors of values and gradients are" in (
        failure("kernel", torch.float32, CPU) or ""
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_correct_on_a_gpu(dtype: torch.dtype) -> None:
    assert failure("kernel", dtype, torch.device("cuda")) is None
