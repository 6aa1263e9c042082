"""Choose the form of TEN's scan: the Triton kernel if it is correct and faster, else chunks."""

import functools

import torch
from torch import Tensor, nn

from refocused.models.ten.cells import Scan, TenCells
from refocused.models.ten.scan import chunked_scan, initial_spectrum
from refocused.models.timed_trial import fastest_seconds
from refocused.system.errors import short_reason
from refocused.system.world import World

TRIED = (4, 2, 2500)  # modes, sequences, tokens: several tiles, the last one partial
LARGEST_ERROR = 1e-4  # of values and gradients, relative to the largest


def choose_scan(
    model: nn.Module, *, batch_shape: tuple[int, int], compiles: bool, world: World
) -> str:
    """Set the kernel in a model's cells if it is correct on every rank and faster on rank 0.

    Collective. The micro-batch is `(B, T)`; with `compiles` blocks, and so the chunked form, will
    be compiled. Returns which form is used and why, in words.
    """
    cells = [module for module in model.modules() if isinstance(module, TenCells)]
    if world.device_kind != "cuda":
        return "eigenstates in chunks (the kernel is for GPUs)"
    if torch.are_deterministic_algorithms_enabled():  # timings vary between starts
        return "eigenstates in chunks (a deterministic run)"
    reasons = world.gather(_failure(world.device))
    reason = next((reason for reason in reasons if reason), None)
    if reason is not None:
        return f"eigenstates in chunks (the kernel does not work here: {reason})"
    from refocused.models.ten.scan_kernel import kernel_scan

    chunked = functools.partial(chunked_scan, chunk=cells[0].chunk)
    seconds = functools.partial(
        pass_seconds, modes=len(cells[0].rate_shift), batch_shape=batch_shape, device=world.device
    )
    in_chunks: Scan = torch.compile(chunked, dynamic=False) if compiles else chunked
    taken = world.on_rank_0(lambda: (seconds(kernel_scan), seconds(in_chunks)))
    return use_faster(cells, kernel_scan, by_kernel=taken[0], by_chunks=taken[1])


def use_faster(cells: list[TenCells], kernel: Scan, *, by_kernel: float, by_chunks: float) -> str:
    """Set the kernel in the cells if it is faster (in seconds); return what runs, in words."""
    kernel_ms, chunks_ms = f"{1e3 * by_kernel:.1f} ms", f"{1e3 * by_chunks:.1f} ms"
    if by_kernel >= by_chunks:
        return f"eigenstates in chunks ({chunks_ms} a scan; the kernel {kernel_ms})"
    for one in cells:
        one.kernel = kernel
    return f"eigenstates by the Triton kernel ({kernel_ms} a scan; in chunks {chunks_ms})"


def largest_error(scan: Scan, device: torch.device) -> float:
    """Return the largest relative error of values and gradients, against float64 in chunks."""
    modes, rows, length = TRIED
    spectrum = initial_spectrum(modes, longest=length, device=device)
    draw = torch.Generator().manual_seed(2)
    beta = torch.randn((2, modes, rows, length), generator=draw).to(device)
    slope = torch.randn((modes, rows, length), generator=draw).to(device)

    def results(form: Scan, dtype: torch.dtype) -> list[Tensor]:
        leaves = [beta.to(dtype), spectrum.log_decay.clone(), spectrum.frequency.clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        found = form(*leaves)
        return [found.detach(), *torch.autograd.grad(found, leaves, slope.to(dtype))]

    exact = results(functools.partial(chunked_scan, chunk=100), torch.float64)
    errors = [
        (found.double() - wanted).abs().max() / wanted.abs().max()
        for found, wanted in zip(results(scan, torch.float32), exact, strict=True)
    ]
    return float(torch.stack(errors).max())


def pass_seconds(
    scan: Scan, *, modes: int, batch_shape: tuple[int, int], device: torch.device
) -> float:
    """Return the seconds of a forward and a backward pass on a GPU."""
    rows, length = batch_shape
    spectrum = initial_spectrum(modes, longest=length, device=device)
    beta = torch.randn((2, modes, rows, length), device=device, requires_grad=True)
    leaves = [leaf.requires_grad_() for leaf in (spectrum.log_decay, spectrum.frequency)]
    return fastest_seconds(
        lambda: torch.autograd.grad(scan(beta, *leaves).sum(), (beta, *leaves)), device
    )


def _failure(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on this rank; None if it can."""
    try:
        from refocused.models.ten.scan_kernel import kernel_scan

        error = largest_error(kernel_scan, device)
    except Exception as raised:  # Triton's compiler and driver raise any type
        return short_reason(raised)
    return None if error <= LARGEST_ERROR else f"its relative error is {error:.1e}"  # also for NaN
