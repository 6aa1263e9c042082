"""What a pass is computed to keep against the tensors that live after a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_memory import LiveMemory
from memory_cases import CHUNK, ROWS, Case, shape_of

from refocused.config.model import ModelConfig
from refocused.estimate.activations import activation_memory
from refocused.models.build import build_model

CASES = [
    Case(0, family, dtype, recomputes)  # type: ignore[arg-type]
    for family in ("gpt2", "gpt_neox", "resonance", "ten")
    for dtype in ("bf16", "fp32")
    for recomputes in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_keep_what_is_computed(case: Case) -> None:
    model = build_model(
        shape_of(case).settings,
        vocabulary=ROWS,
        dropout=0.0,
        activation_checkpointing=case.activation_checkpointing,
        chunk_tokens=CHUNK,
    ).to(torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    ids = torch.randint(ROWS, (case.micro, case.length))
    with LiveMemory() as memory:
        memory.add(*model.parameters(), *model.buffers(), ids)
        before = memory.bytes
        loss = model(ids, ids)
        kept = memory.peak - before
        memory.peak = 0
        loss.backward()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    settings = ModelConfig(
        preset="counted",
        sequence_length=case.length,
        activation_checkpointing=case.activation_checkpointing,
        head_chunk_tokens=CHUNK,
    )
    computed = activation_memory(shape_of(case), model=settings, micro=case.micro, dtype=case.dtype)
    largest = computed.blocks + max(computed.head, computed.recomputed)
    if not case.activation_checkpointing:
        assert computed.blocks + computed.head == pytest.approx(kept, rel=0.06)
    assert kept <= largest * 1.05
    assert memory.peak - before <= (largest + gradients) * 1.05


def test_dropout_keeps_two_masks_a_block() -> None:
    case = Case(0)
    plain: dict[str, Any] = {"preset": "counted", "sequence_length": case.length}
    without, with_masks = (
        activation_memory(
            shape_of(case), model=ModelConfig(**plain, dropout=dropout), micro=1, dtype="bf16"
        )
        for dropout in (0.0, 0.1)
    )
    shape = shape_of(case)
    assert with_masks.blocks - without.blocks == shape.layers * case.length * 2 * shape.width
