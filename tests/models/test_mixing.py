"""What computes attention within documents, by the device's properties and the settings."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention
from refocused.config.run_config import ModelConfig
from refocused.models import kernels
from refocused.models.kernels import choose_mixing
from refocused.system.errors import ConfigError
from refocused.system.world import World

PLAN = BatchPlan(micro=2, accumulation=1, world_size=1, sequence_length=16)
NO_TRAINING = "FlexAttention does not train on a CPU"


@pytest.fixture(autouse=True)
def torchs_own_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("refocused.models.kernels.choose_head", lambda *args, **options: "a head")
    cuda = torch.backends.cuda
    before = (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])
    cuda.enable_mem_efficient_sdp(before[2])


def a_gpu(world: World = World()) -> Any:  # noqa: B008 - frozen
    """Ranks whose passes take the paths of a GPU, on this CPU."""
    return types.SimpleNamespace(
        device=torch.device("cpu"),
        device_kind="cuda",
        gather=world.gather,
        on_rank_0=world.on_rank_0,
        on_all_ranks=world.on_all_ranks,
    )


def as_on_a_gpu(query: Tensor, *, dropout: float, masked: bool = False) -> str:
    """What torch answers on a GPU: cuDNN and flash where they are allowed, flash without a mask."""
    cuda = torch.backends.cuda
    if cuda.cudnn_sdp_enabled():
        return "cudnn"
    if cuda.flash_sdp_enabled() and not masked:
        return "flash"
    return "memory-efficient" if cuda.mem_efficient_sdp_enabled() else "math"


def chosen(world: Any, *, masked: bool = True, **settings: Any) -> tuple[str, Any]:
    """Return what is said, and the shape that has a block mask."""
    model = types.SimpleNamespace(
        network=types.SimpleNamespace(
            config=types.SimpleNamespace(hidden_size=16), get_output_embeddings=lambda: None
        ),
        document_id=7 if masked else None,
        block_shape=None,
    )
    config = ModelConfig(preset="given", sequence_length=16, **settings)
    said = choose_mixing(
        model,  # type: ignore[arg-type]
        Attention(heads=2, bias=True, rotary_fraction=None),
        config=config,
        dtype=torch.float32,
        plan=PLAN,
        world=world,
    )
    assert said.endswith(", a head")
    return said.removesuffix(", a head"), model.block_shape


@pytest.fixture
def flex_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "running_kernel", as_on_a_gpu)
    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: lambda query, *rest: query)


@pytest.mark.usefixtures("flex_runs")
def test_on_a_gpu_flex_attention_keeps_documents_apart() -> None:
    said = "attention by FlexAttention, within documents by a block mask"
    assert chosen(a_gpu()) == (said, (2, 16))


def test_on_a_cpu_documents_get_a_dense_mask() -> None:
    said, shape = chosen(World())
    assert (
        said
        == f"attention by flash, torch's choice, within documents by a dense mask ({NO_TRAINING})"
    )
    assert shape is None
    said, shape = chosen(World(), masked=False)
    assert (said, shape) == ("attention by flash, torch's choice", None)


@pytest.mark.usefixtures("flex_runs")
def test_dropout_needs_a_dense_mask_by_torchs_own_choice() -> None:
    said, shape = chosen(a_gpu(), dropout=0.1)
    assert said.startswith("attention by cudnn, torch's choice, ")
    assert said.endswith("a dense mask (FlexAttention has no dropout)")
    assert shape is None


@pytest.mark.usefixtures("flex_runs")
@pytest.mark.parametrize("asked", ["cudnn", "math"])
def test_a_kernel_that_reads_masks_may_be_asked_for(asked: str) -> None:
    said, shape = chosen(a_gpu(), attention=asked)
    assert said == (
        f"attention by {asked} (model.attention={asked}), within documents by a dense mask "
        f"(model.attention={asked})"
    )
    assert shape is None


@pytest.mark.usefixtures("flex_runs")
def test_flash_is_refused_for_masked_documents() -> None:
    with pytest.raises(ConfigError, match=r"is flash, .* by memory-efficient .*mask_documents"):
        chosen(a_gpu(), attention="flash")
    said, _ = chosen(a_gpu(), masked=False, attention="flash")
    assert said == "attention by FlashAttention-2 (model.attention=flash)"


def test_where_flex_attention_fails_on_one_rank_all_take_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_rank(world: World) -> tuple[str, Any]:
        return chosen(a_gpu(dataclasses.replace(world)))

    turns = iter([None, RuntimeError("no\ntriton")])

    def kernel(query: Tensor, *rest: Any) -> Tensor:
        error = next(turns)
        if error is not None:
            raise error
        return query

    monkeypatch.setattr(kernels, "running_kernel", as_on_a_gpu)
    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: kernel)
    for said, shape in results(on_two_ranks(on_rank)):
        assert said.endswith("a dense mask (FlexAttention failed: RuntimeError: no triton)")
        assert shape is None
