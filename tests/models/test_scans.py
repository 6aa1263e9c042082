"""Scans and convolutions against their definitions token by token, and their Triton kernels.

The kernels run on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

import functools
import mmap
from types import SimpleNamespace

import pytest
import torch
from kernel_errors import errors_of
from small_families import relative
from torch.func import functional_call
from triton_interpreter import INTERPRETED, needs_interpreter

from refocused.models import recall, resonance, ten
from refocused.models.recall import CausalAttention, Memory, ShortConvolution, matrix_scan
from refocused.models.resonance import (
    ResonanceConfig,
    ResonatorBank,
    Tuning,
    causal_convolution,
    grid,
    kernel,
    ring_on,
    silence,
)
from refocused.models.ten import (
    TenCells,
    TenConfig,
    chunked_scan,
    initial_spectrum,
    last_state,
    shifted_spectrum,
)

ROWS, HEADS, MODES, WIDTH = 2, 3, 6, 8
both_types = pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-11), (torch.float32, 1e-5)], ids=["f64", "f32"]
)


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stirred(module, *, by=0.3):
    """Move all parameters of a new module, in float64."""
    with torch.no_grad():
        for number, parameter in enumerate(module.double().parameters()):
            parameter.add_(by * drawn(*parameter.shape, seed=number))
    return module


def check(form, definition, inputs, dtype, within):
    """Outputs and the gradients of all inputs are those of the definition in float64."""
    rounded = [tensor.detach().to(dtype) for tensor in inputs]
    errors = errors_of(form, definition, rounded)
    assert max(errors) < within, errors  # also if one is NaN


def test_a_wrong_gradient_counts_as_an_error():
    def wrong(one, other):
        return one * other.detach() + 1.05 * (one.detach() * (other - other.detach()))

    inputs = [drawn(50), drawn(50, seed=2)]
    errors = errors_of(wrong, torch.mul, inputs)
    assert errors == pytest.approx([0, 0, 0.05])


# The convolution by FFT.


def lag_by_lag(inputs, response):
    outputs = torch.zeros_like(inputs)
    for lag in range(response.shape[1]):
        shifted = inputs[:, : inputs.shape[1] - lag] * response[:, lag]
        outputs = outputs + torch.nn.functional.pad(shifted, (0, 0, lag, 0))
    return outputs


@pytest.mark.parametrize("length", [1, 2, 37, 256])
@both_types
def test_a_convolution_is_a_sum_over_all_lags(length, dtype, within):
    inputs = drawn(2, length, 3), drawn(3, length, seed=2)
    check(causal_convolution, lag_by_lag, inputs, dtype, within)


@pytest.mark.parametrize("cut", ["transformed", "transposed by tokens", "transposed by channels"])
def test_grouping_channels_does_not_change_a_convolution(cut, monkeypatch):
    if cut == "transformed":
        monkeypatch.setattr(resonance, "BYTES_ON_CPU", 8 * 2 * 17 * 3)  # groups of 3, 3 and 1
    elif cut == "transposed by tokens":
        monkeypatch.setattr(resonance, "TOKENS_TRANSPOSED", 5)  # 5, 5, 5 and 1
    else:  # as on a GPU
        channels = [slice(0, 4), slice(4, 8)]
        monkeypatch.setattr(resonance, "_transposed_at_once", lambda _: channels)
    inputs = drawn(2, 16, 7), drawn(7, 16, seed=2)
    check(causal_convolution, lag_by_lag, inputs, torch.float64, 1e-12)


def test_a_convolution_of_bfloat16_is_rounded_once_and_torch_checks_the_operator():
    inputs, response = drawn(1, 64, 4).bfloat16(), drawn(4, 64).float()
    outputs = causal_convolution(inputs, response)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, causal_convolution(inputs.float(), response).bfloat16())
    leaves = drawn(2, 8, 3).requires_grad_(), drawn(3, 8).requires_grad_()
    torch.library.opcheck(causal_convolution, leaves)


# Resonators.


def bank(width=3, count=5, longest=64):
    config = ResonanceConfig(
        hidden_size=width, num_resonators=count, max_position_embeddings=longest
    )
    return ResonatorBank(config)


def resonators_by_token(inputs, interference, decay_shift, frequency_shift, magnitude, phase):
    """The recurrence, the interference and the read-out at each token."""
    count, width = magnitude.shape
    decay, frequency = grid(count, 64)
    decay_now = decay * decay_shift.exp()
    multiplier = torch.polar((-decay_now).exp(), frequency + decay * frequency_shift)
    scale = (2 * (1 - (-2 * decay_now).exp()) / count).sqrt()
    weight = torch.polar(magnitude * scale[:, None], phase.view(count, width))
    state = torch.zeros(len(inputs), count, width, dtype=torch.complex128)
    outputs = []
    for token in inputs.unbind(1):
        state = multiplier[:, None] * state + token[:, None, :]
        mixed = state + interference.to(state.dtype) @ state
        outputs.append((weight * mixed).sum(1).real)
    return torch.stack(outputs, dim=1)


@both_types
def test_resonators_are_their_recurrence(dtype, within):
    module = stirred(bank())
    names = [name for name, _ in module.named_parameters()]

    def form(inputs, *parameters):
        return functional_call(module, dict(zip(names, parameters, strict=True)), (inputs,))

    check(form, resonators_by_token, [drawn(2, 96, 3), *module.parameters()], dtype, within)


@pytest.mark.parametrize("chunk", [1, 7, 32, 96, 100])
@both_types
@torch.no_grad()
def test_resonators_in_chunks_equal_one_pass(chunk, dtype, within):
    module, inputs = stirred(bank()).to(dtype), drawn(2, 96, 3).to(dtype)
    whole, tuning = module(inputs), module.tuning(dtype)
    chunked, state = ring_on(inputs, tuning, silence(inputs, tuning), chunk=chunk)
    assert relative(chunked, whole) < within
    first, half = ring_on(inputs[:, :50], tuning, silence(inputs, tuning), chunk=chunk)
    second, end = ring_on(inputs[:, 50:], tuning, half, chunk=chunk)
    assert relative(torch.cat((first, second), dim=1), whole) < within
    assert relative(end, state) < within


def test_powers_stay_exact_over_a_whole_long_context():
    decay, frequency = grid(16, 32768)
    powers = resonance.powers(Tuning(decay, frequency, torch.zeros(2, 16, 1)), 32768)
    lags = torch.arange(32768, dtype=torch.float64)
    exact = torch.polar((-decay[:, None] * lags).exp(), frequency[:, None] * lags)
    assert float((torch.complex(*powers.double()) - exact).abs().max()) < 1e-6


def test_bfloat16_parameters_hardly_detune_a_long_kernel():
    """The kernel of 32,768 lags stays accurate with rounded shifts of a line width."""
    torch.manual_seed(0)
    module = bank(4, 16, 32768)
    torch.nn.init.uniform_(module.decay_shift, -1, 1)
    torch.nn.init.uniform_(module.frequency_shift, -1, 1)
    exact = kernel(module.tuning(torch.float32), 32768)
    tail = slice(16384, None)

    def detuned_by(tuning):
        response = kernel(tuning, 32768)
        assert response.dtype == torch.float32
        return float(((response - exact)[:, tail].norm() / exact[:, tail].norm()).detach())

    assert detuned_by(module.bfloat16().tuning(torch.bfloat16)) < 0.02
    tuning = module.float().tuning(torch.float32)  # rounding omega itself would change the kernel
    assert (
        detuned_by(Tuning(tuning.decay, tuning.frequency.bfloat16().double(), tuning.weights)) > 0.5
    )


# Eigenstates.


def modes_of(length, *, modes=MODES):
    """Return inputs with outputs near one, log-decays, and frequencies."""
    spectrum = initial_spectrum(modes, longest=length)
    beta = drawn(2, modes, ROWS, length, seed=7) * spectrum.gain[:, None, None]
    return [beta, spectrum.log_decay, spectrum.frequency]


def eigenstates_by_token(beta, log_decay, frequency, state):
    """Return Re(c) `[K, B, T]` and the last c `[2, K, B]`."""
    multiplier, c = torch.polar(log_decay.exp(), frequency)[:, None], torch.complex(*state)
    outputs = []
    for token in torch.complex(*beta).unbind(-1):
        c = multiplier * c + token
        outputs.append(c.real)
    return torch.stack(outputs, dim=-1), torch.stack((c.real, c.imag))


@pytest.mark.parametrize("chunk", [1, 7, 32, 150, 1000])
@both_types
def test_eigenstates_in_chunks_are_their_recurrence(chunk, dtype, within):
    def form(*inputs):
        *modes, state = inputs
        return chunked_scan(*modes, chunk=chunk, state=state), last_state(*modes, state=state)

    inputs = [*modes_of(150), drawn(2, MODES, ROWS, seed=8)]
    check(form, eigenstates_by_token, inputs, dtype, within)


@pytest.mark.parametrize("chunk", [64, 256])
def test_eigenstates_in_float32_stay_accurate_over_32768_tokens(chunk):
    spectrum = initial_spectrum(8, longest=32768)
    beta, modes = drawn(2, 8, 1, 32768).float(), (spectrum.log_decay, spectrum.frequency)
    exact = chunked_scan(beta.double(), *modes, chunk=100)
    error = (chunked_scan(beta, *modes, chunk=chunk) - exact).abs().amax(dim=(1, 2))
    assert float((error / exact.abs().amax(dim=(1, 2))).max()) < 1e-5


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_gradient_of_token_32000_reaches_token_100(chunk):
    length, first, last = 32768, 100, 32000
    spectrum = initial_spectrum(16, longest=length)
    beta = torch.zeros((2, 16, 1, length), requires_grad=True)
    outputs = chunked_scan(beta, spectrum.log_decay, spectrum.frequency, chunk=chunk)
    (gradient,) = torch.autograd.grad(outputs[:, 0, last].sum(), beta)
    lag = last - first
    exact = torch.polar((lag * spectrum.log_decay).exp(), -lag * spectrum.frequency)
    parts = torch.view_as_real(exact).T.float()
    torch.testing.assert_close(gradient[:, :, 0, first], parts, rtol=1e-4, atol=1e-8)
    assert float(gradient[:, -1, 0, first].norm()) > 0.1  # the slowest mode: exp(-31,900 / 23,700)
    assert not gradient[..., last + 1 :].any()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_product_of_eigenstates_runs_in_tf32(device, compiles, monkeypatch):
    taken = []

    def noting(product):
        def noted(*arguments):
            taken.append(torch.get_float32_matmul_precision())
            return product(*arguments)

        return noted

    if device == "cpu":
        monkeypatch.setattr(ten, "_could_be_tf32", lambda factor: factor.dtype == torch.float32)
    inputs = [tensor.float().to(device) for tensor in modes_of(150)]
    scan = functools.partial(chunked_scan, chunk=16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as precision.tf32 does
    try:
        graph = torch.compile(scan, fullgraph=True, backend="aot_eager") if compiles else scan
        graph(*(tensor.clone().requires_grad_() for tensor in inputs))
        for name in ("bmm", "baddbmm"):
            monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
        assert max(errors_of(graph, scan, inputs)) < 1e-5
        assert torch.get_float32_matmul_precision() == "high"  # the rest of the model's
    finally:
        torch.set_float32_matmul_precision(before)
    assert taken[: 3 + 6] == ["highest"] * (3 + 6)  # forward and backward


@pytest.mark.parametrize(
    ("precision", "on_gpu", "dtype", "held"),
    [
        ("high", True, torch.float32, True),
        ("highest", True, torch.float32, False),
        ("high", False, torch.float32, False),  # a CPU has no TF32
        ("high", True, torch.float64, False),
    ],
)
def test_products_are_forced_to_float32_only_if_tf32_is_possible(precision, on_gpu, dtype, held):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        factor = SimpleNamespace(is_cuda=on_gpu, dtype=dtype)
        assert ten._could_be_tf32(factor) is held
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def test_cells_average_their_recurrences_read_out_through_r():
    config = TenConfig(hidden_size=8, num_eigenstates=3, max_position_embeddings=64, chunk_size=4)
    cells, inputs = TenCells(config).double(), drawn(2, 20, 8)
    for number, parameter in enumerate(cells.parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=number))
    spectrum, total = cells.spectrum(), torch.zeros_like(inputs)
    for cell in range(2):
        modes = slice(3 * cell, 3 * cell + 3)
        weight = cells.in_weight[:, modes] * spectrum.gain[modes, None]
        beta = torch.einsum("pkd,btd->pkbt", weight, inputs)
        state = torch.zeros(2, 3, 2, dtype=torch.float64)
        real, _ = eigenstates_by_token(
            beta, spectrum.log_decay[modes], spectrum.frequency[modes], state
        )
        mixing = cells.mixing[cell]
        coupling = torch.eye(3, dtype=torch.float64) + 0.01 * mixing / mixing.norm()
        total += real.permute(1, 2, 0) @ coupling @ cells.out_weight[cell]
    torch.testing.assert_close(cells(inputs)[0], total / 2, rtol=1e-10, atol=1e-10)


def test_the_gain_keeps_the_variance_of_every_mode():
    spectrum = initial_spectrum(8, longest=200)
    beta = drawn(2, 8, 1, 20000) * spectrum.gain[:, None, None]
    real = chunked_scan(beta, spectrum.log_decay, spectrum.frequency, chunk=64)
    assert ((real[:, 0].std(dim=1) - 1).abs() < 0.15).all()


@pytest.mark.parametrize("moved", [0.3, -0.7, 1.0])
def test_rounding_the_learned_numbers_to_bf16_is_harmless_at_every_horizon(moved):
    initial = initial_spectrum(64, longest=32768)
    shift = torch.full((64,), moved * 1.001)
    exact, rounded = (
        shifted_spectrum(initial, rate_shift=one, frequency_shift=one)
        for one in (shift, shift.bfloat16())
    )
    assert float((rounded.log_decay / exact.log_decay - 1).abs().max()) < 0.004
    horizon = -1 / exact.log_decay
    phase = (rounded.frequency - exact.frequency).abs() * horizon
    assert float(phase.max()) < 0.01  # radians, at the horizon
    # What rounding nu and omega themselves would do:
    nu = (-exact.log_decay).log()
    assert float((nu.bfloat16().double() - nu).abs().max()) > 0.02
    naive = (exact.frequency.bfloat16().double() - exact.frequency).abs() * horizon
    assert float(naive.max()) > 10


# Memories, and the parts beside a mixer.


def memories_of(length, *, fastest=2.0):
    """Return queries, keys, values, log-decays down to -2 `fastest`, and a state."""
    rates = torch.tensor([fastest, 0.05, 1e-4], dtype=torch.float64)[:, None]
    decay = -rates * 2 * drawn(ROWS, HEADS, length, seed=4).sigmoid()
    state = drawn(ROWS, HEADS, WIDTH, WIDTH, seed=5)
    return [*drawn(3, ROWS, HEADS, length, WIDTH, seed=3), decay, state]


def memories_by_token(query, key, value, log_decay, state):
    """S_t = a_t S_{t-1} + k_t v_t^T, y_t = q_t^T S_t."""
    outputs = []
    for t in range(query.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        state = state + key[:, :, t, :, None] * value[:, :, t, None, :]
        outputs.append((query[:, :, t, None, :] @ state).squeeze(2))
    return torch.stack(outputs, dim=2), state


@pytest.mark.parametrize(
    ("chunk", "together"), [(1, 64), (7, 64), (32, 64), (150, 64), (1000, 64), (8, 1), (8, 4)]
)
def test_memories_in_chunks_are_their_recurrence(chunk, together, monkeypatch):
    monkeypatch.setattr(recall, "CHUNKS_TOGETHER", together)

    def form(*inputs):
        return matrix_scan(*inputs[:-1], chunk=chunk, state=inputs[-1])

    check(form, memories_by_token, memories_of(150), torch.float64, 1e-12)


def test_fast_decays_neither_overflow_nor_lose_float32():
    """exp(-sum) of a chunk alone would be exp(1,000)."""
    exact, _ = memories_by_token(*memories_of(150, fastest=20.0))
    inputs = [tensor.float().requires_grad_() for tensor in memories_of(150, fastest=20.0)]
    outputs, _ = matrix_scan(*inputs[:-1], chunk=64, state=inputs[-1])
    assert relative(outputs, exact) < 1e-5
    gradients = torch.autograd.grad(outputs.sum(), inputs[:-1])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("length", [1, 2, 7, 128, 150])
def test_sums_of_deterministic_runs_are_cumulative_sums(length):
    def cumulative(values):
        return values.cumsum(-1)

    check(recall.doubled_sums, cumulative, [drawn(2, 3, length)], torch.float64, 1e-12)


PARTS = TenConfig(hidden_size=12, memory_heads=3, attention_heads=3, max_position_embeddings=64)


@torch.no_grad()
def test_a_memory_is_its_defining_equations():
    torch.manual_seed(0)
    memory, inputs = Memory(PARTS).double(), drawn(2, 20, 12)
    q, k, v, g = (inputs @ memory.read.weight.T).view(2, 20, 4, 3, 4).permute(2, 0, 3, 1, 4)
    gates = memory.gates(inputs).view(2, 20, 2, 3).permute(2, 0, 3, 1)
    rates = torch.tensor([1 / 64, 1 / 128, 1 / 256], dtype=torch.float64)
    write = torch.sigmoid(gates[1] - 3)[..., None]
    heard, _ = memories_by_token(
        (2 * q).softmax(-1),
        (2 * k).softmax(-1),
        torch.cat((v, torch.ones_like(v[..., :1])), -1) * write,
        -2 * rates[:, None] * gates[0].sigmoid(),
        torch.zeros(2, 3, 4, 5, dtype=torch.float64),
    )
    heard = g.sigmoid() * heard[..., :-1] / (heard[..., -1:] + 1e-6)
    exact = memory.out(heard.transpose(1, 2).reshape(2, 20, 12))
    assert relative(memory(inputs), exact) < 1e-13


@torch.no_grad()
def test_attention_is_softmax_over_earlier_tokens():
    torch.manual_seed(0)
    attention, inputs = CausalAttention(PARTS).double(), drawn(2, 20, 12)
    q, k, v = attention.read(inputs).view(2, 20, 3, 3, 4).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    exact = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 12))
    assert relative(attention(inputs), exact) < 1e-13


@torch.no_grad()
def test_a_short_convolution_starts_as_the_identity_and_adds_its_taps():
    config = TenConfig(hidden_size=5, convolution_width=3)
    convolution, inputs, taps = ShortConvolution(config).double(), drawn(2, 9, 5), drawn(3, 5)
    assert torch.equal(convolution(inputs), inputs)
    convolution.weight.copy_(taps.flatten())
    exact = inputs + lag_by_lag(inputs, torch.nn.functional.pad(taps, (0, 0, 0, 6)).T)
    torch.testing.assert_close(convolution(inputs), exact)


# Triton's kernels.

in_triton = needs_interpreter if INTERPRETED else pytest.mark.gpu  # skipped where there is none
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE


@in_triton
@pytest.mark.parametrize("length", [1, 64, 1000, 1024, 2500])
def test_the_kernel_of_eigenstates_equals_the_form_in_chunks(length):
    from refocused.models.scan_kernel import kernel_scan

    inputs = [tensor.to(DEVICE) for tensor in modes_of(2500, modes=5)]
    inputs[0] = inputs[0][..., :length]
    check(kernel_scan, functools.partial(chunked_scan, chunk=100), inputs, torch.float32, 1e-5)


@in_triton
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
def test_the_kernel_of_memories_equals_the_form_in_chunks(length, keys, values, dtype):
    from refocused.models.memory_kernel import kernel_scan

    rates = torch.tensor([30.0, 1.0, 1e-3, 0.0])[:, None]
    draw = torch.Generator().manual_seed(2)
    decay = -rates * torch.rand((2, 4, length), generator=draw)
    decay[1] = -30.0 * (torch.rand((4, length), generator=draw) < 0.1)
    query, key, value = (
        (drawn(2, 4, length, wide, seed=wide) / wide**0.5).to(dtype)
        for wide in (keys, keys, values)
    )
    inputs = [tensor.to(DEVICE) for tensor in (query, key, value, decay)]
    in_chunks = functools.partial(matrix_scan, chunk=100)
    errors = errors_of(kernel_scan, in_chunks, inputs)
    assert max(errors) < (1e-5 if dtype == torch.float32 else 3e-3), errors


@in_triton
@pytest.mark.parametrize("place", [0, 1])
def test_the_kernel_of_memories_differentiates_each_result_alone(place):
    from refocused.models.memory_kernel import kernel_scan

    leaf, decay = drawn(1, 2, 70, 5).float().to(DEVICE), -drawn(1, 2, 70).abs().float().to(DEVICE)
    errors = errors_of(
        lambda leaf: kernel_scan(leaf, leaf, leaf, decay)[place],
        lambda leaf: matrix_scan(leaf, leaf, leaf, decay.double(), chunk=100)[place],
        [leaf],
    )
    assert max(errors) < 1e-5


@in_triton
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_block_with_the_kernels_equals_one_in_chunks(compiles):
    from refocused.models import memory_kernel, scan_kernel
    from refocused.models.recurrent_lm import RecurrentBlock
    from refocused.models.ten import TenMixer

    config = TenConfig(
        hidden_size=16,
        num_eigenstates=3,
        max_position_embeddings=1500,
        scales=[1, 2],
        memory_heads=2,
    )
    torch.manual_seed(0)
    plain, block = (RecurrentBlock(config, 0, TenMixer).to(DEVICE) for _ in range(2))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain.load_state_dict(block.state_dict())
    for cells in block.mixer.cells:
        cells.kernel = scan_kernel.kernel_scan
    block.memory.kernel = memory_kernel.kernel_scan
    graph = torch.compile(block, fullgraph=True, backend="aot_eager") if compiles else block
    for module in (block, plain):
        inputs = drawn(2, 1500, 16).float().to(DEVICE)
        (graph if module is block else plain)(inputs).square().mean().backward()
    for (name, mine), other in zip(block.named_parameters(), plain.parameters(), strict=True):
        assert relative(mine.grad, other.grad) < 3e-5, name


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; a GPU has no sparse memory")
@in_triton
def test_imaginary_parts_may_lie_beyond_32_bits():
    from refocused.models import scan_kernel

    length, far = 100, 2**31 + 16  # elements; pages that are not touched take no memory
    memory = [mmap.mmap(-1, 4 * (far + length), flags=SPARSE) for _ in range(2)]
    beta, out = (torch.frombuffer(pages, dtype=torch.float32) for pages in memory)
    spectrum, inputs = initial_spectrum(1, longest=length), drawn(2, 1, 1, length).float()
    beta[:length], beta[far:] = inputs.flatten(1)
    modes = (spectrum.log_decay, spectrum.frequency)
    scan_kernel._scan_tiles[(1, 1)](
        *(beta, *scan_kernel._tables(*modes), out, 1, 1, length, far, 1),
        **{"WHOLE": True, "CHUNK": scan_kernel.CHUNK, "ROWS": scan_kernel.ROWS},
    )
    torch.testing.assert_close(out[:length], chunked_scan(inputs, *modes, chunk=100).flatten())
    torch.testing.assert_close(out[far + length - 1], last_state(inputs, *modes)[1, 0, 0])
