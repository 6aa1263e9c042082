"""Resonance: a causal language model that mixes positions by damped resonators, in O(T log T).

Causal convolution of each channel with its own kernel, by FFT, forward and backward.

A custom torch operator (`refocused::causal_convolution`), since compilers do not support complex
numbers. 16-bit inputs are transformed in float32, as there is no FFT of bfloat16. Its rounding
noise of 1e-7 spreads over all tokens, so outputs are causal only up to rounding.

Damped resonators: the recurrence, its read-out, and the equivalent convolution.

Resonator i has the multiplier lambda_i = exp(-a_i + i omega_i) per token. Driven by channel d its
state is z_{i,d}[t] = sum over s <= t of lambda_i^{t-s} x_d[s]. The F resonators interfere, z + M z,
and are read out by complex weights w = m e^{ip}: y_d = Re sum_i w_{i,d} (z + M z)_{i,d}. This is
linear and time-invariant, so M can be moved into the weights, w' = w + M^T w, and y is the causal
convolution of x with k_d[n] = sum_i m'_{i,d} exp(-a_i n) cos(omega_i n + p'_{i,d}).
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from refocused.models.recall import Parts
from refocused.models.recurrent_lm import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
    RecurrentState,
)
from refocused.models.sequence_parallel import SequenceGroup

# Channels are transformed in groups with spectra of at most this size: on a CPU to fit its cache.
BYTES_ON_CPU = 2**23
BYTES_ON_GPU = 2**28
# On a CPU, transpose this many tokens at a time, all channels of them, which are adjacent in
# memory. Some channels of all tokens took about five times as long (65,536 tokens).
TOKENS_TRANSPOSED = 512


@torch.library.custom_op("refocused::causal_convolution", mutates_args=())
def causal_convolution(inputs: Tensor, kernel: Tensor) -> Tensor:
    """Return y[b, t, d] = sum over s <= t of kernel[d, t - s] inputs[b, s, d].

    Both are padded with zeros to 2 T, to avoid wrap-around.

    Args:
        inputs: `[B, T, D]`, of any floating type.
        kernel: `[D, T]`, float32 or float64, which is the type of the computation.

    Returns:
        `[B, T, D]` of the type of `inputs`.
    """
    output = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    for block in _transposed_at_once(inputs):
        signal = _channels_first(inputs[:, :, block], kernel.dtype)
        response = kernel[block, None]
        for part in _transformed_at_once(signal):
            spectrum = _spectrum(signal[part])
            spectrum *= _spectrum(response[part])
            signal[part] = _signal(spectrum)
        _channels_last(signal, into=output[:, :, block])
    return output


@causal_convolution.register_fake
def _shape_of_output(inputs: Tensor, kernel: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


@torch.library.custom_op("refocused::causal_convolution_backward", mutates_args=())
def causal_convolution_backward(
    gradient: Tensor, inputs: Tensor, kernel: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `inputs` and `kernel`: correlations with the output's gradient.

    Spectra are recomputed: saving them would take eight times the memory of a bfloat16 input.
    """
    of_inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    of_kernel = torch.empty_like(kernel)
    for block in _transposed_at_once(inputs):
        signal = _channels_first(inputs[:, :, block], kernel.dtype)
        of_signal = _channels_first(gradient[:, :, block], kernel.dtype)
        response, of_response = kernel[block, None], of_kernel[block]
        for part in _transformed_at_once(signal):
            spectrum = _spectrum(of_signal[part])
            across = _spectrum(signal[part]).conj_physical_()
            across *= spectrum
            of_response[part] = _signal(across.sum(1))
            del across  # free it before the next allocations
            spectrum *= _spectrum(response[part]).conj_physical_()
            of_signal[part] = _signal(spectrum)
        _channels_last(of_signal, into=of_inputs[:, :, block])
    return of_inputs, of_kernel


@causal_convolution_backward.register_fake
def _shapes_of_gradients(gradient: Tensor, inputs: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    return _shape_of_output(inputs, kernel), torch.empty_like(kernel)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = causal_convolution_backward(gradient, *ctx.saved_tensors)
    return gradients


causal_convolution.register_autograd(_backward, setup_context=_keep)


def _transposed_at_once(inputs: Tensor) -> list[slice]:
    """Split the channels into blocks that are transposed together."""
    rows, length, channels = inputs.shape
    is_cpu = inputs.device.type == "cpu"
    return _cut(channels, channels if is_cpu else _group(BYTES_ON_GPU, rows, length))


def _transformed_at_once(signal: Tensor) -> list[slice]:
    """Split the channels of `[D', B, T]` into groups that are transformed together."""
    channels, rows, length = signal.shape
    most = BYTES_ON_CPU if signal.device.type == "cpu" else BYTES_ON_GPU
    return _cut(channels, _group(most, rows, length))


def _group(most: int, rows: int, length: int) -> int:
    """Return how many channels have spectra of at most `most` bytes, at least one."""
    return max(1, most // (8 * rows * (length + 1)))


def _cut(channels: int, group: int) -> list[slice]:
    return [slice(start, start + group) for start in range(0, channels, group)]


def _channels_first(signal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy `[D, B, T]`: FFTs are fastest along the last axis."""
    rows, length, channels = signal.shape
    transposed = signal.new_empty((channels, rows, length), dtype=dtype)
    for tokens in _cut(length, _tokens_transposed(signal)):
        transposed[:, :, tokens] = signal[:, tokens].permute(2, 0, 1)
    return transposed


def _channels_last(signal: Tensor, *, into: Tensor) -> None:
    """Write `[D, B, T]` into `[B, T, D]`, of any floating type."""
    for tokens in _cut(signal.shape[2], _tokens_transposed(signal)):
        # Three times as fast from a contiguous copy.
        into[:, tokens] = signal[:, :, tokens].contiguous().permute(1, 2, 0)


def _tokens_transposed(signal: Tensor) -> int:
    return TOKENS_TRANSPOSED if signal.device.type == "cpu" else signal.numel()


def _spectrum(signal: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.rfft(signal, n=2 * signal.shape[-1])
    return spectrum


def _signal(spectrum: Tensor) -> Tensor:
    length = spectrum.shape[-1] - 1
    signal: Tensor = torch.fft.irfft(spectrum, n=2 * length)
    return signal[..., :length]


GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
FINE = 256  # size of the fine table of powers
INTERFERENCE_RANGE = 0.01  # standard deviation of the initial interference matrix


class ComplexWeight(nn.Module):
    """A complex weight w = m e^{ip} `[F, D]`, by magnitude m and phase p.

    The phase is a vector, to exclude it from weight decay.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.magnitude = nn.Parameter(torch.ones(rows, columns))
        self.phase = nn.Parameter(torch.zeros(rows * columns))

    def initialize(self, config: Any) -> None:
        """Start with unit magnitudes and random phases."""
        init.ones_(self.magnitude)
        init.uniform_(self.phase, -math.pi, math.pi)

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


class ResonatorBank(nn.Module):
    """F damped resonators, driven by and read out to D channels.

    Damping and frequency are learned as shifts from a fixed grid, the frequency's in units of the
    damping: a_i = a0_i exp(u_i), omega_i = omega0_i + a0_i v_i. The grid is computed, not stored,
    so a cast of the parameters to bfloat16 moves omega by 2^-9 of |v| line widths. A cast of omega
    itself could move it by 2^-7, which is 256 radians after 32,768 tokens.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        count = config.num_resonators
        self.count, self.max_length = count, config.spectrum_length
        self.weight = ComplexWeight(count, config.hidden_size)
        self.interference = nn.Parameter(torch.zeros(count, count))
        self.decay_shift = nn.Parameter(torch.zeros(count))
        self.frequency_shift = nn.Parameter(torch.zeros(count))

    def initialize(self, config: Any) -> None:
        """Start at the grid, with a little interference."""
        init.normal_(self.interference, std=INTERFERENCE_RANGE)
        init.zeros_(self.decay_shift)
        init.zeros_(self.frequency_shift)

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
    tables = []
    for lags in (far[:, None], near):
        angle = tuning.frequency.view(-1, *[1] * lags.dim()) * lags
        size = (-tuning.decay.view(-1, *[1] * lags.dim()) * lags).exp()
        tables.append(torch.stack((size * angle.cos(), size * angle.sin())).to(dtype))
    (a, b), (c, d) = tables[0], tables[1][:, :, None]
    return torch.stack((a * c - b * d, a * d + b * c)).flatten(2)[..., :length]


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
    outputs, (real, imaginary) = [], tuning.weights
    for part in torch.split(inputs, chunk, dim=1):
        within = causal_convolution(part, kernel(tuning, part.shape[1]))
        length = part.shape[1]
        lambdas = powers(tuning, length + 1)
        cosine, sine = lambdas[..., 1:]  # the first token is one step after the state
        z_real, z_imaginary = state
        ringing = torch.einsum("fn,bfd->bnd", cosine, real * z_real - imaginary * z_imaginary)
        ringing -= torch.einsum("fn,bfd->bnd", sine, real * z_imaginary + imaginary * z_real)
        driven = torch.einsum("cfn,bnd->cbfd", lambdas[..., :length].flip(2), part.to(real.dtype))
        c, s = cosine[:, -1, None], sine[:, -1, None]
        kept = torch.stack((c * z_real - s * z_imaginary, c * z_imaginary + s * z_real))
        state = kept + driven
        outputs.append((within + ringing).to(inputs.dtype))
    return torch.cat(outputs, dim=1), state


class ResonanceConfig(RecurrentConfig):
    """The shape of a resonance model."""

    model_type = "resonance"

    num_resonators: int = 64  # of a block, F
    # Tokens with a position of their own, T_max, and those that are mixed at once. Later tokens
    # have the last position.
    max_position_embeddings: int = 32768
    dropout: float = 0.0  # at the embedding and before each residual sum
    learned_positions = True
    longest_sequence = None  # sequences have no maximal length


class GatedResonators(nn.Module):
    """The mixer of a block: resonators, a gate for each of their outputs, a projection."""

    def __init__(self, config: ResonanceConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.chunk = config.max_position_embeddings
        self.resonators = ResonatorBank(config)
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.output.is_residual = True  # type: ignore[assignment]

    def forward(
        self, inputs: Tensor, parts: Parts | None = None, group: SequenceGroup | None = None
    ) -> Tensor:
        """Return the mixed tokens `[B, T, D]` of inputs `[B, T, D]`; update `parts`."""
        assert group is None  # checked with the run file
        gate = self.gate(inputs).sigmoid()  # first: autograd sums gradients in this order
        if parts is None and inputs.shape[1] <= self.chunk:
            rung = self.resonators(inputs)
        else:
            tuning, parts = self.resonators.tuning(inputs.dtype), {} if parts is None else parts
            before = parts["rung"].movedim(0, 1) if "rung" in parts else silence(inputs, tuning)
            rung, after = ring_on(inputs, tuning, before, chunk=self.chunk)
            parts["rung"] = after.movedim(1, 0)
        mixed: Tensor = self.output(gate * rung)
        return mixed


class ResonanceModel(RecurrentModel):
    """Embeddings, blocks of resonators, final norm."""

    config_class, mixer_class = ResonanceConfig, GatedResonators

    def add_positions(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        state: RecurrentState | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Count the tokens of each sequence without padding; tokens after T_max share a position.

        Given positions are ignored.
        """
        rows, length, _ = embedded.shape
        if state is None and mask is None:
            places = torch.arange(length, device=embedded.device)
        else:
            ones = torch.ones(rows, length, dtype=torch.long, device=embedded.device)
            before = 0 if state is None or state.positions is None else state.positions[:, None]
            places = before + (ones if mask is None else mask.long()).cumsum(dim=1) - 1
            if state is not None:
                state.positions = places[:, -1] + 1
            places = places.clamp(min=0)
        last = self.config.max_position_embeddings - 1
        return embedded + self.embed_positions(places.clamp(max=last)), mask


class ResonanceForCausalLM(RecurrentForCausalLM):
    """The model with a language-model head."""

    config_class, body_class = ResonanceConfig, ResonanceModel
