"""The cases of the ten family: its scan, its layer, and what they are held against."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from long_context import Promise, cost
from long_context_resonance import AGAINST_ATTENTION, LENGTHS, WIDTH, attention
from measuring import Record
from torch import Tensor

from refocused.models.ten.cells import TenMixer
from refocused.models.ten.scan import chunked_scan, initial_spectrum, powers

SCANNED = (1, 32768, 128)  # batch, tokens, modes
CHUNK, EIGENSTATES = 64, 64

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]


def scan(form: Scan) -> Record:
    """Scan modes of all horizons, forward and backward; the error is the output's."""
    batch, tokens, modes = SCANNED
    torch.manual_seed(0)
    spectrum = initial_spectrum(modes, longest=tokens)
    beta = torch.randn(2, modes, batch, tokens) * spectrum.gain.float()[:, None, None]
    exact = chunked_scan(beta.double(), spectrum.log_decay, spectrum.frequency, chunk=100)
    leaves = [t.requires_grad_() for t in (beta, spectrum.log_decay, spectrum.frequency)]
    slope = torch.randn(modes, batch, tokens)
    compiled = torch.compile(form, dynamic=False)
    compiled(*leaves).backward(slope)  # type: ignore[no-untyped-call]  # it is compiled here

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(*leaves).backward(slope)  # type: ignore[no-untyped-call]

    record = cost(step, tokens=batch * tokens)
    with torch.no_grad():
        error = (compiled(*leaves) - exact).abs().max() / exact.abs().max()
    return record | {"error": float(error)}


def in_chunks(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    """The form that trains."""
    return chunked_scan(beta, log_decay, frequency, chunk=CHUNK)


def by_fft(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    """The same by complex FFTs, padded to twice the length."""
    length = beta.shape[-1]
    kernel = torch.complex(*powers(log_decay, frequency, length, dtype=beta.dtype))
    inputs = torch.complex(beta[0], beta[1])
    spectrum = torch.fft.fft(inputs, n=2 * length) * torch.fft.fft(kernel[:, None], n=2 * length)
    outputs: Tensor = torch.fft.ifft(spectrum)[..., :length].real
    return outputs


def layer(length: int) -> Record:
    """The part of a block in which positions meet, in eager mode."""
    mixer = TenMixer(WIDTH, eigenstates=EIGENSTATES, longest=length, chunk=CHUNK, scales=[1])
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.02)
    inputs = torch.randn(1, length, WIDTH, requires_grad=True)

    def step() -> None:
        mixer.zero_grad()
        inputs.grad = None
        mixer(inputs).sum().backward()

    return cost(step, tokens=length)


CASES: dict[str, Callable[[], Record]] = {
    "ten scan, in chunks, compiled": functools.partial(scan, in_chunks),
    "ten scan, by FFT, compiled": functools.partial(scan, by_fft),
    **{f"ten layer, {length:,}": functools.partial(layer, length) for length in LENGTHS},
    f"sdpa layer, {AGAINST_ATTENTION:,}": attention,
}
PROMISES = (
    Promise(
        "ten scan: time of the FFT form's",
        lambda rows: (
            rows["ten scan, in chunks, compiled"]["cpu_seconds"]
            / rows["ten scan, by FFT, compiled"]["cpu_seconds"]
        ),
        at_most=0.35,
    ),
    Promise(
        "ten scan: error against float64",
        lambda rows: rows["ten scan, in chunks, compiled"]["error"],
        at_most=1e-5,
    ),
    Promise(
        "ten: time a token, 65,536 over 8,192",
        lambda rows: (
            rows["ten layer, 65,536"]["us_per_token"] / rows["ten layer, 8,192"]["us_per_token"]
        ),
        at_most=1.1,
    ),
    Promise(
        "ten: memory a token, 65,536 over 8,192",
        lambda rows: (
            rows["ten layer, 65,536"]["bytes_per_token"]
            / rows["ten layer, 8,192"]["bytes_per_token"]
        ),
        at_most=1.1,
    ),
    Promise(
        "ten: times as fast as sdpa at 16,384",
        lambda rows: (
            rows["sdpa layer, 16,384"]["cpu_seconds"] / rows["ten layer, 16,384"]["cpu_seconds"]
        ),
        at_least=40.0,
    ),
)
