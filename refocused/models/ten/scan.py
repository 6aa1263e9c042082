"""The recurrence of temporal eigenstates, c_t = a c_{t-1} + beta_t, computed in chunks.

A mode k has a complex multiplier a_k = exp(d_k + i omega_k): d = ln|a| < 0 is its log-decay, omega
its frequency. Complex numbers are stored as pairs of real ones (index 0 real, 1 imaginary), for
which compilers generate better code. Only Re(c) is needed for every token; the last token's c is
the state of generation. Modes come before sequences, `[2, K, B, T]`: a mode has the same factors
for all sequences, so the products are batched over K without copies.

Powers a^n are computed in float64 and then rounded: a float32 multiplier applied 32,768 times
would be off by 2e-3, and its argument n omega by 4e-3.

Powers, states and their products are in float32 whatever `precision.tf32` is: TF32 rounds factors
to 11 bits, an error of 5e-4 that the gradients of decays and frequencies sum over all tokens. The
products into and out of the eigenstates (`cells`) have the run's precision.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refocused.models.sequence_parallel import SequenceGroup

# A mode's horizon is 1 / (1 - |a|) tokens. Its two learned numbers are stored as differences from
# their initial values, which depend only on the shape of the model:
#
#     |a|   = exp(-exp(nu_0 + rate_shift))            nu_0 = ln(-ln(1 - 1 / H_0))
#     omega = omega_0 + frequency_shift * exp(nu_0)
#
# DeepSpeed casts parameters to bf16, 8 significant bits. Rounding nu itself (10.4 for a horizon of
# 32,768) would change the horizon by 3 %; rounding omega (1 radian per token), the phase at the
# horizon by up to 128 radians, with jumps between updates. Rounding the differences costs at most
# 0.2 % of their size: 0.14 % of a horizon that doubled, 0.002 radians of a phase that moved by 1.

GOLDEN_FRACTION = (math.sqrt(5) - 1) / 2
SUMMING = 2  # of every four modes, those with low initial frequencies; see `initial_spectrum`


@dataclasses.dataclass(frozen=True, slots=True)
class Spectrum:
    """The modes of a recurrence, `[K]` each, in float64."""

    log_decay: Tensor  # ln|a|, below 0
    frequency: Tensor  # omega in radians per token

    @property
    def horizon_tokens(self) -> Tensor:
        """Tokens after which a mode has decayed by 63 %, 1 / (1 - |a|)."""
        return -1 / torch.expm1(self.log_decay)

    @property
    def gain(self) -> Tensor:
        """The factor that gives a mode the variance of its input, sqrt(1 - |a|^2).

        Orvieto et al. 2023, Resurrecting Recurrent Neural Networks, 3.4.
        """
        return (-torch.expm1(2 * self.log_decay)).sqrt()


def initial_spectrum(modes: int, *, longest: int, device: torch.device | str = "cpu") -> Spectrum:
    """Return the initial `modes` (K), with horizons log-uniform over 1..`longest` tokens.

    Two modes of four rotate by at most one radian within their horizon and so sum their inputs; the
    frequencies of the other two cover 0..pi and distinguish positions. Both kinds are spread evenly
    over all horizons (multiples of the golden ratio, a low-discrepancy sequence).
    """
    number = torch.arange(modes, dtype=torch.float64, device=device)
    horizons = torch.exp(math.log(longest) * (number + 0.5) / modes)
    rate = -torch.log1p(-1 / horizons)
    highest = torch.where(number % 4 < SUMMING, rate, math.pi)
    of_its_kind = torch.floor(number / 4) * 2 + number % 2
    turns = (of_its_kind + 1) * GOLDEN_FRACTION
    return Spectrum(-rate, highest * (turns - turns.floor()))


def shifted_spectrum(initial: Spectrum, *, rate_shift: Tensor, frequency_shift: Tensor) -> Spectrum:
    """Return the modes after the learned shifts `[K]`."""
    rate = -initial.log_decay
    return Spectrum(
        -rate * torch.exp(rate_shift.double()), initial.frequency + frequency_shift.double() * rate
    )


def chunked_scan(
    beta: Tensor, log_decay: Tensor, frequency: Tensor, *, chunk: int, state: Tensor | None = None
) -> Tensor:
    """Compute Re(c) of the recurrence by matrix products, all chunks in parallel.

    Within a chunk the outputs are a product with the lower triangular Toeplitz matrix a^{j-s},
    s <= j. The states between chunks follow the same recurrence with a^C and are computed by
    doubling, in log2(T / C) rounds. C changes the result only by rounding.

    Args:
        beta: Inputs `[2, K, B, T]`, real and imaginary parts.
        log_decay: ln|a|, `[K]`, below 0.
        frequency: omega in radians per token, `[K]`.
        chunk: Tokens of a chunk, C; need not divide T.
        state: c before the first token, `[2, K, B]`; default zero.

    Returns:
        Re(c) `[K, B, T]`.
    """
    _, modes, rows, length = beta.shape
    chunk = min(chunk, length)
    if length % chunk:  # F.pad copies even without padding
        beta = F.pad(beta, (0, -length % chunk))
    beta = beta.reshape(2, modes, -1, chunk)
    real, imaginary = powers(log_decay, frequency, chunk + 1, dtype=beta.dtype)
    into_real, into_imaginary = _toeplitz(real, imaginary, chunk)
    # Columns 0..C-1 are Re(c) of the chunk alone, column C is Im(c) of its last token. Products
    # accumulate, and parts are unbound, to avoid sums and zeros of this size.
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
    """Return c after the last token, `[2, K, B]`; arguments as for `chunked_scan`."""
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


def arrived_state(
    last: Tensor, log_decay: Tensor, frequency: Tensor, *, length: int, group: SequenceGroup
) -> Tensor:
    """Return c before this rank's `length` tokens, `[2, K, B]`; all ranks of a group call together.

    `last` is c after them from a zero state. The states of the ranks before decay over the tokens
    between: c = sum over ranks j before this one, r, of a^{(r - 1 - j) length} last_j.
    """
    real, imaginary = powers(log_decay, frequency, group.ranks, step=length, dtype=last.dtype)
    before = group.ranks_before(last)
    held = before > 0
    places = (before - 1) * held  # see `_toeplitz`
    real, imaginary = (part.T[places] * held[:, None] for part in (real, imaginary))
    states = group.from_all(last)
    in_real, in_imaginary = states.unbind(1)  # `[N, K, B]`
    return torch.stack(
        (
            group.weighted(in_real, real) - group.weighted(in_imaginary, imaginary),
            group.weighted(in_imaginary, real) + group.weighted(in_real, imaginary),
        )
    )


def powers(
    log_decay: Tensor, frequency: Tensor, count: int, *, step: int = 1, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return real and imaginary parts of a^0, a^step, ..., each `[K, count]`, rounded once."""
    places = step * torch.arange(count, dtype=torch.float64, device=log_decay.device)
    size = torch.exp(log_decay.double()[:, None] * places)
    angle = frequency.double()[:, None] * places
    return (size * angle.cos()).to(dtype), (size * angle.sin()).to(dtype)


def _product(left: Tensor, right: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """Return a batched matrix product, added to `onto`; in float32, never in TF32."""
    if _could_be_tf32(left):
        product: Tensor = _float32_product(left, right, onto)
        return product
    return torch.bmm(left, right) if onto is None else torch.baddbmm(onto, left, right)


def _could_be_tf32(factor: Tensor) -> bool:
    is_float32 = factor.is_cuda and factor.dtype == torch.float32
    return is_float32 and torch.backends.cuda.matmul.allow_tf32


# A custom operator, so that compiled blocks set the precision, a global setting, at run time.
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
    """Return the matrices `[K, C, C + 1]` from a chunk's real and imaginary inputs to its outputs.

    Row s, column j < C is the weight of input s in Re(c_j); column C that in Im(c_{C-1}).
    """
    places = torch.arange(chunk, device=real.device)
    lag = places - places[:, None]
    lower = lag >= 0
    lag = lag * lower  # as clamped at 0, which torch 2.11's compiler for GPUs fails on
    back = places.flip(0)
    zero = torch.zeros((), dtype=real.dtype, device=real.device)
    into_real = torch.where(lower, real[:, lag], zero)
    into_imaginary = torch.where(lower, -imaginary[:, lag], zero)
    return (
        torch.cat((into_real, imaginary[:, back, None]), dim=-1),
        torch.cat((into_imaginary, real[:, back, None]), dim=-1),
    )


def _states(ends: Tensor, log_decay: Tensor, frequency: Tensor, chunk: int) -> Tensor:
    """Return S_n = a^C S_{n-1} + ends_n, `[2, K, B, N]`, by doubling (Hillis and Steele)."""
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
