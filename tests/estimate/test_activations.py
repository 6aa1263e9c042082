"""What a pass is computed to keep against the tensors that live after a forward pass."""

import dataclasses
from typing import Any, get_args

import pytest
import torch
from live_memory import LiveMemory
from memory_cases import CHUNK, FAMILIES, Case
from triton_interpreter import WHY_NOT

from refocused.estimate.memory import SPECTRA, ActivationMemory, activation_memory, mask_bytes
from refocused.models.attention import document_blocks, document_mask
from refocused.models.head_loss import HeadForm, head_loss
from refocused.models.resonance import causal_convolution_backward

CASES = [
    Case(0, family, dtype, recomputes)  # type: ignore[arg-type]
    for family in FAMILIES
    for dtype in ("bf16", "fp32")
    for recomputes in (False, True)
] + [
    Case(0, family, dtype, recomputes, recall=recall)  # type: ignore[arg-type]
    for family, dtype, recomputes, recall in (
        ("ten", "bf16", False, "memory"),
        ("ten", "fp32", True, "memory"),
        ("ten", "bf16", False, "hybrid"),
        ("resonance", "fp32", False, "memory"),
    )
]


def computed(case: Case, **changes: Any) -> ActivationMemory:
    return activation_memory(case.run(**changes), micro_batch_size=case.micro_batch_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_keep_what_is_computed(case: Case) -> None:
    model, ids = case.built().to(case.numbers), case.ids()
    with LiveMemory() as memory:
        memory.add(*model.parameters(), *model.buffers(), ids)
        before = memory.bytes
        loss = model(ids, ids)
        kept = memory.peak - before
        memory.peak = 0
        loss.backward()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    expected = computed(case)
    largest = expected.blocks + max(expected.head, expected.recomputed)
    if not case.activation_checkpointing:
        assert expected.blocks + expected.head == pytest.approx(kept, rel=0.06)
    assert kept <= largest * 1.05
    assert memory.peak - before <= (largest + gradients) * 1.05


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", get_args(HeadForm))
def test_no_form_of_the_head_holds_more_than_is_computed(form: HeadForm, dtype: Any) -> None:
    if form == "fused" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("needs a newer torch, such as 2.13")
    if form == "kernel" and WHY_NOT:
        pytest.skip(WHY_NOT)
    case, rows = Case(0, dtype=dtype, micro_batch_size=1), 8192
    shape = dataclasses.replace(case.shape(), vocabulary=rows, layers=0)
    run = dataclasses.replace(case.run(), shape=shape)
    held = activation_memory(run, micro_batch_size=1).head
    weight = torch.nn.Parameter(torch.randn(rows, shape.width, dtype=case.numbers))
    hidden = torch.randn(case.length, shape.width, dtype=case.numbers, requires_grad=True)
    labels = torch.zeros(case.length, dtype=torch.int64)
    with LiveMemory() as memory:
        memory.add(weight)
        before = memory.bytes
        memory.add(hidden)
        head_loss(form, hidden, weight, labels, chunk=CHUNK).backward()
    assert memory.peak - before <= 1.03 * held


@pytest.mark.parametrize(("rows", "held"), [(1, SPECTRA), (4, SPECTRA - 1)])
def test_a_convolution_holds_as_many_spectra_as_the_plan_says(rows: int, held: int) -> None:
    """The channels are few enough to be transformed at once, as a block of them on a GPU."""
    length, width = 4096, 60
    inputs, kernel = torch.randn(rows, length, width), torch.randn(width, length)
    with torch.profiler.profile(profile_memory=True) as profile:  # inside of operators too
        causal_convolution_backward(inputs, inputs, kernel)
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    working = most - inputs.nbytes - kernel.nbytes  # these are as large as the results
    assert working / (8 * rows * length * width) == pytest.approx(held, rel=0.05)


def test_dropout_keeps_two_masks_a_block() -> None:
    case = Case(0)
    more = computed(case, dropout=0.1).blocks - computed(case).blocks
    shape = case.shape()
    assert more == shape.layers * case.micro_batch_size * case.length * 2 * shape.width


@pytest.mark.parametrize(
    ("family", "dtype", "recomputes"),
    [
        *(("gpt2", dtype, recomputes) for dtype in ("bf16", "fp32") for recomputes in (0, 1)),
        ("qwen3", "bf16", 0),
    ],
)
def test_a_dense_mask_of_documents_is_kept_by_each_block(
    family: str, dtype: Any, recomputes: int
) -> None:
    kept: list[int] = []
    case = Case(0, family, dtype, activation_checkpointing=bool(recomputes))
    for document_id in (None, 7):
        model, ids = case.built(document_id=document_id).to(case.numbers), case.ids()
        with LiveMemory() as memory:
            memory.add(*model.parameters(), *model.buffers(), ids)
            before = memory.bytes
            loss = model(ids, ids)
            kept.append(memory.bytes - before)
            del loss
    # sdpa's, as a CPU's
    plain, masked = (computed(case, masked=m, attention="math").blocks for m in (False, True))
    assert masked - plain == pytest.approx(kept[1] - kept[0], rel=0.05)


@pytest.mark.parametrize("length", [100, 2048])
def test_the_bytes_of_a_mask_are_those_that_it_has(length: int) -> None:
    blocks = document_blocks(torch.arange(length).expand(2, -1))
    tables = sum(table.numel() * table.element_size() for table in blocks)
    assert mask_bytes(rows=2, length=length, is_dense=False) == tables
    dense = document_mask(torch.zeros(2, length, dtype=torch.long), document_id=7)
    assert mask_bytes(rows=2, length=length, is_dense=True) == dense.numel() == 2 * length**2
