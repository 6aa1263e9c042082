"""How far the forms of the loss and of the scans are from float64; for tests and benchmarks."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from refocused.models.head_loss import IGNORED_LABEL, PLAIN, HeadForm, LogitTerms, head_loss
from refocused.models.recall import MEMORY_CHUNK, Memory, matrix_scan
from refocused.models.ten import TenCells, chunked_scan, initial_spectrum

ScanForm = Literal["chunked", "kernel"]
SCANS = {"eigenstates": TenCells.kernel_module, "memories": Memory.kernel_module}
# Of relative errors: smaller ones are right in any case.
SMALLEST = {"head": 1e-5, "eigenstates": 1e-4, "memories": 1e-4}


def why_wrong(
    what: Literal["head", "eigenstates", "memories"],
    form: HeadForm,
    dtype: torch.dtype,
    device: torch.device,
    **given: Any,
) -> str | None:
    """Return why a form of the loss or of a scan is wrong here; None if it is right.

    Its errors from float64 may be twice those of the form in chunks. `given` goes to `head_errors`
    or `scan_errors`.
    """

    def errors(form: Any) -> list[float]:
        if what == "head":
            return head_errors(form, dtype, device, **given)
        return scan_errors(what, form, dtype, device, **given)

    try:
        found, ours = errors(form), errors("chunked")
    except Exception as raised:  # Triton's compiler and driver raise any type
        return f"{type(raised).__name__}: {raised}"
    # NaN fails this comparison.
    if all(one <= max(SMALLEST[what], 2 * other) for one, other in zip(found, ours, strict=True)):
        return None
    return f"relative errors are {', '.join(f'{error:.1e}' for error in found)}"


def head_errors(
    form: HeadForm,
    dtype: torch.dtype,
    device: torch.device,
    *,
    terms: LogitTerms = PLAIN,
    sizes: tuple[int, int, int] = (500, 64, 5000),  # tokens, width, vocabulary
    chunk: int = 64,
) -> list[float]:
    """Return the relative errors of the loss and of the gradients of both its inputs."""
    draw = torch.Generator(device).manual_seed(2)
    tokens, width, rows = sizes
    hidden, weight = (
        torch.randn(size, width, generator=draw, device=device).mul_(0.5).to(dtype)
        for size in (tokens, rows)
    )
    labels = torch.randint(rows, (tokens,), generator=draw, device=device)
    labels[::8] = IGNORED_LABEL

    def loss_of(form: HeadForm) -> Callable[..., Tensor]:
        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            return head_loss(form, hidden, weight, labels, chunk=chunk, terms=terms)

        return loss

    return errors_of(loss_of(form), loss_of("chunked"), [hidden, weight])


def scan_errors(
    scan: str,
    form: ScanForm,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int = 2,
    length: int = 2500,  # several tiles, the last one partial
    sizes: tuple[int, int] = (4, 16),  # modes: all together; memories: heads, width of one
) -> list[float]:
    """Return the relative errors of a scan's outputs and of the gradients of all its inputs.

    That of eigenstates is in float32, or better, in passes of any `dtype`.
    """
    heads, width = sizes
    exact = torch.promote_types(dtype, torch.float32)
    in_chunks: Callable[..., Any]
    if scan == "eigenstates":
        modes = heads * width
        spectrum = initial_spectrum(modes, longest=length, device=device)
        beta = torch.randn((2, modes, rows, length), dtype=exact, device=device)
        inputs = [beta, spectrum.log_decay, spectrum.frequency]

        def in_chunks(*inputs: Tensor) -> Tensor:
            return chunked_scan(*inputs, chunk=64)

    else:
        shape = (rows, heads, length)
        query, key = torch.randn((2, *shape, width), device=device).softmax(dim=-1).to(dtype)
        value = torch.randn((*shape, width + 1), dtype=dtype, device=device)
        # Decays of none to e^-1, most of them little.
        inputs = [query, key, value, -(torch.rand(shape, dtype=exact, device=device) ** 8)]

        def in_chunks(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return matrix_scan(*inputs, chunk=MEMORY_CHUNK)

    kernel = None if form == "chunked" else importlib.import_module(SCANS[scan]).kernel_scan
    return errors_of(kernel or in_chunks, in_chunks, inputs)


def errors_of(
    form: Callable[..., Any], exact_form: Callable[..., Any], inputs: list[Tensor]
) -> list[float]:
    """Return the relative errors of a form's outputs and gradients from an exact form's."""
    found = results_of(form, inputs)
    exact = results_of(exact_form, [one.double() for one in inputs])
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - wanted).norm() / wanted.norm()) for one, wanted in pairs]


def results_of(form: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Return a form's outputs, and its inputs' gradients from the same random gradients."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    results = form(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    gradients = [_slope(output.shape, output.dtype, output.device) for output in outputs]
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(outputs, leaves, gradients),
    ]


@functools.lru_cache(maxsize=4)
def _slope(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same random numbers, those of bf16, in each type; 1 for a loss."""
    if not shape:
        return torch.ones(shape, dtype=dtype, device=device)
    draw = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=draw).bfloat16().to(device, dtype)
