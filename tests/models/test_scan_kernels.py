"""The scans' Triton kernels: on a GPU, or anywhere in its interpreter (TRITON_INTERPRET=1)."""

import mmap

import pytest
import torch
from triton_interpreter import INTERPRETED, needs_interpreter

from refocused.models.recall import matrix_scan
from refocused.models.ten import chunked_scan, initial_spectrum, last_state

pytest.importorskip("triton", reason="needs Triton: pip install triton")
SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE
pytestmark = needs_interpreter if INTERPRETED else pytest.mark.gpu  # skipped where there is none
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("length", [1, 64, 1000, 1024, 2500])
def test_values_and_gradients_equal_the_chunked_form(length: int) -> None:
    from refocused.models.scan_kernel import kernel_scan

    modes = 5
    spectrum = initial_spectrum(modes, longest=2500, device=DEVICE)
    draw = torch.Generator().manual_seed(2)
    beta = torch.randn((2, modes, 2, length), generator=draw, dtype=torch.float64).to(DEVICE)
    gradient = torch.randn((modes, 2, length), generator=draw, dtype=torch.float64).to(DEVICE)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [beta.to(dtype), spectrum.log_decay.clone(), spectrum.frequency.clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        scan = kernel_scan if dtype == torch.float32 else wanted_scan
        found = scan(*leaves)
        found.backward(gradient.to(dtype))
        return [found.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def wanted_scan(*leaves: torch.Tensor) -> torch.Tensor:
        return chunked_scan(*leaves, chunk=100)

    kernel, exact = results(torch.float32), results(torch.float64)
    assert len(kernel) == len(exact) == 4
    for found, wanted in zip(kernel, exact, strict=True):
        scale = max(float(wanted.abs().max()), 1e-3)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("length", "keys", "values", "dtype"),
    [
        (1, 5, 16, torch.float32),
        (64, 16, 17, torch.float32),
        (150, 8, 1, torch.float32),
        (300, 32, 33, torch.float32),
        (150, 16, 17, torch.float16),  # the interpreter has no products of bf16
    ],
)
def test_a_memory_and_its_gradients_equal_the_form_in_chunks(
    length: int, keys: int, values: int, dtype: torch.dtype
) -> None:
    from refocused.models.memory_kernel import kernel_scan

    draw = torch.Generator().manual_seed(2)
    query, key, value, y_slope = (
        torch.randn((2, 4, length, wide), generator=draw).to(dtype) / wide**0.5
        for wide in (keys, keys, values, values)
    )
    gradient = torch.randn((2, 4, keys, values), generator=draw)
    rates = torch.tensor([30.0, 1.0, 1e-3, 0.0])[:, None]
    decay = -rates * torch.rand((2, 4, length), generator=draw)
    decay[1] = -30.0 * (torch.rand((4, length), generator=draw) < 0.1)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        leaves = [one.to(DEVICE, dtype, copy=True) for one in (query, key, value)]
        leaves = [leaf.requires_grad_() for leaf in (*leaves, decay.to(DEVICE, exact, copy=True))]
        kernel = None if dtype == torch.float64 else kernel_scan
        found = matrix_scan(*leaves, chunk=100, kernel=kernel)
        gradients = (y_slope.to(found[0]), gradient.to(found[1]))
        return [*torch.autograd.grad(found, leaves, gradients), *(one.detach() for one in found)]

    limit = 1e-5 if dtype == torch.float32 else 3e-3
    for found, wanted in zip(results(dtype), results(torch.float64), strict=True):
        atol = limit * max(float(wanted.abs().max()), 1e-3)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


def test_a_memory_has_gradients_when_only_some_results_are_used() -> None:
    from refocused.models.memory_kernel import kernel_scan

    draw = torch.Generator().manual_seed(2)
    leaf = torch.randn((1, 2, 70, 5), generator=draw).to(DEVICE).requires_grad_()
    decay = -torch.rand((1, 2, 70), generator=draw).to(DEVICE)
    for place in range(2):
        found, wanted = (
            torch.autograd.grad(
                matrix_scan(leaf, leaf, leaf, decay, chunk=100, kernel=kernel)[place].sum(), leaf
            )[0]
            for kernel in (kernel_scan, None)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_block_with_the_kernel_equals_one_in_chunks(compiles: bool) -> None:
    from refocused.models.memory_kernel import kernel_scan as of_a_memory
    from refocused.models.scan_kernel import kernel_scan
    from refocused.models.ten import TenBlock, TenConfig

    torch.manual_seed(0)
    config = TenConfig(
        hidden_size=16,
        num_eigenstates=3,
        max_position_embeddings=1500,
        scales=[1, 2],
        memory_heads=2,
    )
    block = TenBlock(config, 0).to(DEVICE)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = torch.randn(2, 1500, 16, device=DEVICE)

    def results() -> list[torch.Tensor]:
        block.zero_grad()
        leaf = inputs.clone().requires_grad_()
        graph = torch.compile(block, fullgraph=True, backend="aot_eager") if compiles else block
        found = graph(leaf)
        found.square().mean().backward()
        kept = [parameter.grad for parameter in (leaf, *block.parameters())]
        return [found.detach(), *(gradient.clone() for gradient in kept if gradient is not None)]

    wanted = results()
    for cells in block.mixer.cells:
        cells.kernel = kernel_scan
    block.recall.memory.kernel = of_a_memory
    for found, exact in zip(results(), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=3e-5 * float(exact.abs().max()))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; a GPU has no sparse memory")
def test_imaginary_parts_may_lie_beyond_32_bits() -> None:
    from refocused.models import scan_kernel

    length, far = 100, 2**31 + 16  # elements; pages that are not touched take no memory
    memory = [mmap.mmap(-1, 4 * (far + length), flags=SPARSE) for _ in range(2)]
    beta, out = (torch.frombuffer(one, dtype=torch.float32) for one in memory)
    spectrum = initial_spectrum(1, longest=length)
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn((2, 1, 1, length), generator=draw)
    beta[:length], beta[far:] = inputs.flatten(1)
    modes = (spectrum.log_decay, spectrum.frequency)
    scan_kernel._scan_tiles[(1, 1)](
        *(beta, *scan_kernel._tables(*modes), out, 1, 1, length, far, 1),
        **{"WHOLE": True, "CHUNK": scan_kernel.CHUNK, "ROWS": scan_kernel.ROWS},
    )
    wanted = chunked_scan(inputs, *modes, chunk=100)
    torch.testing.assert_close(out[:length], wanted.flatten())
    state = last_state(inputs, *modes)
    torch.testing.assert_close(out[far + length - 1], state[1, 0, 0])
