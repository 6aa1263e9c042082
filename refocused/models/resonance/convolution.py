"""Causal convolution of each channel with its own kernel, by FFT, forward and backward.

A custom torch operator (`refocused::causal_convolution`), since compilers do not support complex
numbers. 16-bit inputs are transformed in float32, as there is no FFT of bfloat16. Its rounding
noise of 1e-7 spreads over all tokens, so outputs are causal only up to rounding.
"""

from typing import Any

import torch
from torch import Tensor

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
