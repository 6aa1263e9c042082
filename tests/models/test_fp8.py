"""Products of 8 bits against the same products of the rounded numbers.

A CPU makes them for real (torch 2.13), so that nothing here is a stand-in. How they train is
compared with float32 in `engine/test_compiled.py`.
"""

import copy
import dataclasses

import pytest
import torch
from small_families import build, where_attention_is
from thread_ranks import on_two_ranks
from torch import nn
from transformers.pytorch_utils import Conv1D

from refocused.models.fp8 import (
    GRADIENTS,
    VALUES,
    ScaledConv1D,
    ScaledLinear,
    compute_in_fp8,
    scale_of,
    to_fp8,
)
from refocused.system.errors import ConfigError
from refocused.system.world import World

ALONE = World(rank=0, local_rank=0, world_size=1, local_world_size=1)
TOKENS, INPUTS, OUTPUTS = 32, 64, 48
both_scalings = pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
both_layers = pytest.mark.parametrize("kind", [nn.Linear, Conv1D])


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with two, products this small take 100 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(INPUTS, OUTPUTS) if kind is nn.Linear else kind(OUTPUTS, INPUTS)
        self.norm = nn.LayerNorm(INPUTS)
        nn.init.normal_(self.layer.weight)
        nn.init.normal_(self.layer.bias)

    def forward(self, x):
        return self.layer(x)


def pair(kind, scaling):
    """Return a block in 8 bits, and the same block unchanged."""
    plain = Block(kind)
    scaled = copy.deepcopy(plain)
    assert compute_in_fp8(scaled, block_class=Block, scaling=scaling, world=ALONE) == 1
    return scaled, plain


def rounded(matrix, form, scaling):
    scale = scale_of(matrix, form, scaling == "rowwise")
    return to_fp8(matrix, scale, form).float() * scale


def rows_of_many_sizes(count, width):
    return torch.randn(count, width) * torch.logspace(-3, 1, count)[:, None]


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@both_scalings
@both_layers
def test_all_three_products_equal_those_of_rounded_numbers(kind, scaling):
    scaled, plain = pair(kind, scaling)
    x = rows_of_many_sizes(TOKENS, INPUTS).view(2, -1, INPUTS).requires_grad_()
    output = scaled(x)
    gradient = rows_of_many_sizes(TOKENS, OUTPUTS).view_as(output)
    output.backward(gradient)

    rows, flowing = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    weight = plain.layer.weight.detach()
    weight = weight if kind is nn.Linear else weight.t()

    def product(left, form, right):
        return rounded(left, form, scaling) @ rounded(right, VALUES, scaling).t()

    wanted = product(rows, VALUES, weight) + plain.layer.bias
    assert relative(output.flatten(0, 1), wanted) < 1e-6
    assert x.grad is not None
    assert relative(x.grad.flatten(0, 1), product(flowing, GRADIENTS, weight.t())) < 1e-6
    of_weight = product(flowing.t(), GRADIENTS, rows.t())
    wanted = of_weight if kind is nn.Linear else of_weight.t()
    assert relative(scaled.layer.weight.grad, wanted) < 1e-6
    assert torch.allclose(scaled.layer.bias.grad, flowing.sum(0), rtol=1e-4)


def test_rowwise_scales_keep_small_rows_accurate():
    x = torch.randn(TOKENS, INPUTS) * torch.logspace(-6, 2, TOKENS)[:, None]

    def lost(scaling):
        return relative(rounded(x, VALUES, scaling)[0], x[0])

    assert lost("tensorwise") > 0.9
    assert lost("rowwise") < 0.05


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@both_scalings
def test_non_finite_values_stay_non_finite(value, scaling):
    scaled, _ = pair(nn.Linear, scaling)
    x = torch.ones(TOKENS, INPUTS)
    x[3, 5] = value
    assert not scaled(x)[3].isfinite().any()
    gradient = torch.ones(TOKENS, OUTPUTS)
    gradient[3, 5] = value
    scaled(torch.ones(TOKENS, INPUTS)).backward(gradient)
    assert not scaled.layer.weight.grad.isfinite().all()


@both_scalings
def test_zeros_and_the_largest_numbers_are_finite(scaling):
    for size in (0.0, 1e-20, 3e38):
        matrix = torch.full((TOKENS, INPUTS), size)
        for form in (VALUES, GRADIENTS):
            assert torch.allclose(rounded(matrix, form, scaling), matrix, rtol=1e-6, atol=0)


@both_layers
def test_without_gradients_a_layer_computes_like_an_export(kind):
    scaled, plain = pair(kind, "tensorwise")
    x = torch.randn(5, INPUTS)  # no multiple of 16 either
    with torch.no_grad():
        assert torch.equal(scaled(x), plain(x))


@where_attention_is
def test_all_linear_layers_of_blocks_and_no_others_are_changed(family):
    plain, scaled = build(family), build(family)
    count = compute_in_fp8(
        scaled, block_class=scaled.block_class, scaling="tensorwise", world=ALONE
    )
    changed = [m for m in scaled.modules() if isinstance(m, ScaledLinear | ScaledConv1D)]
    linear = [m for m in plain.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert count == len(changed) == len(linear) - 1  # without the head
    names, others = ([n for n, _ in model.named_parameters()] for model in (scaled, plain))
    assert names == others
    assert not isinstance(scaled.network.get_output_embeddings(), ScaledLinear)


def test_a_gpu_without_fp8_is_rejected_on_every_rank(monkeypatch):
    def capability(device):
        return (9, 0) if device.index == 0 else (8, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")

    def action(world):
        on_gpu = dataclasses.replace(world, device_kind="cuda")
        compute_in_fp8(Block(nn.Linear), block_class=Block, scaling="rowwise", world=on_gpu)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, ConfigError)
        assert "A100-SXM4-80GB has 8.0" in str(ended.error)
        assert "precision.fp8=none" in str(ended.error)
