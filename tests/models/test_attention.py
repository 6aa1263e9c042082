from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from refocused.models import kernels
from refocused.models.attention import (
    MASK_BLOCK,
    TABLES,
    compiled_within_documents,
    document_blocks,
    document_mask,
    within_documents,
)
from refocused.models.causal_lm import document_positions
from refocused.models.kernels import choose_attention, flash_version
from refocused.system.errors import ConfigError
from refocused.system.world import World

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
    query = torch.randn(2, 2, 16, 8, requires_grad=True)
    return choose_attention(asked, query, dropout=0.0, masked=masked, world=world)


@pytest.mark.parametrize("asked", ["flash", "math"])
def test_the_kernel_that_was_asked_for_runs(asked: str) -> None:
    said = chosen(asked)
    query = torch.zeros(2, 2, 16, 8, requires_grad=True)
    assert kernels.running_kernel(query, dropout=0.0) == asked
    assert said.endswith(f"(model.attention={asked})")


def test_torchs_own_choice_on_a_cpu_is_named() -> None:
    assert chosen("auto") == "attention by flash, torch's choice"
    torch.backends.cuda.enable_flash_sdp(False)
    assert chosen("auto") == "attention by math, torch's choice"


def test_a_deterministic_run_does_not_depend_on_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "pass_seconds", lambda query, dropout: 1e-3)
    query = torch.randn(2, 2, 16, 8, requires_grad=True)
    on_gpu = World(device_kind="cuda")
    assert "flash 1.00 ms" in choose_attention("auto", query, dropout=0, masked=False, world=on_gpu)
    torch.use_deterministic_algorithms(True)
    try:
        said = choose_attention("auto", query, dropout=0, masked=False, world=on_gpu)
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == "attention by flash, torch's choice"


def test_what_runs_is_asked_with_the_mask() -> None:
    assert chosen("auto", masked=True) == "attention by flash, torch's choice"  # CPUs read masks
    torch.backends.cuda.enable_flash_sdp(False)
    with pytest.raises(ConfigError, match=r"is cudnn, but torch computes .* by math"):
        chosen("cudnn", masked=True)


def test_a_kernel_that_says_it_runs_and_does_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs(query: Any, *, dropout: float) -> str:
        return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"

    def seconds(query: Any, *, dropout: float) -> float:
        if torch.backends.cuda.cudnn_sdp_enabled():
            raise RuntimeError("No valid execution plans built.")
        return 1e-3

    monkeypatch.setattr(kernels, "running_kernel", runs)
    monkeypatch.setattr(kernels, "pass_seconds", seconds)
    query = torch.zeros(2, 2, 16, 8)
    assert kernels._timed(query, dropout=0.0) == {"flash": 1e-3}


def test_a_kernel_that_does_not_run_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is cudnn, but torch computes .* by math"):
        chosen("cudnn")


@pytest.mark.parametrize("faster", ["cudnn", "flash"])
def test_auto_takes_the_faster_of_those_that_run(
    monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    def enabled(query: Any, *, dropout: float, masked: bool = False) -> str:
        return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"

    def seconds(query: Any, *, dropout: float) -> float:
        return 1e-3 if enabled(query, dropout=dropout) == faster else 2e-3

    monkeypatch.setattr(kernels, "running_kernel", enabled)
    monkeypatch.setattr(kernels, "pass_seconds", seconds)
    gpu = types.SimpleNamespace(
        device=torch.device("cpu"),
        device_kind="cuda",
        on_rank_0=lambda action: action(),
        on_all_ranks=lambda action: action(),
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
        kernels.importlib.util, "find_spec", lambda name: name if name in installed else None
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


DOCUMENT = 7


def rows_of(borders: list[set[int]], length: int) -> Tensor:
    """Token ids of which those at the borders begin documents."""
    ids = torch.zeros(len(borders), length, dtype=torch.long)
    for row, places in zip(ids, borders, strict=True):
        row[[place for place in places if place < length]] = DOCUMENT
    return ids


def blocks_of(ids: Tensor) -> tuple[Tensor, ...]:
    return document_blocks(document_positions(ids, document_id=DOCUMENT))


EDGES = [  # one document alone; a border at the start and at the end; around the edges of blocks
    ([set()], 300),
    ([{0, 299}, {299}], 300),
    ([{127}, {128}, {129}, {0, 255, 256}], 384),
    ([set(range(257))], 257),
    ([{0}], 1),
]


def assert_blocks_are_the_mask(borders: list[set[int]], length: int) -> None:
    """Compare the tables with those that torch makes of the dense mask itself."""
    ids = rows_of(borders, length)
    dense = document_mask(ids, document_id=DOCUMENT)
    begins, *tables = blocks_of(ids)
    place = torch.arange(length)
    assert torch.equal((begins[:, None, :, None] <= place) & (place <= place[:, None]), dense)
    wanted = create_block_mask(
        lambda row, head, query, key: dense[row, 0, query, key],
        len(ids),
        None,
        length,
        length,
        device="cpu",
        BLOCK_SIZE=MASK_BLOCK,
    )
    theirs = [getattr(wanted, name) for name in TABLES]
    for name, mine, other in zip(TABLES, tables, theirs, strict=True):
        assert mine.dtype == other.dtype and mine.is_contiguous()
        assert torch.equal(mine, other), name


@pytest.mark.parametrize(("borders", "length"), EDGES)
def test_the_blocks_are_those_of_the_dense_mask_at_the_edges(
    borders: list[set[int]], length: int
) -> None:
    assert_blocks_are_the_mask(borders, length)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_blocks_are_those_of_the_dense_mask(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 600))
    place = st.integers(0, length - 1)
    borders = data.draw(st.lists(st.sets(place, max_size=20), min_size=1, max_size=3))
    assert_blocks_are_the_mask(borders, length)


def by_both(ids: Tensor, *, width: int, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    """Return the output and the gradients of FlexAttention, and those of a dense mask."""
    draw = torch.Generator().manual_seed(1)
    shape = (len(ids), 2, ids.shape[1], width)
    parts = [torch.randn(shape, generator=draw).to(device, dtype) for _ in range(4)]
    query, key, value = (part.requires_grad_() for part in parts[:3])
    mask = document_mask(ids, document_id=DOCUMENT)
    within = compiled_within_documents() if device == "cuda" else within_documents
    outputs = (
        within(query, key, value, blocks_of(ids)),
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask),
    )
    return [
        [output, *torch.autograd.grad(output, (query, key, value), parts[3])] for output in outputs
    ]


@pytest.mark.parametrize(("borders", "length"), EDGES)
def test_flex_attention_within_documents_is_that_of_the_dense_mask(
    borders: list[set[int]], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without inductor it has a backward pass on CPUs, but refuses it all the same.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    ids = rows_of(borders, length)
    for mine, dense in zip(*by_both(ids, width=16, dtype=torch.float32, device="cpu"), strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize(("borders", "length"), EDGES[:3])
def test_the_kernel_on_a_gpu_is_that_of_the_dense_mask(
    borders: list[set[int]], length: int, width: int
) -> None:
    ids = rows_of(borders, length).cuda()
    for mine, dense in zip(
        *by_both(ids, width=width, dtype=torch.bfloat16, device="cuda"), strict=True
    ):
        torch.testing.assert_close(mine, dense, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_mask_on_a_gpu_is_made_without_a_wait() -> None:
    ids = rows_of([{3, 500}, {128}], 1024).cuda()
    blocks_of(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        blocks_of(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
