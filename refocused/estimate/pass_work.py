"""The FLOPs and bytes of one pass on one GPU, as computed: with recomputation, by arithmetic alone.

Counted in `tests/estimate/test_pass_work.py`: the FLOPs of every matrix product, and the bytes that
every other operation reads and writes. MFU has its own convention (`estimate/flops.py`).
"""

from __future__ import annotations

import dataclasses

from refocused.config.model_shape import Attention, Eigenstates, ModelShape, Resonators
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import block_elements, modes_a_token
from refocused.estimate.memory import DEFAULT_CHUNK

# Elements that a block moves for each token beside its products and what mixes positions, as
# multiples of the residual width, forward and backward. Eager: counted. Compiled: counted for GPT-2
# in the graphs of torch 2.13's inductor, which saves little there (norms and GELU are one kernel
# each in eager mode too), and for resonance; NeoX without its rotation's copies: assumed.
_EAGER = {"gpt2": (10, 23), "gpt_neox": (21, 48), "resonance": (15, 27), "ten": (10, 13)}
_COMPILED = _EAGER | {"gpt2": (9, 24), "gpt_neox": (11, 28), "resonance": (12, 22)}
_INNER = (2, 4)  # of the inner width: GELU, its derivative, and the sum for a bias's gradient
# A Fourier transform of more points than a GPU's shared memory holds goes over them twice: assumed.
_TRANSFORM_SWEEPS = 2
_BYTES_A_LOGIT = {2: 26, 4: 16}  # of the chunked loss: largest logit, softmax, slope


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of what is computed, and bytes of what is moved."""

    products: float = 0.0  # FLOPs of the blocks' products, in the precision of the passes
    head: float = 0.0  # FLOPs of the head's
    exact: float = 0.0  # FLOPs of products that stay in float32: the scan's
    attention: float = 0.0  # FLOPs of attention over earlier positions alone
    mixing: float = 0.0  # bytes moved where positions meet without attention
    elementwise: float = 0.0  # bytes moved by everything else

    def __add__(self, other: Work) -> Work:
        """Return both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(mine + its for mine, its in pairs))

    def times(self, factor: float) -> Work:
        """Return the work done so often."""
        return Work(*(factor * part for part in dataclasses.astuple(self)))


def pass_work(shape: ModelShape, *, model: ModelConfig, micro: int, size: int) -> tuple[Work, Work]:
    """Return the forward part of a training pass, and the backward part with what it recomputes.

    The pass has `micro` windows and computes in elements of `size` bytes.
    """
    forward, backward = _mixing_work(shape, size=size, rows=micro, length=model.sequence_length)
    tokens = micro * model.sequence_length
    products = 2.0 * tokens * block_elements(shape)
    moved = (_EAGER if model.compile == "off" else _COMPILED)[shape.family]
    of_width, of_inner = size * tokens * shape.width, size * tokens * shape.ffn_width
    forward += Work(products, elementwise=moved[0] * of_width + _INNER[0] * of_inner)
    backward += Work(2 * products, elementwise=moved[1] * of_width + _INNER[1] * of_inner)
    if model.activation_checkpointing:
        backward += forward
        if model.compile == "off":  # torch stops before the last product, whose result is not kept
            backward += Work(-2.0 * tokens * shape.width * shape.ffn_width)
    return forward.times(shape.layers) + _head_work(
        shape, model=model, tokens=tokens, size=size
    ), backward.times(shape.layers)


def _head_work(shape: ModelShape, *, model: ModelConfig, tokens: int, size: int) -> Work:
    """Return the work of the head, whose loss takes its gradients in the forward pass."""
    rows = shape.padded_vocabulary(model.vocabulary_multiple)
    weight = rows * shape.width
    chunks = -(-tokens // model.head_chunk_tokens)
    # Chunks add to the weight's gradient in float32; it is scaled and cast at the end.
    summed = weight * ((8 + size) * (chunks - 1) + 12 + 2 * size)
    return Work(
        head=6.0 * tokens * weight, elementwise=_BYTES_A_LOGIT[size] * tokens * rows + summed
    )


def _mixing_work(shape: ModelShape, *, size: int, rows: int, length: int) -> tuple[Work, Work]:
    """Return what one block takes for positions to meet, forward and backward."""
    tokens, width, mixer = rows * length, shape.width, shape.mixer
    if isinstance(mixer, Attention):
        # Two products forward and five backward (Dao 2023, FlashAttention-2), their causal half.
        flops = 2.0 * tokens * length * width
        return Work(attention=flops), Work(attention=2.5 * flops)
    if isinstance(mixer, Resonators):
        return _resonators_work(mixer, size=size, tokens=tokens, length=length, width=width)
    chunk = min(shape.settings.get("chunk_size", DEFAULT_CHUNK), length)
    return _eigenstates_work(mixer, size=size, tokens=tokens, width=width, chunk=chunk)


def _resonators_work(
    mixer: Resonators, *, size: int, tokens: int, length: int, width: int
) -> tuple[Work, Work]:
    """Return the convolution's work; kernel and powers are shared by all windows."""
    products = 4.0 * mixer.count * width * length  # the kernel from cosines and sines
    forward = tokens * width * (2 * size + 32 + 28 * _TRANSFORM_SWEEPS)
    forward += length * (width * (8 + 12 * _TRANSFORM_SWEEPS) + 56 * mixer.count)
    backward = tokens * width * (3 * size + 84 + 40 * _TRANSFORM_SWEEPS)
    backward += length * (width * (29 + 28 * _TRANSFORM_SWEEPS) + 178 * mixer.count)
    return Work(products, mixing=forward), Work(2 * products, mixing=backward)


def _eigenstates_work(
    mixer: Eigenstates, *, size: int, tokens: int, width: int, chunk: int
) -> tuple[Work, Work]:
    """Return the work of the scan's chunked form; its Toeplitz matrices are shared by all windows.

    A kernel that replaces it where that is faster moves less.
    """
    modes, matrices = modes_a_token(mixer), modes_a_token(mixer, averaged=False)
    flops = tokens * modes * (4.0 * (chunk + 1) + 4)
    casts = 18 if size == 2 else 0
    coarse = sum(1 for scale in mixer.scales if scale > 1)  # averages, and their repetition
    forward = tokens * (modes * (36 + casts) + coarse * width * (5 * size + 7))
    forward += matrices * (64 * chunk * (chunk + 1) + 44 * width)
    backward = tokens * (modes * (105 + casts) + coarse * width * (3 * size + 22))
    backward += matrices * (74 * chunk * (chunk + 1) + 100 * width)
    return Work(exact=flops, mixing=forward), Work(exact=2 * flops, mixing=backward)
