"""The elements and the work of one block of each family, by arithmetic alone."""

from __future__ import annotations

import math

from refocused.config.model_shape import Attention, Eigenstates, ModelShape

CELLS = 2  # of a block of the ten family at each scale


def block_parameters(shape: ModelShape) -> int:
    """Count the parameters of one block.

    With D the width: two norms (4 D), the feed-forward part's two matrices and biases, and

    * attention: four D x D matrices and their biases;
    * resonance: gate and output (D x D, with biases), magnitude and phase of F resonators for each
      channel (2 F D), interference (F x F), damping and frequency (2 F);
    * ten, for each scale two cells of K modes: complex input and real output (3 K D), coupling
      (K x K), decay and frequency (2 K).
    """
    width, inner, mixer = shape.width, shape.ffn_width, shape.mixer
    feed_forward = 2 * width * inner + inner + width
    if isinstance(mixer, Attention):
        mixing = 4 * width**2 + (4 * width if mixer.bias else 0)
    elif isinstance(mixer, Eigenstates):
        cell = 3 * mixer.count * width + mixer.count**2 + 2 * mixer.count
        mixing = len(mixer.scales) * CELLS * cell
    else:
        resonators = 2 * mixer.count * width + mixer.count**2 + 2 * mixer.count
        mixing = 2 * width**2 + 2 * width + resonators
    return mixing + feed_forward + 4 * width


def block_elements(shape: ModelShape) -> float:
    """Count the elements of the matrices of one block that every token is multiplied by.

    A matrix that takes averages of s tokens counts for 1/s of its elements.
    """
    if isinstance(shape.mixer, Eigenstates):
        mixing = 3 * modes_a_token(shape.mixer) * shape.width
        return mixing + 2 * shape.width * shape.ffn_width
    matrices = 4 if isinstance(shape.mixer, Attention) else 2
    return matrices * shape.width**2 + 2 * shape.width * shape.ffn_width


def mixing_flops(shape: ModelShape, *, sequence_length: int) -> float:
    """Return the FLOPs of a block for one token, forward and backward, in which positions meet.

    Attention is counted in full, not its causal half: 12 D T. A convolution by FFT transforms input
    and output of each channel, each 2 T real numbers (2.5 n log2 n FLOPs for n of them), and
    multiplies T complex ones (6 FLOPs); the backward pass does that twice. Building the kernel is
    not counted: it is shared by all sequences of a micro-batch. A mode takes a complex product and
    sum (8 FLOPs), thrice: what the recurrence is, not what its chunked form computes.

    Args:
        shape: The model.
        sequence_length: Tokens of a window, T.
    """
    if isinstance(shape.mixer, Attention):
        return 12.0 * shape.width * sequence_length
    if isinstance(shape.mixer, Eigenstates):
        return 3.0 * 8.0 * modes_a_token(shape.mixer)
    transforms = 2 * 2.5 * 2 * math.log2(2 * sequence_length)
    return 3.0 * shape.width * (transforms + 6)


def modes_a_token(mixer: Eigenstates, *, averaged: bool = True) -> float:
    """Count the modes of a block, those on averages of s tokens as 1/s if `averaged`."""
    return CELLS * mixer.count * sum(1 / scale if averaged else 1 for scale in mixer.scales)
