"""TEN, temporal eigenstate networks: a causal language model without attention, in O(T).

The recurrence, c_t = a c_{t-1} + beta_t, computed in chunks.

A mode k has a complex multiplier a_k = exp(d_k + i omega_k): d = ln|a| < 0 is its log-decay, omega
its frequency. Complex numbers are stored as pairs of real ones (index 0 real, 1 imaginary), for
which compilers generate better code. Only Re(c) is needed for every token; the last token's c is
the state of generation. Modes come before sequences, `[2, K, B, T]`: a mode has the same factors
for all sequences, so the products are batched over K without copies.

Powers a^n are computed in float64 and then rounded: a float32 multiplier applied 32,768 times
would be off by 2e-3, and its argument n omega by 4e-3.

Powers, states and their products are in float32 whatever `precision.tf32` is: TF32 rounds factors
to 11 bits, an error of 5e-4 that the gradients of decays and frequencies sum over all tokens. The
products into and out of the eigenstates (`TenCells`) have the run's precision.
"""

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from refocused.models.recall import Parts, ScanModule
from refocused.models.recurrent_lm import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
    RecurrentState,
)
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


CELLS = 2  # per scale; their outputs are averaged
COUPLING = 0.01  # epsilon of R = I + epsilon M / ||M||_F


class TenCells(ScanModule):
    """Cells with a common input: y_t = mean over cells of W_out Re(c_t R).

    c_t = a c_{t-1} + g W_in x_t, where g equalizes the variance of the modes. R = I + epsilon M /
    ||M||_F couples the eigenstates at read-out only, to keep the recurrence diagonal. The
    recurrence is computed in float32, never in TF32 (see above); the products into and out of it
    have the precision of the passes.
    """

    scanned, kernel_module = "eigenstates", "refocused.models.scan_kernel"

    def __init__(self, config: Any, scale: int = 1) -> None:
        super().__init__()
        width, eigenstates = config.hidden_size, config.num_eigenstates
        modes = CELLS * eigenstates
        self.longest = max(config.spectrum_length // scale, 2)  # in tokens of this scale
        self.chunk = config.chunk_size
        self.in_weight = nn.Parameter(torch.empty(2, modes, width))
        self.mixing = nn.Parameter(torch.empty(CELLS, eigenstates, eigenstates))
        self.out_weight = nn.Parameter(torch.empty(CELLS, eigenstates, width))
        self.rate_shift = nn.Parameter(torch.empty(modes))
        self.frequency_shift = nn.Parameter(torch.empty(modes))

    def initialize(self, config: Any) -> None:
        """Draw the matrices, and start at the initial spectrum."""
        init.normal_(self.in_weight, std=config.initializer_range)
        init.normal_(self.mixing, std=config.initializer_range)
        init.normal_(self.out_weight, std=config.residual_deviation)
        init.zeros_(self.rate_shift)
        init.zeros_(self.frequency_shift)

    def spectrum(self) -> Spectrum:
        """Return the present modes, `[2 K]`."""
        return shifted_spectrum(
            self.initial_spectrum(),
            rate_shift=self.rate_shift,
            frequency_shift=self.frequency_shift,
        )

    def initial_spectrum(self) -> Spectrum:
        """Return the initial modes, `[2 K]`."""
        cells, eigenstates, _ = self.mixing.shape
        initial = initial_spectrum(
            cells * eigenstates, longest=self.longest, device=self.rate_shift.device
        )
        # Neighbours in horizon go to different cells, so each cell spans the whole range.
        return Spectrum(
            initial.log_decay.view(eigenstates, cells).T.flatten(),
            initial.frequency.view(eigenstates, cells).T.flatten(),
        )

    def forward(
        self,
        inputs: Tensor,
        state: Tensor | None = None,
        *,
        want_state: bool = False,
        group: SequenceGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs `[B, T, D]`, and c after the last token `[2, 2 K, B]` if wanted.

        `inputs` are `[B, T, D]`, T at least 1; `state` is c before the first token, default zero,
        or what arrives from the other ranks of a `group`.
        """
        spectrum = self.spectrum()
        exact = torch.promote_types(inputs.dtype, torch.float32)
        in_weight = self.in_weight * spectrum.gain.to(exact)[:, None]
        # One product over all tokens of all sequences; modes come first, as in the scan.
        beta = in_weight.flatten(0, 1).to(inputs.dtype) @ inputs.flatten(0, 1).T
        beta = beta.view(2, -1, *inputs.shape[:2]).to(exact)
        modes = (spectrum.log_decay, spectrum.frequency)
        if group is not None:
            last, length = last_state(beta, *modes), inputs.shape[1]
            state = arrived_state(last, *modes, length=length, group=group)
        if self.kernel is None or state is not None or exact != torch.float32:
            real = chunked_scan(beta, *modes, chunk=self.chunk, state=state)
        else:
            real = self.kernel(beta, *modes)
        # R W_out of all cells, divided by their number, `[2 K, D]`.
        out_weight, mixing = self.out_weight.to(exact), self.mixing.to(exact)
        norm = torch.linalg.vector_norm(mixing, dim=(1, 2), keepdim=True)
        coupled = torch.baddbmm(out_weight, mixing * (COUPLING / norm), out_weight)
        read_out = (coupled.flatten(0, 1) / len(coupled)).to(inputs.dtype)
        outputs = (real.flatten(1).to(inputs.dtype).T @ read_out).view_as(inputs)
        return outputs, last_state(beta, *modes, state=state) if want_state else None


class TenMixer(nn.Module):
    """Cells at several time scales, each on averages of s tokens; their outputs are summed.

    Position t uses only groups that ended at or before it: the output of group g, of the tokens
    g s to g s + s - 1, applies from its last token until the next group ends.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.scales = tuple(config.scales)
        self.cells = nn.ModuleList(TenCells(config, scale) for scale in self.scales)

    def forward(
        self, inputs: Tensor, parts: Parts | None = None, group: SequenceGroup | None = None
    ) -> Tensor:
        """Return the mixed tokens `[B, T, D]` of inputs `[B, T, D]`; update `parts`.

        The ranks of a `group` have slices of the tokens, whose length the scales divide.
        """
        outputs: list[Tensor] = []
        for place, (scale, cells) in enumerate(zip(self.scales, self.cells, strict=True)):
            if scale == 1 and parts is None:
                outputs.append(cells(inputs, group=group)[0])
            else:
                outputs.append(self._at_scale(place, inputs, parts, group))
        return functools.reduce(torch.add, outputs)

    def _at_scale(
        self, place: int, inputs: Tensor, parts: Parts | None, group: SequenceGroup | None
    ) -> Tensor:
        """Apply cells to averages of `scale` tokens.

        Of each scale `parts` have c after the last complete group, `[B, 2, K]` in float32 or
        better; the output of that group, `[B, 1, D]`; and the tokens of the incomplete group.
        """
        scale, cells, (rows, length, width) = self.scales[place], self.cells[place], inputs.shape
        names = [f"{name} {place}" for name in ("eigenstates", "latest", "pending")]
        exact = torch.promote_types(inputs.dtype, torch.float32)
        heard, eigenstates = torch.zeros_like(inputs[:, :1]), None
        if parts is not None and names[0] in parts:
            kept, heard, pending = (parts[name] for name in names)
            eigenstates, inputs = kept.movedim(0, 2), torch.cat((pending, inputs), dim=1)
        before, groups = inputs.shape[1] - length, inputs.shape[1] // scale
        if groups:
            whole = inputs[:, : groups * scale].reshape(rows, groups, scale, width)
            means = whole.mean(dim=2, dtype=exact).to(inputs.dtype)
            outputs, eigenstates = cells(
                means, eigenstates, want_state=parts is not None, group=group
            )
            if group is not None:
                heard = group.from_previous(outputs[:, -1:])
            heard = torch.cat((heard, outputs), dim=1)  # index g applies after g groups have ended
        if parts is not None:
            if eigenstates is None:
                modes = cells.rate_shift.numel()  # type: ignore[operator]
                eigenstates = inputs.new_zeros((2, modes, rows), dtype=exact)
            state = eigenstates.movedim(2, 0), heard[:, -1:], inputs[:, groups * scale :]
            parts.update(zip(names, state, strict=True))
        return heard.repeat_interleave(scale, dim=1)[:, before + 1 : before + 1 + length]


class TenConfig(RecurrentConfig):
    """The shape of a TEN model."""

    model_type = "ten"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {"dropout": "hidden_dropout"}  # noqa: RUF012 - as transformers does

    hidden_size: int = 512  # D
    num_hidden_layers: int = 4  # blocks, L
    num_eigenstates: int = 64  # modes of a cell, K; a block has two cells per scale
    max_position_embeddings: int = 512  # training length; the limit with learned positions
    learned_positions: bool = True  # add position embeddings; without them any length is allowed
    scales: list[int] | None = None  # tokens averaged before each of a block's recurrences
    chunk_size: int = 64  # tokens of a chunk of the scan; does not affect the result
    hidden_dropout: float = 0.0
    takes_padding = False  # the recurrence cannot skip it

    def __post_init__(self, **kwargs: Any) -> None:
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.scales = list(self.scales or [1])
        super().__post_init__(**kwargs)

    @property
    def longest_sequence(self) -> int | None:
        """The maximal length of a sequence; None: no limit."""
        return self.max_position_embeddings if self.learned_positions else None


class TenModel(RecurrentModel):
    """Embeddings, blocks of eigenstates, final norm."""

    config_class, mixer_class = TenConfig, TenMixer

    def add_positions(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        state: RecurrentState | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add learned positions, if there are any.

        Raises:
            ValueError: Padding, or a sequence beyond the learned positions.
        """
        first = 0 if state is None else state.length
        if mask is not None and not first and not bool(mask.all()):
            raise ValueError(
                "The attention mask hides tokens, which a recurrence cannot skip. Use sequences of "
                "equal length, without padding."
            )
        if self.config.learned_positions:
            if positions is None:
                end, most = first + embedded.shape[1], self.config.max_position_embeddings
                if end > most:
                    raise ValueError(
                        f"Token {end} has no learned position: this model supports sequences of at "
                        f"most {most} tokens."
                    )
                positions = torch.arange(first, end, device=embedded.device).unsqueeze(0)
            embedded = embedded + self.embed_positions(positions)
        return embedded, None


class TenForCausalLM(RecurrentForCausalLM):
    """The model with a language-model head."""

    config_class, body_class = TenConfig, TenModel
