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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from refocused.models.recall import CausalAttention, Parts, RecallParts, is_attention, select_parts
from refocused.models.recurrent_lm import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentPreTrainedModel,
)

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


class ResonatorBank(nn.Module):
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


INTERFERENCE_RANGE = 0.01  # standard deviation of the initial interference matrix


class RecurrentState:
    """The states of all layers, with the interface of a transformers cache.

    Attributes:
        layers: The state of each layer, `[2, B, F, D]`; None before the first token.
        parts: What each layer's convolution, memory or attention keeps.
        positions: Tokens of each sequence, without padding, `[B]`; None before the first.
        length: Tokens including padding.
    """

    is_compileable = False  # read by `generate`

    def __init__(self, layers: int) -> None:
        self.layers: list[Tensor | None] = [None] * layers
        self.parts: list[Parts] = [{} for _ in range(layers)]
        self.positions: Tensor | None = None
        self.length = 0

    def advance(self, mask: Tensor) -> Tensor:
        """Count the tokens of `mask` `[B, T]` (0: padding); return their positions `[B, T]`."""
        before = 0 if self.positions is None else self.positions[:, None]
        positions = before + mask.long().cumsum(dim=1) - 1
        self.positions = positions[:, -1] + 1
        self.length += mask.shape[1]
        return positions.clamp(min=0)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens, including padding."""
        return self.length

    def reorder_cache(self, chosen: Tensor) -> None:
        """Select sequences by index `[B]`, for beam search."""
        self.layers = [None if z is None else z.index_select(1, chosen) for z in self.layers]
        for parts in self.parts:
            select_parts(parts, chosen)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, chosen)


class ResonanceConfig(RecurrentConfig):
    """The shape of a resonance model."""

    model_type = "resonance"

    num_resonators: int = 64  # of a block, F
    intermediate_size: int | None = None  # of the feed-forward part; None: 4 times `hidden_size`
    max_position_embeddings: int = 32768  # learned positions, T_max; later tokens use the last one
    dropout: float = 0.0  # at the embedding and before each residual sum

    @property
    def longest_sequence(self) -> int | None:
        """None: sequences have no maximal length."""
        return None

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size


class ResonanceBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm block: gated resonators or attention, then a feed-forward part."""

    def __init__(self, config: ResonanceConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer = layer
        self.chunk = config.max_position_embeddings
        self.mixing_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention: CausalAttention | None = None
        if is_attention(config, layer):
            self.attention = CausalAttention(width, heads=config.attention_heads)
        else:
            self.recall = RecallParts(config)
            longest = config.spectrum_length or config.max_position_embeddings
            self.resonators = ResonatorBank(width, config.num_resonators, max_length=longest)
            self.gate = nn.Linear(width, width)
            self.output = nn.Linear(width, width)
            self.output.is_residual = True  # type: ignore[assignment]
        self.inner_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = nn.Linear(width, config.inner_size)
        self.down = nn.Linear(config.inner_size, width)
        self.down.is_residual = True  # type: ignore[assignment]
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: RecurrentState | None = None
    ) -> Tensor:
        """Return the residual stream `[B, T, D]` after this block.

        Args:
            hidden: Before it, `[B, T, D]`.
            mask: `[B, T]`, 0 for padding, which does not drive the resonators; None: no padding.
            state: Of the tokens before; updated in place.
        """
        normed = self.mixing_norm(hidden)
        parts = None if state is None else state.parts[self.layer]
        if self.attention is not None:
            mixed = self.attention(normed, parts, mask)
        else:
            real = None if mask is None else mask[..., None].to(normed.dtype)
            normed = self.recall.before(normed if real is None else normed * real, parts)
            driving = normed if real is None else normed * real
            gate = self.gate(normed).sigmoid()  # first: autograd sums gradients in this order
            if state is None and driving.shape[1] <= self.chunk:
                rung = self.resonators(driving)
            else:
                tuning = self.resonators.tuning(driving.dtype)
                before = None if state is None else state.layers[self.layer]
                before = silence(driving, tuning) if before is None else before
                rung, after = ring_on(driving, tuning, before, chunk=self.chunk)
                if state is not None:
                    state.layers[self.layer] = after
            mixed = self.output(gate * rung)
            mixed = self.recall.beside(mixed, driving, parts, mask)
        hidden = hidden + self.dropout(mixed)
        inner = F.gelu(self.up(self.inner_norm(hidden)))
        outputs: Tensor = hidden + self.dropout(self.down(inner))
        return outputs


class ResonancePreTrainedModel(RecurrentPreTrainedModel):
    """Base class of the body and of the model with its head."""

    config_class = ResonanceConfig
    _no_split_modules = ("ResonanceBlock",)
    _can_record_outputs = {"hidden_states": ResonanceBlock}  # noqa: RUF012 - as transformers does

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComplexWeight):
            init.ones_(module.magnitude)
            init.uniform_(module.phase, -math.pi, math.pi)
        elif isinstance(module, ResonatorBank):
            init.normal_(module.interference, std=INTERFERENCE_RANGE)
            init.zeros_(module.decay_shift)
            init.zeros_(module.frequency_shift)


class ResonanceModel(ResonancePreTrainedModel):
    """Embeddings, blocks, final norm."""

    _input_embed_layer = "tokens"

    def __init__(self, config: ResonanceConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            ResonanceBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        **ignored: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states.

        Args:
            input_ids: Tokens `[B, T]` of any length; beyond T_max they are computed in chunks.
            attention_mask: 0 for padding; the last T columns are used.
            inputs_embeds: `[B, T, D]`, instead of tokens.
            past_key_values: State of the tokens before; updated in place.
            use_cache: Create a state if none is given.
            ignored: Arguments of other families, such as `position_ids`.
        """
        embedded = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, length, _ = embedded.shape
        state = past_key_values
        if state is None and use_cache:
            state = RecurrentState(len(self.layers))
        mask = None if attention_mask is None else attention_mask[:, -length:]
        if state is None and mask is None:
            positions = torch.arange(length, device=embedded.device)
        else:
            ones = torch.ones(rows, length, dtype=torch.long, device=embedded.device)
            counter = state or RecurrentState(0)
            positions = counter.advance(ones if mask is None else mask)
        last = self.config.max_position_embeddings - 1
        hidden = self.dropout(embedded + self.positions(positions.clamp(max=last)))
        for block in self.layers:
            hidden = block(hidden, mask, state)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=state)


class ResonanceForCausalLM(RecurrentForCausalLM, ResonancePreTrainedModel):
    """The model with a head that is tied to the token embedding."""

    body_class = ResonanceModel
    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}  # noqa: RUF012 - see above
