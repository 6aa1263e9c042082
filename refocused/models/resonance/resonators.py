"""Damped resonators: the recurrence, its read-out, and the equivalent convolution.

Resonator i has the multiplier lambda_i = exp(-a_i + i omega_i) per token. Driven by channel d its
state is z_{i,d}[t] = sum over s <= t of lambda_i^{t-s} x_d[s]. The F resonators interfere, z + M z,
and are read out by complex weights w = m e^{ip}: y_d = Re sum_i w_{i,d} (z + M z)_{i,d}. This is
linear and time-invariant, so M can be moved into the weights, w' = w + M^T w, and y is the causal
convolution of x with k_d[n] = sum_i m'_{i,d} exp(-a_i n) cos(omega_i n + p'_{i,d}).
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from refocused.models.resonance.convolution import causal_convolution

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
FINE = 256  # size of the fine table of powers


class ComplexWeight(nn.Module):
    """A complex weight w = m e^{ip} `[F, D]`, by magnitude m and phase p.

    The phase is a vector, to exclude it from weight decay.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.magnitude = nn.Parameter(torch.ones(rows, columns))
        self.phase = nn.Parameter(torch.zeros(rows * columns))

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return real and imaginary part `[2, F, D]` in a given type."""
        magnitude = self.magnitude.to(dtype)
        phase = self.phase.to(dtype).view_as(magnitude)
        return torch.stack((magnitude * phase.cos(), magnitude * phase.sin()))


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """Damping and frequency of F resonators, in float64, and their read-out weights."""

    decay: Tensor  # a in 1/token, [F]
    frequency: Tensor  # omega in radians per token, [F]
    weights: Tensor  # w', real and imaginary, [2, F, D], in the type of the computation


class Resonators(nn.Module):
    """F damped resonators, driven by and read out to D channels.

    Damping and frequency are learned as shifts from a fixed grid, the frequency's in units of the
    damping: a_i = a0_i exp(u_i), omega_i = omega0_i + a0_i v_i. The grid is computed, not stored,
    so a cast of the parameters to bfloat16 moves omega by 2^-9 of |v| line widths. A cast of omega
    itself could move it by 2^-7, which is 256 radians after 32,768 tokens.
    """

    def __init__(self, width: int, count: int, *, max_length: int) -> None:
        """Create F = `count` for D = `width` channels, with memories up to `max_length` tokens."""
        super().__init__()
        self.count = count
        self.max_length = max_length
        self.weight = ComplexWeight(count, width)
        self.interference = nn.Parameter(torch.zeros(count, count))
        self.decay_shift = nn.Parameter(torch.zeros(count))
        self.frequency_shift = nn.Parameter(torch.zeros(count))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the convolution of a whole sequence `[B, T, D]` with the kernel."""
        tuning = self.tuning(inputs.dtype)
        outputs: Tensor = causal_convolution(inputs, kernel(tuning, inputs.shape[1]))
        return outputs

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the present -a and omega, `[F]` each, in float64."""
        decay, frequency = grid(self.count, self.max_length, device=self.decay_shift.device)
        shifted = decay * self.decay_shift.double().exp()
        return -shifted, frequency + decay * self.frequency_shift.double()

    def tuning(self, dtype: torch.dtype) -> Tuning:
        """Return the resonators' tuning, in float32 or better.

        Weights are scaled so that kernels of unit magnitude and random phase have unit energy: the
        sum over n of (exp(-a n) cos(omega n + p))^2 is 1 / (2 (1 - exp(-2 a))) on average over p.
        """
        exact = torch.promote_types(dtype, torch.float32)
        log_decay, frequency = self.spectrum()
        scale = (-2 * torch.expm1(2 * log_decay) / self.count).sqrt().to(exact)
        weights = self.weight(exact) * scale[:, None]
        weights = weights + self.interference.to(exact).T @ weights
        return Tuning(-log_decay, frequency, weights)


def grid(
    count: int, max_length: int, *, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the initial dampings and frequencies, `[F]` each, in float64.

    Frequencies cover (0, pi], densest near 0. Memories 1/a are log-uniform over 1 to `max_length`
    tokens, by multiples of the golden ratio, so that every frequency range has short and long ones.
    """
    number = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    memory = float(max_length) ** (number * GOLDEN_RATIO).frac()
    return 1 / memory, math.pi * (number / count) ** 2


def powers(tuning: Tuning, length: int) -> Tensor:
    """Return lambda_i^n for n = 0, ..., length - 1, real and imaginary, `[2, F, length]`.

    Angles up to 1e5 radians need float64, which is used for a coarse and a fine table; their
    products are computed in the type of the weights.
    """
    dtype, device = tuning.weights.dtype, tuning.weights.device
    fine = min(FINE, length)
    near = torch.arange(fine, dtype=torch.float64, device=device)
    far = torch.arange(-(-length // fine), dtype=torch.float64, device=device) * fine
    (a, b), (c, d) = (_table(tuning, lags).to(dtype) for lags in (far, near))
    a, b, c, d = a[:, :, None], b[:, :, None], c[:, None, :], d[:, None, :]
    return torch.stack((a * c - b * d, a * d + b * c)).flatten(2)[..., :length]


def _table(tuning: Tuning, lags: Tensor) -> Tensor:
    """Return lambda_i^n `[2, F, N]` for lags n `[N]`, in float64."""
    angle = tuning.frequency[:, None] * lags
    size = (-tuning.decay[:, None] * lags).exp()
    return torch.stack((size * angle.cos(), size * angle.sin()))


def kernel(tuning: Tuning, length: int) -> Tensor:
    """Return k_d[n] = Re sum_i w'_{i,d} lambda_i^n, `[D, length]`: one matrix product."""
    real, imaginary = tuning.weights
    cosine_and_sine = powers(tuning, length).flatten(0, 1)
    response: Tensor = torch.cat((real, -imaginary)).T @ cosine_and_sine
    return response


def silence(inputs: Tensor, tuning: Tuning) -> Tensor:
    """Return the zero state before the first token, `[2, B, F, D]`."""
    _, count, width = tuning.weights.shape
    return tuning.weights.new_zeros(2, inputs.shape[0], count, width)


def ring_on(inputs: Tensor, tuning: Tuning, state: Tensor, *, chunk: int) -> tuple[Tensor, Tensor]:
    """Compute the convolution chunk by chunk (overlap-add), continuing from `state`.

    Memory does not grow with the sequence; a chunk of one token is a generation step.

    Args:
        inputs: `[B, T, D]`.
        tuning: Of the resonators.
        state: z after the previous token, `[2, B, F, D]`, real and imaginary.
        chunk: Tokens convolved at once.

    Returns:
        Outputs `[B, T, D]`, and z after the last token.
    """
    outputs = []
    for part in torch.split(inputs, chunk, dim=1):
        within = causal_convolution(part, kernel(tuning, part.shape[1]))
        ringing, state = _after(part, tuning, state)
        outputs.append((within + ringing).to(inputs.dtype))
    return torch.cat(outputs, dim=1), state


def _after(part: Tensor, tuning: Tuning, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contribution of earlier tokens to a chunk `[B, T, D]`, and z after it."""
    length = part.shape[1]
    real, imaginary = tuning.weights
    lambdas = powers(tuning, length + 1)
    cosine, sine = lambdas[..., 1:]  # the first token is one step after the state
    z_real, z_imaginary = state
    ringing = torch.einsum("fn,bfd->bnd", cosine, real * z_real - imaginary * z_imaginary)
    ringing -= torch.einsum("fn,bfd->bnd", sine, real * z_imaginary + imaginary * z_real)
    driven = torch.einsum("cfn,bnd->cbfd", lambdas[..., :length].flip(2), part.to(real.dtype))
    c, s = cosine[:, -1, None], sine[:, -1, None]
    kept = torch.stack((c * z_real - s * z_imaginary, c * z_imaginary + s * z_real))
    return ringing, kept + driven
