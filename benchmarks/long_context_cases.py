"""The layers that long_context.py measures: resonance, ten, and attention for comparison."""

import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Record
from torch import Tensor, nn

from refocused.models.recall import Memory, ShortConvolution
from refocused.models.resonance import (
    ResonanceBlock,
    ResonanceConfig,
    causal_convolution,
    ring_on,
    silence,
)
from refocused.models.ten import TenMixer, chunked_scan, initial_spectrum, powers

PASSES = 3
CONVOLVED = (1, 32768, 256)  # batch, tokens, channels
SCANNED = (1, 32768, 128)  # batch, tokens, modes
WIDTH, HEADS, RESONATORS = 384, 6, 64
LENGTHS = (8192, 16384, 32768, 65536)
AGAINST_ATTENTION = 16384
CHUNK = 8192
SCAN_CHUNK, EIGENSTATES = 64, 64


def cost(step: Callable[[], Any], *, tokens: int) -> Record:
    """Measure a step: the minimum of its CPU time over several, and its memory growth."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(PASSES):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "cpu_seconds": min(times),
        "tokens": tokens,
        "us_per_token": min(times) / tokens * 1e6,
        "peak_mib": peak_kib / 1024,
        "bytes_per_token": peak_kib * 1024 / tokens,
    }


def convolution(convolve: Callable[[Tensor, Tensor], Tensor]) -> Record:
    """Convolve channels with kernels, forward and backward; the error is the output's."""
    batch, tokens, channels = CONVOLVED
    torch.manual_seed(0)
    inputs = torch.randn(batch, tokens, channels, requires_grad=True)
    kernel = (torch.randn(channels, tokens) / tokens**0.5).requires_grad_()
    gradient = torch.randn(batch, tokens, channels)

    def step() -> None:
        inputs.grad = kernel.grad = None
        convolve(inputs, kernel).backward(gradient)  # type: ignore[no-untyped-call]

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


def resonance_layer(length: int) -> Record:
    """The sequence mixer of a block: gate, resonators, output projection."""
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


Scan = Callable[[Tensor, Tensor, Tensor], Tensor]


def scan(form: Scan) -> Record:
    """Scan modes of all horizons, forward and backward; the error is the output's."""
    batch, tokens, modes = SCANNED
    torch.manual_seed(0)
    spectrum = initial_spectrum(modes, longest=tokens)
    beta = torch.randn(2, modes, batch, tokens) * spectrum.gain.float()[:, None, None]
    exact = chunked_scan(beta.double(), spectrum.log_decay, spectrum.frequency, chunk=100)
    leaves = [t.requires_grad_() for t in (beta, spectrum.log_decay, spectrum.frequency)]
    gradient = torch.randn(modes, batch, tokens)
    compiled = torch.compile(form, dynamic=False)
    compiled(*leaves).backward(gradient)  # type: ignore[no-untyped-call]  # it is compiled here

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(*leaves).backward(gradient)  # type: ignore[no-untyped-call]

    record = cost(step, tokens=batch * tokens)
    with torch.no_grad():
        error = (compiled(*leaves) - exact).abs().max() / exact.abs().max()
    return record | {"error": float(error)}


def in_chunks(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    """The form that trains."""
    return chunked_scan(beta, log_decay, frequency, chunk=SCAN_CHUNK)


def by_fft(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    """The same by complex FFTs, padded to twice the length."""
    length = beta.shape[-1]
    kernel = torch.complex(*powers(log_decay, frequency, length, dtype=beta.dtype))
    inputs = torch.complex(beta[0], beta[1])
    spectrum = torch.fft.fft(inputs, n=2 * length) * torch.fft.fft(kernel[:, None], n=2 * length)
    outputs: Tensor = torch.fft.ifft(spectrum)[..., :length].real
    return outputs


def ten_layer(length: int) -> Record:
    """The sequence mixer of a block, in eager mode."""
    mixer = TenMixer(WIDTH, eigenstates=EIGENSTATES, longest=length, chunk=SCAN_CHUNK, scales=[1])
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.02)
    inputs = torch.randn(1, length, WIDTH, requires_grad=True)

    def step() -> None:
        mixer.zero_grad()
        inputs.grad = None
        mixer(inputs).sum().backward()

    return cost(step, tokens=length)


def recall_layer(length: int) -> Record:
    """What recall adds to a block, in eager mode: a convolution of 4 taps and a memory."""
    parts = nn.ModuleList((ShortConvolution(WIDTH, 4), Memory(WIDTH, heads=HEADS, longest=length)))
    inputs = torch.randn(1, length, WIDTH, requires_grad=True)

    def step() -> None:
        parts.zero_grad()
        inputs.grad = None
        parts[1](parts[0](inputs)).sum().backward()

    return cost(step, tokens=length)


ATTENTION = {f"sdpa layer, {AGAINST_ATTENTION:,}": attention}
CASES: dict[str, dict[str, Callable[[], Record]]] = {
    "resonance": {
        "convolution, real, last axis": functools.partial(convolution, causal_convolution),
        "convolution, complex, middle axis": functools.partial(convolution, along_the_middle),
        **{f"resonance layer, {n:,}": functools.partial(resonance_layer, n) for n in LENGTHS},
        **ATTENTION,
        **{
            f"resonance carried, {n:,}": functools.partial(carried, n)
            for n in (LENGTHS[0], LENGTHS[-1])
        },
    },
    "ten": {
        "ten scan, in chunks, compiled": functools.partial(scan, in_chunks),
        "ten scan, by FFT, compiled": functools.partial(scan, by_fft),
        **{f"ten layer, {n:,}": functools.partial(ten_layer, n) for n in LENGTHS},
        **ATTENTION,
    },
    "recall": {
        **{f"recall layer, {n:,}": functools.partial(recall_layer, n) for n in LENGTHS},
        **ATTENTION,
    },
}
