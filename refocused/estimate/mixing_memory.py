"""The memory of a block's mixing of positions without attention, by arithmetic alone.

Counted from what autograd keeps in eager mode, each tensor once. Some tensors grow with the tokens
of a micro-batch, others are the same for all its windows: kernels and tables of powers.
"""

from __future__ import annotations

import dataclasses
import math

from refocused.config.model_shape import Eigenstates, ModelShape, Resonators
from refocused.estimate.blocks import CELLS

DEFAULT_CHUNK = 64  # of the ten family, where the shape does not say it
FINE = 256  # powers of a resonator come from tables of so many fine and T / 256 coarse ones
TABLE_BYTES = 40  # kept of such a table's element: angle, size, cosine, sine in float64, and both
SPECTRUM_BYTES = 2**28  # of one spectrum: more channels are transformed in turns
SPECTRA = 5  # that live at once while a convolution is differentiated (of several windows, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class MixingMemory:
    """What the mixing part of one block keeps, in bytes.

    Attributes:
        a_token: For each token of a micro-batch.
        shared: For all of its windows together.
        working: Besides, while the mixing is differentiated.
    """

    a_token: float
    shared: float
    working: float


def resonators_memory(
    mixer: Resonators, shape: ModelShape, *, size: int, rows: int, length: int
) -> MixingMemory:
    """Return what gated resonators keep.

    For each token the norm's input and output, the gate, the convolution's output, and the product
    of the two; for all windows the kernel `[D, T]`, from the powers `[2, F, T]`, in float32.

    Args:
        mixer: The resonators.
        shape: The model.
        size: Bytes of an element that the pass computes in.
        rows: Windows of a pass.
        length: Tokens of a window.
    """
    tables = TABLE_BYTES * mixer.count * (min(FINE, length) + length / FINE)
    weights = 8 * 4 * mixer.count * shape.width
    spectra = min(SPECTRUM_BYTES, 8 * rows * length * shape.width)
    return MixingMemory(
        a_token=5 * size * shape.width,
        shared=4 * length * (shape.width + 2 * mixer.count) + tables + weights,
        working=SPECTRA * spectra + 4 * length * shape.width,
    )


def eigenstates_memory(
    mixer: Eigenstates, shape: ModelShape, *, size: int, rows: int, length: int
) -> MixingMemory:
    """Return what the cells of all scales keep; the arguments are those of `resonators_memory`.

    For each token the norm's input and output; for each token of a scale, M modes: inputs
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
    return MixingMemory(a_token, shared, working)
