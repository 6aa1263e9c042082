import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from refocused.models.attention import (
    MASK_BLOCK,
    TABLES,
    compiled_within_documents,
    document_blocks,
    document_mask,
    within_documents,
)
from refocused.models.causal_lm import document_positions

DOCUMENT = 7


def rows_of(borders, length):
    """Return token ids in which documents begin at the borders."""
    ids = torch.zeros(len(borders), length, dtype=torch.long)
    for row, places in zip(ids, borders, strict=True):
        row[[place for place in places if place < length]] = DOCUMENT
    return ids


def blocks_of(ids):
    return document_blocks(document_positions(ids, document_id=DOCUMENT))


EDGES = [  # one document alone; a border at the start and at the end; around the edges of blocks
    ([set()], 300),
    ([{0, 299}, {299}], 300),
    ([{127}, {128}, {129}, {0, 255, 256}], 384),
    ([set(range(257))], 257),
    ([{0}], 1),
]


@st.composite
def documents(draw):
    length = draw(st.integers(1, 600))
    place = st.integers(0, length - 1)
    return draw(st.lists(st.sets(place, max_size=20), min_size=1, max_size=3)), length


@settings(max_examples=40, deadline=None)
@given(documents())
@example(EDGES[0])
@example(EDGES[1])
@example(EDGES[2])
@example(EDGES[3])
def test_the_blocks_equal_torchs_blocks_of_the_dense_mask(drawn):
    borders, length = drawn
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
    for name, mine in zip(TABLES, tables, strict=True):
        other = getattr(wanted, name)
        assert mine.dtype == other.dtype and mine.is_contiguous()
        assert torch.equal(mine, other), name


def by_both(ids, *, width, dtype, device, key_heads=2):
    """Return the output and the gradients of FlexAttention, and those of a dense mask."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(len(ids), heads, ids.shape[1], width) for heads in (2, key_heads, key_heads, 2)]
    parts = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    query, key, value = (part.requires_grad_() for part in parts[:3])
    mask = document_mask(ids, document_id=DOCUMENT)
    within = compiled_within_documents() if device == "cuda" else within_documents
    outputs = (
        within(query, key, value, blocks_of(ids)),
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True),
    )
    return [
        [output, *torch.autograd.grad(output, (query, key, value), parts[3])] for output in outputs
    ]


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize(("borders", "length"), EDGES)
def test_flex_attention_within_documents_equals_the_dense_mask(
    borders, length, key_heads, monkeypatch
):
    # FlexAttention refuses a backward pass on CPUs, although it has one without inductor.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    ids = rows_of(borders, length)
    both = by_both(ids, width=16, dtype=torch.float32, device="cpu", key_heads=key_heads)
    for mine, dense in zip(*both, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "key_heads"), [(64, 2), (96, 2), (128, 2), (64, 1), (128, 1)])
@pytest.mark.parametrize(("borders", "length"), EDGES[:3])
def test_the_kernel_on_a_gpu_equals_the_dense_mask(borders, length, width, key_heads):
    ids = rows_of(borders, length).cuda()
    for mine, dense in zip(
        *by_both(ids, width=width, dtype=torch.bfloat16, device="cuda", key_heads=key_heads),
        strict=True,
    ):
        torch.testing.assert_close(mine, dense, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_mask_on_a_gpu_is_made_without_a_wait():
    ids = rows_of([{3, 500}, {128}], 1024).cuda()
    blocks_of(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        blocks_of(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
