"""Which kernels run, by device, settings and failures."""

import re
import sys
import types

import pytest
import torch
from small_families import SHAPES, build
from thread_ranks import on_two_ranks
from torch import nn
from torch.nn.attention import SDPBackend
from triton_interpreter import INTERPRETED, needs_interpreter

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention, shape_from
from refocused.config.run_config import ModelConfig
from refocused.models import kernels
from refocused.models.kernels import choose_kernels, flash_version
from refocused.models.recall import Memory, ScanModule, matrix_scan
from refocused.models.ten import TenCells, chunked_scan
from refocused.system.errors import ConfigError
from refocused.system.world import World

PLAN = BatchPlan(
    micro_batch_size=2, gradient_accumulation_steps=1, world_size=1, sequence_length=16
)
HOPPER, AMPERE = (9, 0), (8, 0)
IN_SHAPE = (2, 16)

HAS_FUSED = hasattr(nn, "LinearCrossEntropyOptions")


@pytest.fixture(autouse=True)
def torchs_own_choice():
    cuda = torch.backends.cuda
    before = (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])
    cuda.enable_mem_efficient_sdp(before[2])


def a_gpu(*, reason_elsewhere=None):
    """Two ranks whose passes take the paths of a GPU, on this CPU; the other one may fail."""

    def on_all_ranks(action):
        action()
        if reason_elsewhere is not None:
            raise ConfigError(f"rank 1: {reason_elsewhere}")

    device = torch.device("cpu")
    return types.SimpleNamespace(device=device, device_kind="cuda", on_all_ranks=on_all_ranks)


def chosen(world, *, masked=False, key_heads=2, **settings):
    """Return what is reported of attention, and the shape that has a block mask."""
    model = types.SimpleNamespace(
        network=types.SimpleNamespace(get_output_embeddings=lambda: types.SimpleNamespace()),
        document_id=7 if masked else None,
        block_shape=None,
    )
    mixer = Attention(heads=2, bias=True, key_heads=key_heads, head_width=8)
    said = of(model, mixer, world=world, **settings)
    assert said.endswith(", loss in chunks")
    return said.removesuffix(", loss in chunks"), model.block_shape


def of(model, mixer, *, world, dtype=torch.float32, **settings):
    config = ModelConfig(preset="given", sequence_length=16, **settings)
    return choose_kernels(model, mixer, config=config, dtype=dtype, plan=PLAN, world=world)


def running():
    """Return the kernel that torch would take for causal attention."""
    query = torch.zeros(2, 2, 16, 8, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(query, query, query, is_causal=True)).name


@pytest.fixture
def works(monkeypatch):
    """Fake a GPU: cuDNN first, flash without masks, and FlexAttention."""

    def choice(query, key, value, mask, *rest, **more):
        cuda, masked = torch.backends.cuda, mask is not None
        if cuda.cudnn_sdp_enabled():
            return SDPBackend.CUDNN_ATTENTION.value
        if cuda.flash_sdp_enabled() and not masked:
            return SDPBackend.FLASH_ATTENTION.value
        efficient = SDPBackend.EFFICIENT_ATTENTION
        return (efficient if cuda.mem_efficient_sdp_enabled() else SDPBackend.MATH).value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: lambda query, *rest: query)


def dense(reason):
    return f", within documents by a dense mask ({reason})"


BY_CUDNN = "attention by cudnn, torch's choice"
BY_FLASH = "attention by flash, torch's choice"
CHOICES = [
    ("cpu", {}, BY_FLASH),
    ("cpu", {"key_heads": 1}, BY_FLASH),
    ("cpu", {"attention": "flash"}, "attention by FlashAttention-2 (model.attention=flash)"),
    ("cpu", {"attention": "math"}, "attention by math (model.attention=math)"),
    ("cpu", {"masked": True}, BY_FLASH + dense("FlexAttention does not train on a CPU")),
    ("cuda", {}, BY_CUDNN),
    ("cuda", {"attention": "flash"}, "attention by FlashAttention-2 (model.attention=flash)"),
    ("cuda", {"masked": True}, "attention by FlexAttention, within documents by a block mask"),
    ("cuda", {"masked": True, "dropout": 0.1}, BY_CUDNN + dense("FlexAttention has no dropout")),
    *(
        (
            "cuda",
            {"masked": True, "attention": asked, "dropout": dropout},
            f"attention by {asked} (model.attention={asked})" + dense(f"model.attention={asked}"),
        )
        for asked, dropout in (("cudnn", 0.0), ("math", 0.0), ("math", 0.1))
    ),
]


@pytest.mark.parametrize(("kind", "settings", "words"), CHOICES)
def test_the_kernel_is_the_requested_one_or_torchs_choice(kind, settings, words, request):
    if kind == "cuda":
        request.getfixturevalue("works")
    said, shape = chosen(a_gpu() if kind == "cuda" else World(), **settings)
    assert said == words
    assert shape == (IN_SHAPE if "block mask" in words else None)
    cuda, asked = torch.backends.cuda, settings.get("attention", "auto")
    if asked == "auto":
        assert cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled()
        assert cuda.mem_efficient_sdp_enabled()
    elif kind == "cpu":
        assert running() == {"flash": "FLASH_ATTENTION", "math": "MATH"}[asked]


@pytest.mark.parametrize("masked", [True, False])
def test_a_kernel_that_does_not_run_is_rejected(masked):
    torch.backends.cuda.enable_flash_sdp(False)
    with pytest.raises(ConfigError, match=r"is cudnn, but torch uses math for"):
        chosen(World(), attention="cudnn", masked=masked)
    torch.backends.cuda.enable_flash_sdp(False)
    assert chosen(World())[0] == "attention by math, torch's choice"


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(("asked", "runs"), [("auto", "cudnn"), ("flash", "flash")])
def test_a_kernel_that_fails_although_torch_takes_it_ends_the_start(asked, runs, monkeypatch):
    def failing(*given, **named):
        raise RuntimeError("No valid execution\nplans built.")

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", failing)
    with pytest.raises(ConfigError) as raised:
        chosen(a_gpu(), attention=asked)
    assert str(raised.value) == (
        f"attention by {runs} (model.attention={asked}) does not work here: RuntimeError: No valid "
        "execution plans built. Set model.attention to another kernel: cudnn, flash or math."
    )
    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", lambda query, *_, **__: query)
    with pytest.raises(ConfigError, match=r"^rank 1: no driver$"):
        chosen(a_gpu(reason_elsewhere="no driver"), attention=asked)


def test_flash_attention_3_is_for_hopper_without_dropout(monkeypatch):
    def version(*, capability, installed, dropout, kind="cuda"):
        def activate(name):
            assert name == "FA3"
            if not installed:
                raise ImportError("No module named 'flash_attn_interface'")

        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return flash_version(torch.device(kind), dropout=dropout)

    assert version(capability=HOPPER, installed=True, dropout=0.0) == 3
    assert version(capability=HOPPER, installed=True, dropout=0.1) == 2
    assert version(capability=HOPPER, installed=True, dropout=0.0, kind="cpu") == 2
    assert version(capability=AMPERE, installed=True, dropout=0.0) == 2
    assert version(capability=HOPPER, installed=False, dropout=0.0) == 2


@pytest.mark.usefixtures("works")
def test_a_flex_attention_that_fails_and_a_flash_without_masks_are_named(monkeypatch):
    def failing(*tensors):
        raise RuntimeError("no\ntriton")

    monkeypatch.setattr(kernels, "compiled_within_documents", lambda: failing)
    said, shape = chosen(a_gpu(), masked=True)
    assert said.endswith("a dense mask (FlexAttention does not work here: RuntimeError: no triton)")
    assert shape is None
    with pytest.raises(
        ConfigError, match=r"is flash, but torch uses memory-efficient .*mask_documents"
    ):
        chosen(a_gpu(), masked=True, attention="flash")


def built(family, **changes):
    """Return a small model and its mixer."""
    return build(family, **changes), shape_from(SHAPES[family] | changes, where=family).mixer


def test_nothing_is_tried_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(kernels, "_try", lambda *args, **named: pytest.fail("tried"))
    model, mixer = built("ten", memory_heads=2)
    assert of(model, mixer, world=a_gpu()) == (
        "memories in chunks, eigenstates in chunks, loss in chunks"
    )
    resonance = of(*built("resonance"), world=a_gpu())
    assert resonance == "resonators by FFT, loss in chunks"


@pytest.mark.parametrize("family", ["ten", "resonance"])
def test_every_scan_takes_the_requested_kernel(family, monkeypatch):
    calls = []
    model, mixer = built(family, memory_heads=2)
    scans = [one for one in model.modules() if isinstance(one, ScanModule)]
    for module in {one.kernel_module for one in scans}:
        name = "memories" if "memory" in module else "eigenstates"

        def kernel(*inputs, name=name):
            calls.append(name)
            if name == "memories":
                return matrix_scan(*inputs, chunk=8)
            return chunked_scan(*inputs, chunk=8)

        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(kernel_scan=kernel))
    tokens = torch.arange(32).view(2, 16)
    before = model(tokens, tokens)
    said = of(model, mixer, world=World(), scan="kernel")
    memories = "memories by the Triton kernel"
    own = {"ten": f"{memories}, eigenstates by the Triton kernel", "resonance": memories}[family]
    assert said.endswith(f"{own}, loss in chunks")
    assert sorted(set(calls)) == (["eigenstates", "memories"] if family == "ten" else ["memories"])
    calls.clear()
    torch.testing.assert_close(model(tokens, tokens), before, rtol=1e-5, atol=1e-5)
    assert len(calls) == len(scans)


def test_a_state_uses_the_chunked_form():
    model, _ = built("ten", memory_heads=2)
    for one in model.modules():
        if isinstance(one, TenCells | Memory):
            one.kernel = lambda *_: pytest.fail("the kernel begins from zero")
        if isinstance(one, TenCells):
            one(torch.randn(1, 4, 64), torch.zeros(2, len(one.rate_shift), 1))
        if isinstance(one, Memory):
            one(torch.randn(1, 4, 64), {"memory": torch.zeros(1, 2, 32, 33)})


@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET unset")
@pytest.mark.parametrize("setting", ["head", "scan"])
def test_a_triton_kernel_without_triton_or_a_gpu_ends_the_start_on_every_rank(setting):
    ended = on_two_ranks(lambda world: of(*built("ten"), world=world, **{setting: "kernel"}))
    for one in ended:
        assert isinstance(one.error, ConfigError)
        found = re.fullmatch(
            rf"model\.{setting}=kernel does not work here: (\w+Error: .+)\. "
            rf"Set model\.{setting}=chunked\.",
            str(one.error),
        )
        assert found is not None


@needs_interpreter
def test_triton_kernels_run_in_the_interpreter():
    said = of(*built("ten", memory_heads=2), world=World(), head="kernel", scan="kernel")
    kernel = "by the Triton kernel"
    assert said == f"memories {kernel}, eigenstates {kernel}, loss {kernel}"


@pytest.mark.skipif(not HAS_FUSED, reason="needs a newer torch, such as 2.13")
def test_torchs_fused_loss_runs_in_float32_only():
    model, mixer = built("gpt2")
    assert of(model, mixer, world=World(), head="fused").endswith(", loss by torch's fused form")
    assert model.network.get_output_embeddings().form == "fused"
    with pytest.raises(
        ConfigError, match=r"fused does not work here: .*loss is in torch\.bfloat16"
    ):
        of(model, mixer, world=World(), head="fused", dtype=torch.bfloat16)


def test_a_torch_without_a_fused_loss_is_named(monkeypatch):
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ConfigError) as raised:
        of(*built("gpt2"), world=World(), head="fused")
    assert str(raised.value) == (
        "model.head=fused: torch 2.11.0+cu130 has none. Set model.head=chunked."
    )
