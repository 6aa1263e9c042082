"""Activation memory of a forward and backward pass, by family.

Counted from what autograd keeps in eager mode, each tensor once. Some tensors grow with the tokens
of a micro-batch, others are the same for all its windows: kernels and tables of powers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from refocused.config.model_shape import Eigenstates, ModelShape, Resonators
from refocused.config.optimization import Dtype
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import CELLS

DEFAULT_CHUNK = 64  # of the ten family, where the shape does not say it
FINE = 256  # powers of a resonator come from tables of so many fine and T / 256 coarse ones
TABLE_BYTES = 40  # kept of such a table's element: angle, size, cosine, sine in float64, and both
SPECTRUM_BYTES = 2**28  # of one spectrum: more channels are transformed in turns
SPECTRA = 5  # that live at once while a convolution is differentiated (of several windows, 4)
# Tensors of the inner width that eager autograd keeps for an activation: its input and its output.
_KEPT_BY_ACTIVATION = 2
# Of the residual width: GPT-2 keeps both norms' inputs and outputs, q, k, v (3) and the attention's
# output. NeoX keeps rotated q and k besides, and a copy of the attention's output.
_KEPT_BY_GPT2 = 8
_KEPT_BY_NEOX = 10
_STATISTICS = 16  # of two norms, for each token: mean and deviation in float32
_MASK_BLOCK = 128  # tokens on a side of a block of FlexAttention's mask (`models/attention.py`)


class _BlockMemory(NamedTuple):
    """Bytes that a block's mixing keeps: a token, for all windows, and while differentiated."""

    a_token: float
    shared: float = 0.0
    working: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What a pass keeps on a rank, in bytes."""

    blocks: int  # from the forward to the backward pass, of all blocks
    head: int  # in the head, at the end of the forward pass
    recomputed: int  # of one block, while its gradient is taken


def activation_memory(
    shape: ModelShape, *, model: ModelConfig, micro: int, dtype: Dtype, masked: bool = False
) -> ActivationMemory:
    """Return what a pass keeps.

    The attention is sdpa's. Compiled blocks keep the same with attention and up to 20 % less
    without: their graphs recompute nothing that a product needs again. Counted from what autograd
    saves in transformers 5.23's blocks and in ours: s bytes an element, and float32 for the norms'
    statistics, the attention's log-sum-exp, one a head, and most of what mixes without attention.
    Dropout keeps a mask of one byte for each element, as it does on a GPU.

    Args:
        shape: The model.
        model: How it is computed.
        micro: Windows of a pass.
        dtype: What the pass computes in.
        masked: Whether documents are, on a GPU: what FlexAttention does not run for (dropout, a
            kernel that is asked for) has a dense mask, which sdpa turns into numbers in each block.
    """
    size = 4 if dtype == "fp32" else 2
    length = model.sequence_length
    tokens = micro * length
    mixing = _mixing_memory(shape, size=size, rows=micro, length=length)
    inner = size * _KEPT_BY_ACTIVATION * shape.ffn_width
    dropout_masks = 2 * shape.width if model.dropout > 0 else 0
    a_token = int(mixing.a_token) + inner + _STATISTICS + dropout_masks
    block = tokens * a_token + int(mixing.shared)
    mask, is_dense = 0, model.dropout > 0 or model.attention != "auto"
    if masked:
        mask = mask_bytes(rows=micro, length=length, is_dense=is_dense)
        block += size * mask if is_dense else 0
    head = _head_bytes(shape, model=model, tokens=tokens, size=size)
    # Alive while a block's feed-forward part is differentiated, beside what was kept.
    backward = max(tokens * size * (2 * shape.width + shape.ffn_width), int(mixing.working))
    if model.activation_checkpointing:
        entries = shape.layers * tokens * size * shape.width
        return ActivationMemory(entries + mask, head, block + backward)
    mask = 0 if is_dense else mask  # the numbers are kept, a dense mask itself is not
    return ActivationMemory(shape.layers * block + mask, head, backward)


def mask_bytes(*, rows: int, length: int, is_dense: bool) -> int:
    """Return the bytes of what keeps documents apart in a pass.

    A dense mask has a byte for each pair of tokens. FlexAttention's has a place of 8 bytes for each
    token, and numbers of 4 bytes in four tables of its blocks, with their counts.
    """
    if is_dense:
        return rows * length**2
    blocks = -(-length // _MASK_BLOCK)
    return rows * (8 * length + 4 * 4 * blocks * (blocks + 1))


def _mixing_memory(shape: ModelShape, *, size: int, rows: int, length: int) -> _BlockMemory:
    """Return what a block keeps beside its feed-forward part's inner width."""
    mixer, width = shape.mixer, shape.width
    if isinstance(mixer, Resonators):
        # For each token the norms' inputs and outputs, the gate, the convolution's output, and the
        # product of the two; for all windows the kernel [D, T], from the powers [2, F, T].
        tables = TABLE_BYTES * mixer.count * (min(FINE, length) + length / FINE)
        spectra = min(SPECTRUM_BYTES, 8 * rows * length * width)
        return _BlockMemory(
            7 * size * width,
            4 * length * (width + 2 * mixer.count) + tables + 8 * 4 * mixer.count * width,
            SPECTRA * spectra + 4 * length * width,
        )
    if isinstance(mixer, Eigenstates):
        return _eigenstates_memory(mixer, shape, size=size, rows=rows, length=length)
    residual = _KEPT_BY_GPT2
    if shape.family != "gpt2":
        residual = _KEPT_BY_NEOX + (not shape.settings.get("use_parallel_residual", True))
    return _BlockMemory(size * residual * width + 4 * mixer.heads)


def _eigenstates_memory(
    mixer: Eigenstates, shape: ModelShape, *, size: int, rows: int, length: int
) -> _BlockMemory:
    """Return what the cells of all scales keep.

    For each token the norms' inputs and outputs; for each token of a scale, M modes: inputs
    `[2, M]` in float32 and what is read out, in the pass's precision; for each chunk the states
    that doubling adds to; for all windows the Toeplitz matrices `[2, M, C, C + 1]` in float32 and
    the powers that they are made of.
    """
    modes = CELLS * mixer.count
    a_token, shared, working = 2.0 * size * shape.width, 0.0, 0.0
    for scale in mixer.scales:
        tokens = max(1, length // scale)
        chunk = min(shape.settings.get("chunk_size", DEFAULT_CHUNK), tokens)
        rounds = math.ceil(math.log2(max(2, tokens / chunk)))
        means = size * shape.width if scale > 1 else 0
        states = 8 * modes * (rounds + 2) / chunk
        a_token += (modes * (8 + size) + means + states) / scale
        toeplitz = 8 * modes * chunk * (chunk + 1)
        shared += toeplitz + TABLE_BYTES * modes * (chunk + 1) + 4 * 4 * modes * shape.width
        working = max(working, 8 * modes * tokens * rows + toeplitz)
    return _BlockMemory(int(a_token) + 2 * size * shape.width, shared, working)


def _head_bytes(shape: ModelShape, *, model: ModelConfig, tokens: int, size: int) -> int:
    """Return the most that the final norm and the chunked loss, the largest form, hold at once.

    The forward pass holds the norm's input and output, the gradient of the hidden states, that of
    the weight in float32, and a chunk's logits, with their softmax in float32 where that is another
    type. The backward pass has no logits, scales both gradients in place, and casts the weight's.
    """
    rows = shape.padded_vocabulary(model.vocabulary_multiple)
    weight = rows * shape.width
    a_logit = size + (4 if size < 4 else 0)
    chunk = a_logit * min(model.head_chunk_tokens, tokens) * rows
    cast = size * weight if size < 4 else 0
    return 3 * size * tokens * shape.width + 4 * weight + max(chunk, cast)
