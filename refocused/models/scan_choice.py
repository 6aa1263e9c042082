"""Choose the form of a scan: its Triton kernel if that is correct and faster, else torch's."""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from refocused.models.recall import Scan, ScanModule
from refocused.models.timed_trial import fastest_form, why_wrong
from refocused.system.errors import short_reason
from refocused.system.world import World

TRIED = (2, 2500)  # sequences, tokens: several tiles, the last one partial
SMALLEST_LIMIT = 1e-4  # of relative errors


def choose_scans(
    model: nn.Module,
    *,
    batch_shape: tuple[int, int],
    dtype: torch.dtype,
    compiles: bool,
    world: World,
) -> list[str]:
    """Set the kernels that are correct on every rank and faster on rank 0.

    Collective. The micro-batch is `(B, T)`; with `compiles` blocks, and so the forms in torch, will
    be compiled. Returns for each kind of scan which form is used and why, in words.
    """
    kinds: dict[type, list[ScanModule]] = {}
    for module in model.modules():
        if isinstance(module, ScanModule):
            kinds.setdefault(type(module), []).append(module)
    said = []
    for modules in kinds.values():
        form, why = "chunked", "the kernel is for GPUs"
        if world.device_kind == "cuda" and torch.are_deterministic_algorithms_enabled():
            why = "a deterministic run"  # timings vary between starts
        elif world.device_kind == "cuda":
            inputs_of = functools.partial(modules[0].scan_inputs, dtype=dtype, device=world.device)
            form, why = _fastest(modules[0], inputs_of, batch_shape, compiles, world)
        if form == "kernel":
            for module in modules:
                module.kernel = kernel_of(module)
        name = "by the Triton kernel" if form == "kernel" else "in chunks"
        said.append(f"{modules[0].scanned} {name} ({why})")
    return said


def _fastest(
    module: ScanModule,
    inputs_of: Callable[[int, int], list[Tensor]],
    batch_shape: tuple[int, int],
    compiles: bool,
    world: World,
) -> tuple[str, str]:
    in_chunks = torch.compile(module.in_chunks, dynamic=False) if compiles else module.in_chunks

    def run_of(form: str) -> Callable[[], list[Tensor]]:
        scan = in_chunks if form == "chunked" else kernel_of(module)
        return functools.partial(_pass, scan, inputs_of(*batch_shape), slope=torch.ones_like)

    return fastest_form(
        ("chunked", "kernel"),
        failure=lambda form: failure(module, inputs_of(*TRIED)) if form == "kernel" else None,
        run_of=run_of,
        world=world,
    )


def failure(module: ScanModule, inputs: list[Tensor]) -> str | None:
    """Return why a module's kernel cannot be used for such inputs; None if it can."""
    exact, ours = (
        _pass(module.in_chunks, leaves, slope=_noise)
        for leaves in ([one.double() for one in inputs], inputs)
    )
    try:
        found = _pass(kernel_of(module), inputs, slope=_noise)
    except Exception as raised:  # Triton's compiler and driver raise any type
        return short_reason(raised)
    return why_wrong(found, ours=ours, exact=exact, smallest_limit=SMALLEST_LIMIT)


def kernel_of(module: ScanModule) -> Scan:
    """Import a module's kernel."""
    file, _, name = module.kernel_place.partition(":")
    kernel: Scan = getattr(importlib.import_module(file), name)
    return kernel


def _pass(form: Scan, inputs: list[Tensor], *, slope: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a form's outputs, and the gradients of its inputs from the outputs' `slope`."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    found = form(*leaves)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    gradients = torch.autograd.grad(outputs, leaves, [slope(one) for one in outputs])
    return [*(one.detach() for one in outputs), *gradients]


def _noise(output: Tensor) -> Tensor:
    """Return the same random numbers in each type: those of bf16."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn(output.shape, generator=draw).bfloat16().to(output)
