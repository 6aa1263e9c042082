"""Causal convolution of every channel with a kernel of its own, by FFT, forward and backward.

It is one operator of torch's (`refocused::causal_convolution`), so that a compiled block takes it
as it is: compilers make nothing of complex numbers. Half precision comes and goes, float32 is what
is transformed, since there is no FFT of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of one spectrum: channels are transformed in groups of this size at most. A GPU wants much work at
# once; a processor wants what it works on to stay in its cache, but whole cache lines of channels:
# over 65,536 tokens groups of 8 MiB (16 channels) take about half the time of groups of 256 MiB.
BYTES_ON_CPU = 2**23
BYTES_ON_GPU = 2**28


@torch.library.custom_op("refocused::causal_convolution", mutates_args=())
def causal_convolution(inputs: Tensor, kernel: Tensor) -> Tensor:
    """Return y[b, t, d] = sum over s <= t of kernel[d, t - s] inputs[b, s, d].

    Both are padded with zeros to 2 T, so that nothing comes round from the end of the sequence.

    Args:
        inputs: `[B, T, D]`, of any floating type.
        kernel: `[D, T]`, float32 (or float64, and then that is computed in).

    Returns:
        `[B, T, D]` of the type of `inputs`.
    """
    output = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    length = kernel.shape[1]
    for part in _groups(inputs):
        spectrum = _spectrum(_channels_first(inputs, part, kernel.dtype))
        spectrum *= _spectrum(kernel[part, None])
        output[:, :, part] = _signal(spectrum, length).permute(1, 2, 0)
    return output


@causal_convolution.register_fake
def _shape_of_output(inputs: Tensor, kernel: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


@torch.library.custom_op("refocused::causal_convolution_backward", mutates_args=())
def causal_convolution_backward(
    gradient: Tensor, inputs: Tensor, kernel: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `inputs` and `kernel`: correlations with the output's gradient.

    Spectra are computed anew: keeping them would take eight times the memory of a bfloat16 input.
    """
    of_inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    of_kernel = torch.empty_like(kernel)
    length = kernel.shape[1]
    for part in _groups(inputs):
        spectrum = _spectrum(_channels_first(gradient, part, kernel.dtype))
        across = _spectrum(_channels_first(inputs, part, kernel.dtype)).conj_physical_()
        across *= spectrum
        of_kernel[part] = _signal(across.sum(1), length)
        spectrum *= _spectrum(kernel[part, None]).conj_physical_()
        of_inputs[:, :, part] = _signal(spectrum, length).permute(1, 2, 0)
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


def _groups(inputs: Tensor) -> list[slice]:
    """Cut the channels into groups whose spectra take at most so many bytes."""
    rows, length, channels = inputs.shape
    most = BYTES_ON_CPU if inputs.device.type == "cpu" else BYTES_ON_GPU
    group = max(1, most // (8 * rows * (length + 1)))
    return [slice(start, start + group) for start in range(0, channels, group)]


def _channels_first(signal: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
    """Return some channels with time as the last axis, where FFTs are fastest, `[D', B, T]`.

    The channels are first brought together, then turned as one matrix: taken out of the signal one
    by one, each would fetch every cache line anew.
    """
    together = signal[:, :, part].to(dtype).contiguous()
    return together.flatten(0, 1).T.contiguous().view(-1, *signal.shape[:2])


def _spectrum(signal: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.rfft(signal, n=2 * signal.shape[-1])
    return spectrum


def _signal(spectrum: Tensor, length: int) -> Tensor:
    signal: Tensor = torch.fft.irfft(spectrum, n=2 * length)
    return signal[..., :length]
