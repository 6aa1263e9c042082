from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from refocused.errors import ConfigError
from refocused.models import attention
from refocused.models.attention import choose_attention, flash_version
from refocused.world import World

ALONE = World(rank=0, local_rank=0, world_size=1, local_world_size=1)
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture(autouse=True)
def torchs_own_choice() -> Iterator[None]:
    cuda = torch.backends.cuda
    before = (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])
    cuda.enable_mem_efficient_sdp(before[2])


def chosen(asked: Any, *, world: World = ALONE, masked: bool = False) -> str:
    return choose_attention(
        asked,
        batch_shape=(2, 16),
        heads=2,
        width=8,
        dtype=torch.float32,
        dropout=0.0,
        masked=masked,
        world=world,
    )


@pytest.mark.parametrize("asked", ["flash", "math"])
def test_the_kernel_that_was_asked_for_runs(asked: str) -> None:
    said = chosen(asked)
    query = torch.zeros(2, 2, 16, 8, requires_grad=True)
    assert attention.running_kernel(query, dropout=0.0) == asked
    assert said.endswith(f"(model.attention={asked})")


def test_torchs_own_choice_on_a_cpu_is_named() -> None:
    assert chosen("auto") == "attention by flash, torch's choice"
    torch.backends.cuda.enable_flash_sdp(False)
    assert chosen("auto") == "attention by math, torch's choice"


def test_what_runs_is_asked_with_the_mask() -> None:
    assert chosen("auto", masked=True) == "attention by flash, torch's choice"  # CPUs read masks
    torch.backends.cuda.enable_flash_sdp(False)
    with pytest.raises(ConfigError, match=r"is cudnn, but torch computes .* by math"):
        chosen("cudnn", masked=True)


def test_a_kernel_that_says_it_runs_and_does_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs(query: Any, *, dropout: float, masked: bool) -> str:
        return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"

    def seconds(query: Any, *, dropout: float) -> float:
        if torch.backends.cuda.cudnn_sdp_enabled():
            raise RuntimeError("No valid execution plans built.")
        return 1e-3

    monkeypatch.setattr(attention, "running_kernel", runs)
    monkeypatch.setattr(attention, "pass_seconds", seconds)
    query = torch.zeros(2, 2, 16, 8)
    assert attention._timed(query, dropout=0.0, masked=False) == {"flash": 1e-3}


def test_a_kernel_that_does_not_run_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is cudnn, but torch computes .* by math"):
        chosen("cudnn")


@pytest.mark.parametrize("faster", ["cudnn", "flash"])
def test_auto_takes_the_faster_of_those_that_run(
    monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    def enabled(query: Any, *, dropout: float, masked: bool) -> str:
        return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"

    def seconds(query: Any, *, dropout: float) -> float:
        return 1e-3 if enabled(query, dropout=dropout, masked=False) == faster else 2e-3

    monkeypatch.setattr(attention, "running_kernel", enabled)
    monkeypatch.setattr(attention, "pass_seconds", seconds)
    gpu = types.SimpleNamespace(
        device=torch.device("cpu"),
        device_kind="cuda",
        first_does=lambda action: action(),
        together=lambda action: action(),
    )
    said = chosen("auto", world=gpu)  # type: ignore[arg-type]
    assert torch.backends.cuda.cudnn_sdp_enabled() == (faster == "cudnn")
    assert torch.backends.cuda.flash_sdp_enabled() == (faster == "flash")
    name = {"cudnn": "cudnn", "flash": "FlashAttention-2"}[faster]
    assert said.startswith(f"attention by {name} (cudnn ")
    assert f"{faster} 1.00 ms" in said and "2.00 ms" in said


def test_flash_attention_3_is_for_hopper_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash_attn_interface"}
    monkeypatch.setattr(
        attention.importlib.util, "find_spec", lambda name: name if name in installed else None
    )
    capability = HOPPER
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    assert flash_version(gpu, dropout=0.0) == 3
    assert flash_version(gpu, dropout=0.1) == 2
    assert flash_version(torch.device("cpu"), dropout=0.0) == 2
    capability = AMPERE
    assert flash_version(gpu, dropout=0.0) == 2
    capability = HOPPER
    installed.clear()
    assert flash_version(gpu, dropout=0.0) == 2
