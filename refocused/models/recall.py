"""Parts that let a recurrent block look up content: short convolution, memory, attention.

All are off by default. Each keeps what generation needs in a block's `parts`, by name, with
sequences first. A convolution and a memory keep as much after any number of tokens; attention keeps
the keys and values of all of them.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from refocused.models.sequence_parallel import SequenceGroup

Parts = dict[str, Tensor]
Scan = Callable[..., Any]  # of tensors; returns a tensor or several
TAP_DEVIATION = 0.1  # of a short convolution's initial taps
MEMORY_CHUNK = 128  # tokens
SHARPNESS = 2.0  # of the softmax of queries and keys
WRITE_SHIFT = 3.0  # an untrained token is written by sigmoid(-3) = 0.05
LEAST_WEIGHT = 1e-6  # added to the denominator of an average
CHUNKS_TOGETHER = 64  # whose states are one product; more of them would cost N for each token


class ShortConvolution(nn.Module):
    """A causal convolution of each channel with W taps: y_t = x_t + sum over j < W of w_j x_{t-j}.

    Taps are learned as differences from the identity, and are a vector, to exclude them from weight
    decay. Before a memory odd channels start as x_t + x_{t-1}.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.taps: int = config.convolution_width
        self.is_joined = config.memory_heads > 0 and self.taps > 1
        # w_0 of all channels, w_1, ...
        self.weight = nn.Parameter(torch.zeros(self.taps * config.hidden_size))

    def initialize(self, config: Any) -> None:
        """Draw the taps."""
        taps = torch.empty_like(self.weight).normal_(std=TAP_DEVIATION)
        if self.is_joined:
            taps.view(self.taps, -1)[1, 1::2] += 1.0
        init.copy_(self.weight, taps)

    def forward(
        self, inputs: Tensor, parts: Parts | None = None, group: SequenceGroup | None = None
    ) -> Tensor:
        """Return the outputs `[B, T, D]` of inputs `[B, T, D]`; update `parts`."""
        length, reach = inputs.shape[1], self.taps - 1
        if group is not None:
            parts = {"recent": group.from_previous(inputs[:, length - reach :])}
        if parts is None or "recent" not in parts:
            recent = F.pad(inputs, (0, 0, reach, 0))
        else:
            recent = torch.cat((parts["recent"], inputs), dim=1)
        if parts is not None:
            parts["recent"] = recent[:, length:].clone()
        outputs = inputs
        for lag, taps in enumerate(self.weight.view(self.taps, -1)):
            outputs = torch.addcmul(outputs, recent[:, reach - lag : reach - lag + length], taps)
        return outputs


class ScanModule(nn.Module):
    """A module whose scan has a form in torch and, for a zero state, one in Triton."""

    scanned: ClassVar[str]  # what it computes, in words
    kernel_module: ClassVar[str]  # has it as `kernel_scan`; importing it needs Triton
    kernel: Scan | None = None  # if set, used for a zero state


class Memory(ScanModule):
    """Heads whose state is a matrix: an average of what was written, weighted by its keys.

        S_t = a_t S_{t-1} + b_t k_t [v_t, 1]^T    [n_t, d_t] = q_t^T S_t
        y_t = W_out (g_t * n_t / d_t)

    Queries, keys and values are D / H wide. Queries and keys are softmaxes over their width, so all
    weights are positive (Shen et al. 2021, Efficient attention). The write gate b_t is a sigmoid
    that starts nearly closed, where it is an exponential: a token that opens it soon outweighs
    hundreds of others, as in softmax attention and with the exponential gate of Beck et al. 2024,
    xLSTM. The output gate g_t is a sigmoid of each channel. Head h decays by ln a_t = -2 rate_h
    sigmoid(.), so each token sets it between 0 and twice the head's rate (Yang et al. 2024, Gated
    linear attention; one decay for each head as in Dao and Gu 2024, Mamba-2). Untrained horizons
    1 / rate_h are `longest` tokens, twice, four times as many, and so on.
    """

    scanned, kernel_module = "memories", "refocused.models.memory_kernel"

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.memory_heads
        self.heads, self.longest = heads, config.spectrum_length
        self.read = nn.Linear(width, 4 * width, bias=False)  # queries, keys, values, output gate
        self.read.reads_memory = True  # type: ignore[assignment]
        self.gates = nn.Linear(width, 2 * heads, bias=False)  # decay and write
        self.out = nn.Linear(width, width)
        self.out.is_residual = True  # type: ignore[assignment]

    def rates(self) -> Tensor:
        """Return the initial decay of each head, 1 / horizon, `[H]`, in float64."""
        heads = torch.arange(self.heads, dtype=torch.float64, device=self.gates.weight.device)
        rates: Tensor = 0.5**heads / self.longest
        return rates

    def forward(
        self,
        inputs: Tensor,
        parts: Parts | None = None,
        mask: Tensor | None = None,
        group: SequenceGroup | None = None,
    ) -> Tensor:
        """Return what is read for each token `[B, T, D]`; arguments as for `CausalAttention`.

        Padding is not written.
        """
        rows, length, width = inputs.shape
        exact = torch.promote_types(inputs.dtype, torch.float32)
        read = self.read(inputs).view(rows, length, 4, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = (SHARPNESS * read[:2]).softmax(dim=-1)
        gates = self.gates(inputs).to(exact).view(rows, length, 2, -1).permute(2, 0, 3, 1)
        log_decay = -2 * self.rates().to(exact)[:, None] * gates[0].sigmoid()
        write = (gates[1] - WRITE_SHIFT).sigmoid()
        if mask is not None:
            write = write * mask[:, None]
        write = write[..., None].to(inputs.dtype)
        outputs, state = matrix_scan(
            query,
            key,
            torch.cat((read[2] * write, write), dim=-1),
            log_decay,
            chunk=MEMORY_CHUNK,
            state=None if parts is None else parts.get("memory"),
            kernel=self.kernel,
        )
        if parts is not None:
            parts["memory"] = state
        if group is not None:
            # The states that the ranks before left behind decay over the tokens between.
            passed = _sums(group.from_all(log_decay.sum(-1)).movedim(0, -1)).movedim(-1, 0)
            before = group.ranks_before(state)[:, None, None] > 0
            since = passed[max(group.index - 1, 0)] - passed
            kept = since.masked_fill(~before, -torch.inf).exp()
            arrived = group.weighted(group.from_all(state), kept).to(query.dtype)
            kept = _sums(log_decay).exp()[..., None].to(query.dtype)
            outputs = outputs + (query * kept) @ arrived
        averages = outputs[..., :-1] / (outputs[..., -1:] + LEAST_WEIGHT)
        averages = averages * read[3].sigmoid()
        mixed: Tensor = self.out(averages.transpose(1, 2).reshape(rows, length, width))
        return mixed


def matrix_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    chunk: int,
    state: Tensor | None = None,
    kernel: Scan | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = q_t^T S_t, S_t = a_t S_{t-1} + k_t v_t^T, by matrix products, exactly.

    Within a chunk, token s counts for token j with (q_j k_s) exp(sum of ln a over s < t <= j). The
    states between chunks are products with their decays, of up to `CHUNKS_TOGETHER` at once. No
    factor exceeds 1, so none overflows. Everything but the products of tokens is in float32 or
    better.

    Args:
        query: `[B, H, T, K]`, of the type of the passes, as are keys and values.
        key: `[B, H, T, K]`.
        value: `[B, H, T, V]`.
        log_decay: ln a, `[B, H, T]`, at most 0, float32 or better.
        chunk: Tokens of a chunk; changes the result only by rounding.
        state: S before the first token, `[B, H, K, V]`; default zero.
        kernel: What computes the scan of a zero state with float32 decays.

    Returns:
        y `[B, H, T, V]`, and S after the last token, in the type of `log_decay`.
    """
    if kernel is not None and state is None and log_decay.dtype == torch.float32:
        outputs, last = kernel(query, key, value, log_decay)
        return outputs, last
    rows, heads, length, _ = query.shape
    chunk = min(chunk, length)
    if more := -length % chunk:
        query, key, value = (F.pad(one, (0, 0, 0, more)) for one in (query, key, value))
        log_decay = F.pad(log_decay, (0, more))
    query, key, value = (
        one.reshape(rows, heads, -1, chunk, one.shape[-1]) for one in (query, key, value)
    )
    passed = _sums(log_decay.view(rows, heads, -1, chunk))
    decay = _between(passed).to(query.dtype)
    outputs = (query @ key.mT * decay) @ value
    to_end = (passed[..., -1:] - passed).exp()[..., None].to(key.dtype)
    written = ((key * to_end).mT @ value).to(passed.dtype)
    first = torch.zeros_like(written[:, :, 0]) if state is None else state
    states = _memory_states(written, passed[..., -1].double(), first[:, :, None])
    before = states[:, :, :-1].to(query.dtype)
    outputs = outputs + (query * passed.exp()[..., None].to(query.dtype)) @ before
    return outputs.flatten(2, 3)[:, :, :length], states[:, :, -1]


def _memory_states(written: Tensor, passed: Tensor, state: Tensor) -> Tensor:
    """Return S before each of N chunks and after the last, `[B, H, N + 1, K, V]`.

    `written` `[B, H, N, K, V]` is what each chunk adds, `passed` `[B, H, N]` its whole log-decay.
    """
    states = [state]
    parts = (torch.split(tensor, CHUNKS_TOGETHER, dim=2) for tensor in (written, passed))
    for chunks, decays in zip(*parts, strict=True):
        added = torch.cat((states[-1][:, :, -1:], chunks), dim=2)
        decay = _between(_sums(F.pad(decays, (1, 0)))).to(added.dtype)
        states.append((decay @ added.flatten(3)).view_as(added)[:, :, 1:])
    return torch.cat(states, dim=2)


def _sums(values: Tensor) -> Tensor:
    """Return the cumulative sums over the last axis."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return doubled_sums(values)
    return values.cumsum(-1)


def doubled_sums(values: Tensor) -> Tensor:
    """Return cumulative sums over the last axis by doubling their length.

    torch's `cumsum` of floats has no deterministic form on GPUs, and raises in such a run.
    """
    reach = 1
    while reach < values.shape[-1]:
        values = values + F.pad(values, (reach, 0))[..., :-reach]
        reach *= 2
    return values


def _between(passed: Tensor) -> Tensor:
    """Return exp(passed_j - passed_s) for s <= j, else 0, `[..., N, N]`, of sums `[..., N]`."""
    places = torch.arange(passed.shape[-1], device=passed.device)
    difference = passed[..., :, None] - passed[..., None, :]
    return difference.masked_fill(places > places[:, None], -torch.inf).exp()


class CausalAttention(nn.Module):
    """Attention by torch's sdpa, the mixer of some of the blocks of a hybrid model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.attention_heads
        self.read = nn.Linear(width, 3 * width)  # queries, keys, values
        self.out = nn.Linear(width, width)
        self.out.is_residual = True  # type: ignore[assignment]

    def forward(
        self,
        inputs: Tensor,
        parts: Parts | None = None,
        mask: Tensor | None = None,
        group: SequenceGroup | None = None,
    ) -> Tensor:
        """Return the attended values `[B, T, D]`.

        Args:
            inputs: `[B, T, D]`.
            parts: Keys and values of the tokens before; updated in place.
            mask: `[B, T]`, 0 for padding, which only attends to itself; None: no padding.
            group: Ranks that have slices of the tokens.
        """
        rows, length, width = inputs.shape
        read = self.read(inputs).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = read.unbind(0)
        if group is not None:
            query, key, value = group.heads_of_all_tokens(query, key, value)
        allowed = None
        if parts is not None or mask is not None:
            real = torch.ones_like(inputs[..., 0], dtype=torch.bool) if mask is None else mask > 0
            if parts:
                key = torch.cat((parts["keys"], key), dim=2)
                value = torch.cat((parts["values"], value), dim=2)
                real = torch.cat((parts["real"], real), dim=1)
            if parts is not None:
                parts.update(keys=key, values=value, real=real)
            places = torch.arange(key.shape[2], device=key.device)
            lag = places[-length:, None] - places
            allowed = (lag == 0) | ((lag > 0) & real[:, None, None, :])
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None
        )
        attended = attended.transpose(1, 2)
        if group is not None:
            attended = group.tokens_of_all_heads(attended)
        mixed: Tensor = self.out(attended.reshape(rows, length, width))
        return mixed
