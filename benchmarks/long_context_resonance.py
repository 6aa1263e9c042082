"""The cases of the resonance family: its convolution, its layer, and what they are held against."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from long_context import Promise, cost
from measuring import Record
from torch import Tensor, nn

from refocused.models.resonance.convolution import causal_convolution
from refocused.models.resonance.resonance import ResonanceBlock, ResonanceConfig
from refocused.models.resonance.resonators import ring_on, silence

CONVOLVED = (1, 32768, 256)  # batch, tokens, channels
WIDTH, HEADS, RESONATORS = 384, 6, 64
LENGTHS = (8192, 16384, 32768, 65536)
AGAINST_ATTENTION = 16384
CHUNK = 8192


def convolution(convolve: Callable[[Tensor, Tensor], Tensor]) -> Record:
    """Convolve channels with kernels, forward and backward; the error is the output's."""
    batch, tokens, channels = CONVOLVED
    torch.manual_seed(0)
    inputs = torch.randn(batch, tokens, channels, requires_grad=True)
    kernel = (torch.randn(channels, tokens) / tokens**0.5).requires_grad_()
    slope = torch.randn(batch, tokens, channels)

    def step() -> None:
        inputs.grad = kernel.grad = None
        convolve(inputs, kernel).backward(slope)  # type: ignore[no-untyped-call]

    record = cost(step, tokens=batch * tokens)
    with torch.no_grad():
        few = slice(0, 4)
        exact = causal_convolution(inputs[..., few].double(), kernel[few].double())
        difference = convolve(inputs[..., few], kernel[few]) - exact
    return record | {"error": float(difference.abs().max() / exact.abs().max())}


def along_the_middle(inputs: Tensor, kernel: Tensor) -> Tensor:
    """The usual form: complex FFTs along the middle axis of `[B, T, D]`."""
    length = inputs.shape[1]
    spectrum = torch.fft.fft(inputs, n=2 * length, dim=1)
    spectrum = spectrum * torch.fft.fft(kernel.T, n=2 * length, dim=0)
    outputs: Tensor = torch.fft.ifft(spectrum, dim=1).real[:, :length]
    return outputs


def layer(length: int) -> Record:
    """The part of a block in which positions meet: gate, resonators, output projection."""
    config = ResonanceConfig(
        hidden_size=WIDTH, num_resonators=RESONATORS, max_position_embeddings=length
    )
    block = ResonanceBlock(config, 0)
    inputs = torch.randn(1, length, WIDTH, requires_grad=True)

    def step() -> None:
        block.zero_grad()
        inputs.grad = None
        block.output(block.gate(inputs).sigmoid() * block.resonators(inputs)).sum().backward()

    return cost(step, tokens=length)


class Attention(nn.Module):
    """Causal attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `[B, T, D]`."""
        heads = self.joint(inputs).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return outputs


def attention() -> Record:
    """The same for attention."""
    module = Attention()
    inputs = torch.randn(1, AGAINST_ATTENTION, WIDTH, requires_grad=True)
    return cost(lambda: module(inputs).sum().backward(), tokens=AGAINST_ATTENTION)


def carried(length: int) -> Record:
    """The resonators alone, without gradients, chunk by chunk."""
    config = ResonanceConfig(
        hidden_size=WIDTH, num_resonators=RESONATORS, max_position_embeddings=max(LENGTHS)
    )
    resonators = ResonanceBlock(config, 0).resonators
    inputs = torch.randn(1, length, WIDTH)

    @torch.no_grad()
    def step() -> None:
        tuning = resonators.tuning(torch.float32)
        state = silence(inputs, tuning)
        for part in torch.split(inputs, CHUNK, dim=1):
            _, state = ring_on(part, tuning, state, chunk=CHUNK)

    return cost(step, tokens=length)


CASES: dict[str, Callable[[], Record]] = {
    "convolution, real, last axis": functools.partial(convolution, causal_convolution),
    "convolution, complex, middle axis": functools.partial(convolution, along_the_middle),
    **{f"resonance layer, {length:,}": functools.partial(layer, length) for length in LENGTHS},
    f"sdpa layer, {AGAINST_ATTENTION:,}": attention,
    **{
        f"resonance carried, {length:,}": functools.partial(carried, length)
        for length in (LENGTHS[0], LENGTHS[-1])
    },
}
PROMISES = (
    Promise(
        "convolution: time of the complex form's",
        lambda rows: (
            rows["convolution, real, last axis"]["cpu_seconds"]
            / rows["convolution, complex, middle axis"]["cpu_seconds"]
        ),
        at_most=0.6,
    ),
    Promise(
        "resonance: time a token, 65,536 over 8,192",
        lambda rows: (
            rows["resonance layer, 65,536"]["us_per_token"]
            / rows["resonance layer, 8,192"]["us_per_token"]
        ),
        at_most=1.25,
    ),
    Promise(
        "resonance: memory a token, 65,536 over 8,192",
        lambda rows: (
            rows["resonance layer, 65,536"]["bytes_per_token"]
            / rows["resonance layer, 8,192"]["bytes_per_token"]
        ),
        at_most=1.1,
    ),
    Promise(
        "resonance: times as fast as sdpa at 16,384",
        lambda rows: (
            rows["sdpa layer, 16,384"]["cpu_seconds"]
            / rows["resonance layer, 16,384"]["cpu_seconds"]
        ),
        at_least=10.0,
    ),
)
