import pytest
import torch
import torch.nn.functional as F
from kernel_errors import errors_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import needs_interpreter

from refocused.models import head_loss as module
from refocused.models.head_loss import (
    IGNORED_LABEL,
    PLAIN,
    LogitTerms,
    LossHead,
    _losses_and_gradients,
    head_loss,
)

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 24, 16, 50
HAS_FUSED = hasattr(nn, "LinearCrossEntropyOptions")
FUSED = pytest.param(
    "fused", marks=pytest.mark.skipif(not HAS_FUSED, reason="needs a newer torch, such as 2.13")
)
KERNEL = pytest.param("kernel", marks=needs_interpreter)
in_every_form = pytest.mark.parametrize("form", ["chunked", FUSED, KERNEL])
in_forms_for_16_bits = pytest.mark.parametrize("form", ["chunked", KERNEL])


def sample(dtype, *, tokens=TOKENS, vocabulary=VOCABULARY):
    """Hidden states, a weight and labels of which about a fifth is ignored."""
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn((ROWS, tokens, WIDTH), generator=draw, dtype=torch.float64)
    weight = torch.randn((vocabulary, WIDTH), generator=draw, dtype=torch.float64)
    labels = torch.randint(vocabulary, (ROWS, tokens), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.2] = IGNORED_LABEL
    return hidden.to(dtype).requires_grad_(), nn.Parameter(weight.to(dtype)), labels


def ours(hidden, weight, labels, *, chunk=7):
    return LossHead(weight, chunk_tokens=chunk)(hidden, labels)


def full(hidden, weight, labels, terms=PLAIN):
    """Return the loss from all logits, with the gradient of the z-loss but not its value."""
    logits = (hidden @ weight.T).flatten(0, 1)
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    counted = labels.flatten() != IGNORED_LABEL
    pull = terms.z_loss * logits[counted].logsumexp(1).square().mean()
    return F.cross_entropy(logits, labels.flatten()) + (pull - pull.detach())


PRECISE = {torch.float64: 1e-10, torch.float32: 2e-5}
HALF = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
PADDING = 14
CASES = {
    **{f"chunks of {size}": {"chunk": size} for size in (1, 7, 16, 48, 1000)},  # of 48 tokens
    "capped": {"terms": LogitTerms(2.0)},
    "pulled": {"terms": LogitTerms(None, 0.3)},
    "capped and pulled": {"terms": LogitTerms(2.0, 0.3)},
    "padded": {"vocabulary": VOCABULARY},
    "padded and capped": {"vocabulary": VOCABULARY, "terms": LogitTerms(3.0)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [*PRECISE, *HALF], ids=str)
@in_every_form
def test_loss_and_gradients_equal_those_of_all_logits(case, dtype, form):
    settings = {"chunk": 7} | CASES[case]
    terms, is_padded = settings.get("terms", PLAIN), "vocabulary" in settings
    if (form == "kernel" and dtype == torch.float64) or (
        form == "fused" and (terms != PLAIN or dtype in HALF)
    ):
        pytest.skip("it has none")
    hidden, weight, labels = sample(dtype)

    def of_form(hidden, weight):
        padded = F.pad(weight, (0, 0, 0, PADDING), value=9.0) if is_padded else weight
        return head_loss(form, hidden.flatten(0, 1), padded, labels.flatten(), **settings)

    def of_all_logits(hidden, weight):
        return 3.0 * full(hidden, weight, labels, terms)

    given = [hidden.detach(), weight.detach()]
    errors = errors_of(lambda *given: 3.0 * of_form(*given), of_all_logits, given)
    assert max(errors) < (PRECISE | HALF)[dtype], errors
    with torch.no_grad():
        validated = of_form(hidden, weight)
    loss = of_form(hidden, weight)
    assert torch.equal(loss, validated)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.dtype == dtype
    counted = labels != IGNORED_LABEL
    assert 0 < int(counted.sum()) < labels.numel()
    assert torch.equal(gradient.abs().sum(-1) > 0, counted)  # the others have no weight at all


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [*PRECISE, *HALF], ids=str)
def test_the_losses_of_labels_have_the_mean_of_the_loss(case, dtype):
    settings = {"chunk": 7} | CASES[case]
    hidden, weight, labels = sample(dtype)
    padded = nn.Parameter(F.pad(weight, (0, 0, 0, PADDING), value=9.0))
    head = LossHead(padded, chunk_tokens=settings["chunk"], terms=settings.get("terms", PLAIN))
    head.vocabulary = VOCABULARY
    with torch.no_grad():
        each, mean = head(hidden, labels, of_each=True), head(hidden, labels)
    counted = labels != IGNORED_LABEL
    assert each.shape == labels.shape and not each[~counted].any()
    assert float(each.double().sum() / counted.sum()) == pytest.approx(float(mean), rel=1e-6)
    alone = [full(hidden[row : row + 1], weight, labels[row : row + 1]) for row in range(ROWS)]
    by_row = each.sum(1) / counted.sum(1)
    if head.terms.softcap is None:
        assert by_row.tolist() == pytest.approx([float(loss) for loss in alone], rel=2e-2)


@in_forms_for_16_bits
def test_logits_of_16_bits_are_capped_in_float32(form):
    draw = torch.Generator().manual_seed(6)
    logits = torch.randn(8, 9000, generator=draw).mul_(8).bfloat16()  # up to twice the cap
    index = torch.randint(9000, (8, 1), generator=draw)
    exact = logits.double().requires_grad_()
    capped = 15 * torch.tanh(exact / 15)
    torch.testing.assert_close(LogitTerms(15.0).cap(logits).double(), capped, rtol=0, atol=1e-5)
    wanted = F.cross_entropy(capped, index[:, 0], reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum(), exact)
    row_losses = _losses_and_gradients
    if form == "kernel":
        from refocused.models.head_kernel import kernel_losses as row_losses
    gradients = torch.empty_like(logits, dtype=torch.float32)
    losses = row_losses(logits, index, gradients, LogitTerms(15.0))
    torch.testing.assert_close(losses[:, 0].double(), wanted, rtol=1e-5, atol=0)
    assert float((gradients.double() - gradient).norm() / gradient.norm()) < 1e-5


def test_torchs_own_form_has_no_terms():
    hidden, weight, labels = sample(torch.float32)
    with pytest.raises(ValueError, match="neither a logit softcap nor a z-loss"):
        head_loss("fused", hidden, weight, labels, chunk=7, terms=LogitTerms(z_loss=1e-4))


@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_every_form
def test_only_ignored_labels_give_zero_loss_and_gradient(tokens, dtype, form):
    hidden, weight, labels = sample(dtype, tokens=tokens)
    none = torch.full_like(labels, IGNORED_LABEL).flatten()
    loss = head_loss(form, hidden.flatten(0, 1), weight, none, chunk=7)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.all(gradient == 0)


class Made(TorchDispatchMode):
    """Records the tensors that operations create, by address."""

    def __init__(self):
        super().__init__()
        self.tensors = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.tensors[tensor.data_ptr()] = tensor
        return made

    @property
    def largest(self):
        return max(tensor.numel() for tensor in self.tensors.values())


def test_the_largest_tensor_is_one_chunk_of_logits():
    hidden, weight, labels = sample(torch.float32, tokens=128, vocabulary=1000)
    with Made() as plain:
        full(hidden, weight, labels).backward()
    with Made() as chunked:
        ours(hidden, weight, labels, chunk=32).backward()
    assert plain.largest == 2 * 128 * 1000
    assert chunked.largest == 32 * 1000


def test_the_losses_of_labels_are_made_chunk_by_chunk():
    hidden, weight, labels = sample(torch.bfloat16, tokens=128, vocabulary=1000)
    with torch.no_grad(), Made() as made:
        LossHead(weight, chunk_tokens=16)(hidden, labels, of_each=True)
    assert made.largest == 16 * 1000


def test_the_weights_gradient_is_summed_in_place():
    hidden, weight, labels = sample(torch.bfloat16, vocabulary=1000)
    head = LossHead(weight, chunk_tokens=7)
    with Made() as found:
        head(hidden, labels)
    sized = [one.dtype for one in found.tensors.values() if one.numel() == weight.numel()]
    assert sized == [torch.float32]


def test_operands_are_not_widened_if_torch_adds_in_float32(monkeypatch):
    hidden, weight, labels = sample(torch.bfloat16)
    wanted = torch.autograd.grad(ours(hidden, weight, labels, chunk=16), (hidden, weight))
    betas = []

    def addmm(total, left, right, *, out_dtype, out, beta=1):  # as on a GPU
        assert left.dtype == right.dtype == torch.bfloat16
        assert out is total and out.dtype == out_dtype == torch.float32
        betas.append(beta)
        return out.copy_(left.float() @ right.float() + (beta * out if beta else 0))

    monkeypatch.setattr(torch, "addmm", addmm)
    module.adds_in_float32.cache_clear()
    try:
        found = torch.autograd.grad(ours(hidden, weight, labels, chunk=16), (hidden, weight))
    finally:
        module.adds_in_float32.cache_clear()
    assert betas == [1, 0, 1, 1]  # the first call is the test of support
    for mine, plain in zip(found, wanted, strict=True):
        assert float((mine.double() - plain.double()).norm() / plain.norm()) < 5e-3


def saved_elements(head, hidden, labels):
    counted = []
    hooks = (lambda tensor: counted.append(tensor.numel()) or tensor, lambda tensor: tensor)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        head(hidden, labels)
    return sum(counted)


def test_only_the_gradients_are_saved_and_only_if_needed():
    hidden, weight, labels = sample(torch.float32)
    head = LossHead(weight, chunk_tokens=2)
    kept = saved_elements(head, hidden, labels)
    assert kept == hidden.numel() + weight.numel() + 1  # and the number of labels
    with torch.no_grad(), Made() as work:
        assert saved_elements(head, hidden, labels) == 0
    assert work.largest < min(hidden.numel(), weight.numel())


@in_forms_for_16_bits
def test_a_loss_scale_of_65536_neither_overflows_nor_underflows_in_fp16(form):
    scale = 65536.0
    hidden, weight, labels = sample(torch.float16, tokens=1024, vocabulary=8000)
    loss = head_loss(form, hidden.flatten(0, 1), weight, labels.flatten(), chunk=512)
    found = torch.autograd.grad(loss * scale, (hidden, weight))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(full(*exact, labels), exact)
    for mine, plain in zip(found, expected, strict=True):
        assert torch.isfinite(mine).all()
        unscaled = mine.double() / scale
        assert float((unscaled - plain).norm() / plain.norm()) < 2e-3
        # Rows of rare tokens keep a gradient, which plain fp16 would flush to zero.
        assert torch.equal(unscaled.any(dim=-1), plain.any(dim=-1))


@in_every_form
def test_a_label_whose_probability_underflows_has_its_true_loss(form):
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[200.0], [0.0], [0.0]], requires_grad=True)
    loss = head_loss(form, hidden, weight, torch.tensor([1]), chunk=4)
    assert loss.item() == 200.0  # exp(-200) is 0 in float32
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.item() == 200.0


def test_under_autocast_it_computes_like_a_linear_layer():
    hidden, weight, labels = sample(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(hidden, weight, labels, chunk=7)
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    wanted = ours(rounded[0], nn.Parameter(rounded[1]), labels, chunk=7)
    assert torch.equal(loss, wanted)
    gradient, expected = torch.autograd.grad(loss, hidden), torch.autograd.grad(wanted, rounded[0])
    assert gradient[0].dtype == torch.float32
    assert torch.equal(gradient[0], expected[0].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_second_chunk_is_allocated_even_inside_torch(dtype):
    logits = torch.randn(32, 1000).to(dtype)
    shares = logits if dtype == torch.float32 else torch.empty(logits.shape)
    index = torch.zeros(32, 1, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        _losses_and_gradients(logits, index, shares)
    events = seen.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert 0 < max(sizes) < logits.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [500, 8192, 50_257])  # by a warp, and by a block of threads
def test_a_gpu_may_write_the_softmax_over_the_logits(vocabulary):
    hidden, weight, labels = (part.cuda() for part in sample(torch.float32, vocabulary=vocabulary))
    found = torch.autograd.grad(ours(hidden, weight, labels, chunk=16), (hidden, weight))
    expected = torch.autograd.grad(full(hidden, weight, labels), (hidden, weight))
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_16_bits_to_float32_and_holds_what_is_planned(dtype):
    assert module.adds_in_float32(torch.device("cuda"), dtype)
    tokens, width, vocabulary, chunk = 4096, 512, 32_000, 512
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocabulary, width, device="cuda", dtype=dtype))
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    ours(hidden, weight, labels, chunk=chunk)  # cuBLAS allocates its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = ours(hidden, weight, labels, chunk=chunk)
    held = torch.cuda.max_memory_allocated() - before
    assert held <= 1.05 * (2 * tokens * width + 4 * vocabulary * width + 6 * chunk * vocabulary)
    loss.backward()
