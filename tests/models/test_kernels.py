"""The choice of the attention kernel, by device, settings and failures."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention
from refocused.config.run_config import ModelConfig
from refocused.models import kernels
from refocused.models.kernels import choose_kernels, flash_version
from refocused.system.errors import ConfigError
from refocused.system.world import World

PLAN = BatchPlan(micro=2, accumulation=1, world_size=1, sequence_length=16)
HOPPER, AMPERE = (9, 0), (8, 0)
IN_SHAPE = (2, 16)


@pytest.fixture(autouse=True)
def torchs_own_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "choose_head", lambda *args, **options: "a head")
    cuda = torch.backends.cuda
    before = (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])
    cuda.enable_mem_efficient_sdp(before[2])


def a_gpu(*, reason_elsewhere: str | None = None) -> Any:
    """Two ranks whose passes take the paths of a GPU, on this CPU; the other one may fail."""
    return types.SimpleNamespace(
        device=torch.device("cpu"),
        device_kind="cuda",
        gather=lambda reason: [reason, reason_elsewhere],
        on_rank_0=lambda action: action(),
        on_all_ranks=lambda action: action(),
    )


def chosen(
    world: Any, *, masked: bool = False, key_heads: int = 2, **settings: Any
) -> tuple[str, Any]:
    """Return what is reported, and the shape that has a block mask."""
    model: Any = types.SimpleNamespace(
        network=types.SimpleNamespace(get_output_embeddings=lambda: None),
        document_id=7 if masked else None,
        block_shape=None,
    )
    said = choose_kernels(
        model,
        Attention(heads=2, bias=True, key_heads=key_heads, head_width=8),
        config=ModelConfig(preset="given", sequence_length=16, **settings),
        dtype=torch.float32,
        plan=PLAN,
        world=world,
    )
    assert said.endswith(", a head")
    return said.removesuffix(", a head"), model.block_shape


@pytest.fixture
def milliseconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Fake a GPU with these kernel times; kernels without a time raise."""
    times = {"cudnn": 1.0, "flash": 2.0}

    def running(query: Tensor, *, dropout: float, masked: bool = False, key_heads: Any = 2) -> str:
        cuda = torch.backends.cuda
        if cuda.cudnn_sdp_enabled():
            return "cudnn"
        if cuda.flash_sdp_enabled() and not masked:
            return "flash"
        return "memory-efficient" if cuda.mem_efficient_sdp_enabled() else "math"

    def seconds(query: Tensor, *, dropout: float, key_heads: int) -> float:
        kernel = running(query, dropout=dropout)
        if kernel not in times:
            raise RuntimeError("No valid execution plans built.")
        return times[kernel] / 1e3

    monkeypatch.setattr(kernels, "running_kernel", running)
    monkeypatch.setattr(kernels, "pass_seconds", seconds)
    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: lambda query, *rest: query)
    return times


@pytest.mark.parametrize("asked", ["flash", "math"])
def test_the_requested_kernel_runs(asked: str) -> None:
    said, _ = chosen(World(), attention=asked)
    query = torch.zeros(2, 2, 16, 8, requires_grad=True)
    assert kernels.running_kernel(query, dropout=0.0) == asked
    assert said.endswith(f"(model.attention={asked})")


@pytest.mark.parametrize("masked", [True, False])
def test_a_kernel_that_does_not_run_is_rejected(masked: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    with pytest.raises(ConfigError, match=r"is cudnn, but torch uses math for"):
        chosen(World(), attention="cudnn", masked=masked)


def test_torchs_choice_on_a_cpu_is_reported() -> None:
    assert chosen(World()) == ("attention by flash, torch's choice", None)
    assert chosen(World(), key_heads=1) == ("attention by flash, torch's choice", None)
    said, shape = chosen(World(), masked=True)  # CPU kernels support masks
    reason = "FlexAttention does not train on a CPU"
    mask = f"within documents by a dense mask ({reason})"
    assert (said, shape) == (f"attention by flash, torch's choice, {mask}", None)
    torch.backends.cuda.enable_flash_sdp(False)
    assert chosen(World())[0] == "attention by math, torch's choice"


@pytest.mark.parametrize("faster", ["cudnn", "flash"])
def test_auto_uses_the_faster_kernel(milliseconds: dict[str, float], faster: str) -> None:
    milliseconds[faster] = 0.5
    said, _ = chosen(a_gpu())
    assert torch.backends.cuda.cudnn_sdp_enabled() == (faster == "cudnn")
    assert torch.backends.cuda.flash_sdp_enabled() == (faster == "flash")
    name = {"cudnn": "cudnn", "flash": "FlashAttention-2"}[faster]
    assert said.startswith(f"attention by {name} (cudnn ")
    assert f"{faster} 0.50 ms" in said and said.count(" ms") == 2


def test_a_kernel_that_wrongly_claims_to_run_is_excluded(milliseconds: dict[str, float]) -> None:
    del milliseconds["cudnn"]
    assert chosen(a_gpu())[0] == "attention by FlashAttention-2 (flash 2.00 ms)"


@pytest.mark.usefixtures("milliseconds")
def test_a_deterministic_run_does_not_depend_on_timings() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(a_gpu())[0] == "attention by cudnn, torch's choice"
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_attention_3_is_for_hopper_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(*, capability: Any, installed: bool, dropout: float, kind: str = "cuda") -> int:
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: installed or None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return flash_version(torch.device(kind), dropout=dropout)

    assert version(capability=HOPPER, installed=True, dropout=0.0) == 3
    assert version(capability=HOPPER, installed=True, dropout=0.1) == 2
    assert version(capability=HOPPER, installed=True, dropout=0.0, kind="cpu") == 2
    assert version(capability=AMPERE, installed=True, dropout=0.0) == 2
    assert version(capability=HOPPER, installed=False, dropout=0.0) == 2


@pytest.mark.usefixtures("milliseconds")
@pytest.mark.parametrize(
    ("settings", "attention", "reason"),
    [
        ({"dropout": 0.1}, "attention by cudnn, torch's choice", "FlexAttention has no dropout"),
        *(
            ({"attention": asked}, f"attention by {asked} ({why})", why)
            for asked, why in (("cudnn", "model.attention=cudnn"), ("math", "model.attention=math"))
        ),
        (
            {"reason_elsewhere": "FlexAttention failed: no triton"},
            "attention by cudnn, torch's choice",
            "FlexAttention failed: no triton",
        ),
    ],
)
def test_documents_use_a_dense_mask_without_flex_attention(
    settings: dict[str, Any], attention: str, reason: str
) -> None:
    world = a_gpu(reason_elsewhere=settings.pop("reason_elsewhere", None))
    said, shape = chosen(world, masked=True, **settings)
    assert said == f"{attention}, within documents by a dense mask ({reason})"
    assert shape is None


@pytest.mark.usefixtures("milliseconds")
def test_flex_attention_masks_documents_on_gpus_if_it_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "attention by FlexAttention, within documents by a block mask"
    assert chosen(a_gpu(), masked=True) == (said, IN_SHAPE)

    def failing(*tensors: Tensor) -> Tensor:
        raise RuntimeError("no\ntriton")

    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: failing)
    said, shape = chosen(a_gpu(), masked=True)
    assert said.endswith("a dense mask (FlexAttention failed: RuntimeError: no triton)")
    assert shape is None


@pytest.mark.usefixtures("milliseconds")
def test_flash_is_rejected_for_masked_documents() -> None:
    with pytest.raises(
        ConfigError, match=r"is flash, but torch uses memory-efficient .*mask_documents"
    ):
        chosen(a_gpu(), masked=True, attention="flash")
    said, _ = chosen(a_gpu(), attention="flash")
    assert said == "attention by FlashAttention-2 (model.attention=flash)"
