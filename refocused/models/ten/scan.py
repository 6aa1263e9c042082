"""The recurrence of temporal eigenstates, c_t = a c_{t-1} + beta_t: plain, and fast in chunks.

A mode k has a complex multiplier a_k = exp(d_k + i omega_k): d = ln|a| < 0 is its log-decay, omega
its frequency. Complex numbers are kept as pairs of real ones (index 0 real, 1 imaginary), for which
compilers make better code. Only Re(c) is wanted of every token; the whole c of the last one is the
state that generation carries. Modes come before sequences, `[2, K, B, T]`: what a mode multiplies
by is the same for all sequences, so that each product is one of a batch of K, and copies nothing.

Powers a^n are taken of n at once, in float64, and then rounded: a float32 multiplier applied
32,768 times would be off by 2e-3, and its argument n omega by 4e-3.

What stays in float32 whatever `precision.tf32` says: the powers, the states, and the products of
the chunked form with both, forward and backward. TF32 rounds their factors to 11 bits, an error of
5e-4 that the gradients of decays and frequencies sum up over all tokens. The products into and out
of the eigenstates (`ten_cells`) are the run's own: bf16 is what they are made for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The spectrum of temporal eigenstates: how long each mode remembers, and how fast it turns.
#
# A mode's horizon is 1 / (1 - |a|) tokens. Two numbers of each mode are learned, and both are kept
# as differences from where they began, which the shape alone gives:
#
#     |a|   = exp(-exp(nu_0 + rate_shift))            nu_0 = ln(-ln(1 - 1 / H_0))
#     omega = omega_0 + frequency_shift * exp(nu_0)
#
# DeepSpeed casts every parameter to bf16 in a bf16 run, eight significant bits. Of nu itself, 10.4
# for a horizon of 32,768, that would be a horizon wrong by 3 %; of omega itself, at 1 radian a
# token, a phase wrong by up to 128 radians when the horizon is reached, and a jump of that size at
# each update that rounds differently. Of the differences it is at most 0.2 % of how far the mode
# moved: a horizon that doubled is wrong by 0.14 %, a frequency that moved by a whole radian over
# its horizon ends 0.002 radians off, at every horizon alike.


GOLDEN_FRACTION = (math.sqrt(5) - 1) / 2
SUMMING = 2  # modes of four that begin by summing up; neighbours go to different cells


@dataclasses.dataclass(frozen=True, slots=True)
class Spectrum:
    """The modes of a recurrence, `[K]` each, in float64."""

    log_decay: Tensor  # ln|a|, below 0
    frequency: Tensor  # omega in radians a token

    @property
    def horizon_tokens(self) -> Tensor:
        """After how many tokens a mode has forgotten 63 % of what it saw, 1 / (1 - |a|)."""
        return -1 / torch.expm1(self.log_decay)

    @property
    def gain(self) -> Tensor:
        """What keeps a mode's variance at that of its input, whatever its horizon.

        sqrt(1 - |a|^2) (Orvieto et al. 2023, Resurrecting Recurrent Neural Networks, 3.4).
        """
        return (-torch.expm1(2 * self.log_decay)).sqrt()


def initial_spectrum(modes: int, *, longest: int, device: torch.device | str = "cpu") -> Spectrum:
    """Return the modes that training begins with.

    Horizons are log-uniform over 1..longest. Two modes of four turn by at most a radian within
    their horizon, and so sum up what they see, wherever it was; the frequencies of the other two
    fill 0..pi, and tell places apart. Both kinds do so at every horizon alike (multiples of the
    golden ratio, the sequence of least discrepancy).

    `modes` is K; `longest` is the longest horizon, in tokens, above 1.
    """
    number = torch.arange(modes, dtype=torch.float64, device=device)
    horizons = torch.exp(math.log(longest) * (number + 0.5) / modes)
    rate = -torch.log1p(-1 / horizons)
    highest = torch.where(number % 4 < SUMMING, rate, math.pi)
    of_its_kind = torch.floor(number / 4) * 2 + number % 2
    turns = (of_its_kind + 1) * GOLDEN_FRACTION
    return Spectrum(-rate, highest * (turns - turns.floor()))


def shifted_spectrum(initial: Spectrum, *, rate_shift: Tensor, frequency_shift: Tensor) -> Spectrum:
    """Return where the learned differences `[K]` have moved the modes."""
    rate = -initial.log_decay
    return Spectrum(
        -rate * torch.exp(rate_shift.double()), initial.frequency + frequency_shift.double() * rate
    )


def chunked_scan(
    beta: Tensor, log_decay: Tensor, frequency: Tensor, *, chunk: int, state: Tensor | None = None
) -> Tensor:
    """Compute Re(c) of the recurrence by matrix products, all chunks at once.

    Within a chunk the outputs are a product with the lower triangular Toeplitz matrix
    a^{j-s}, s <= j. The states between the chunks follow the same recurrence with a^C, and are
    found by doubling, in log2(T / C) rounds. The result does not depend on C but for rounding.

    Args:
        beta: Inputs `[2, K, B, T]`, real and imaginary parts.
        log_decay: ln|a|, `[K]`, below 0.
        frequency: omega in radians a token, `[K]`.
        chunk: Tokens of a chunk, C; any T will do.
        state: c before the first token, `[2, K, B]`; None: zero.

    Returns:
        Re(c) `[K, B, T]`.
    """
    _, modes, rows, length = beta.shape
    chunk = min(chunk, length)
    if length % chunk:  # padding by nothing would copy
        beta = F.pad(beta, (0, -length % chunk))
    beta = beta.reshape(2, modes, -1, chunk)
    real, imaginary = powers(log_decay, frequency, chunk + 1, dtype=beta.dtype)
    into_real, into_imaginary = _toeplitz(real, imaginary, chunk)
    # Columns 0..C-1 are Re(c) of the chunk alone, column C is Im(c) of its last token. Products add
    # to what they are given, and parts are unbound: sums and zeros of this size would cost as much.
    in_real, in_imaginary = beta.unbind(0)
    within = _product(in_imaginary, into_imaginary, onto=_product(in_real, into_real))
    ends = within.view(modes, rows, -1, chunk + 1)[..., chunk - 1 :].movedim(-1, 0)
    first = torch.zeros_like(ends[..., :1]) if state is None else state.unsqueeze(-1)
    before = _states(torch.cat((first, ends[..., :-1]), dim=-1), log_decay, frequency, chunk)
    carried = torch.stack((real[:, 1:], -imaginary[:, 1:]), dim=1)
    starts = before.flatten(2).movedim(0, -1)
    outputs = _product(starts, carried, onto=within[..., :chunk])
    return outputs.view(modes, rows, -1)[..., :length]


def last_state(
    beta: Tensor, log_decay: Tensor, frequency: Tensor, *, state: Tensor | None = None
) -> Tensor:
    """Return c after the last token, `[2, K, B]`: the weighted sum of all inputs.

    The arguments are those of `chunked_scan`.
    """
    length = beta.shape[-1]
    real, imaginary = powers(log_decay, frequency, length + 1, dtype=beta.dtype)
    back_real, back_imaginary = (part[:, None, :length].flip(-1) for part in (real, imaginary))
    ends = [
        torch.linalg.vecdot(beta[0], back_real) - torch.linalg.vecdot(beta[1], back_imaginary),
        torch.linalg.vecdot(beta[0], back_imaginary) + torch.linalg.vecdot(beta[1], back_real),
    ]
    if state is not None:
        ends[0] = ends[0] + real[:, -1:] * state[0] - imaginary[:, -1:] * state[1]
        ends[1] = ends[1] + imaginary[:, -1:] * state[0] + real[:, -1:] * state[1]
    return torch.stack(ends)


def powers(
    log_decay: Tensor, frequency: Tensor, count: int, *, step: int = 1, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return real and imaginary parts of a^0, a^step, ..., each `[K, count]`, rounded once."""
    places = step * torch.arange(count, dtype=torch.float64, device=log_decay.device)
    size = torch.exp(log_decay.double()[:, None] * places)
    angle = frequency.double()[:, None] * places
    return (size * angle.cos()).to(dtype), (size * angle.sin()).to(dtype)


def _product(left: Tensor, right: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """Return the products of a batch of matrices, added to others: in float32, never in TF32."""
    if _could_be_tf32(left):
        product: Tensor = _float32_product(left, right, onto)
        return product
    return torch.bmm(left, right) if onto is None else torch.baddbmm(onto, left, right)


def _could_be_tf32(factor: Tensor) -> bool:
    is_float32 = factor.is_cuda and factor.dtype == torch.float32
    return is_float32 and torch.backends.cuda.matmul.allow_tf32


# One operator, so that a compiled block holds the precision when it runs: which one products take
# is a setting of the whole process.
@torch.library.custom_op("refocused::float32_product", mutates_args=())
def _float32_product(left: Tensor, right: Tensor, onto: Tensor | None) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return torch.bmm(left, right) if onto is None else torch.baddbmm(onto, left, right)
    finally:
        torch.set_float32_matmul_precision(before)


@_float32_product.register_fake
def _shape_of_product(left: Tensor, right: Tensor, onto: Tensor | None) -> Tensor:
    return left.new_empty((*left.shape[:2], right.shape[2]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.adds = inputs[2] is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    left, right = ctx.saved_tensors
    into_left = _float32_product(gradient, right.mT, None)
    return into_left, _float32_product(left.mT, gradient, None), gradient if ctx.adds else None


_float32_product.register_autograd(_backward, setup_context=_keep)


def _toeplitz(real: Tensor, imaginary: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return what takes a chunk's real and imaginary inputs to its outputs, `[K, C, C + 1]` each.

    Row s, column j < C is the weight of input s in Re(c_j); column C that in Im(c_{C-1}).
    """
    places = torch.arange(chunk, device=real.device)
    lag = places - places[:, None]
    lower = lag >= 0
    lag = lag.clamp(min=0)
    back = places.flip(0)
    zero = torch.zeros((), dtype=real.dtype, device=real.device)
    into_real = torch.where(lower, real[:, lag], zero)
    into_imaginary = torch.where(lower, -imaginary[:, lag], zero)
    return (
        torch.cat((into_real, imaginary[:, back, None]), dim=-1),
        torch.cat((into_imaginary, real[:, back, None]), dim=-1),
    )


def _states(ends: Tensor, log_decay: Tensor, frequency: Tensor, chunk: int) -> Tensor:
    """Return S_n = a^C S_{n-1} + ends_n for all n, `[2, K, B, N]`: doubling (Hillis and Steele)."""
    shift = 1
    while shift < ends.shape[-1]:
        by = powers(log_decay, frequency, 2, step=chunk * shift, dtype=ends.dtype)
        real, imaginary = (part[:, None, 1:] for part in by)
        earlier_real, earlier_imaginary = ends[..., :-shift]
        arrived = torch.stack(
            (
                real * earlier_real - imaginary * earlier_imaginary,
                imaginary * earlier_real + real * earlier_imaginary,
            )
        )
        ends = torch.cat((ends[..., :shift], ends[..., shift:] + arrived), dim=-1)
        shift *= 2
    return ends
