"""The optimizer's groups and settings, and one update of Muon on whole matrices."""

from types import SimpleNamespace

import pytest
import torch
from engine_cases import MUON
from small_families import build, every_family, where_attention_is
from torch import nn
from transformers.pytorch_utils import Conv1D

from refocused.config.optimization import OptimizerConfig
from refocused.engine import optimizer as module
from refocused.engine.optimizer import (
    Moments,
    MuonAndAdamW,
    build_optimizer,
    capture_settings,
    scaled_orthogonal,
    set_rates,
)


@where_attention_is
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_parameter_is_in_one_group_with_its_decay_and_settings(family, kind):
    model = build(family)
    wanted = OptimizerConfig(kind=kind, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    groups = build_optimizer(model, wanted, block_class=model.block_class).param_groups
    given = {id(p): group for group in groups for p in group["params"]}
    assert len(given) == sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    for name, parameter in model.named_parameters():
        group = given[id(parameter)]
        plain = name.endswith(".bias") or "ln_" in name or "norm" in name
        assert group["weight_decay"] == (0.0 if plain else 0.3), name
        in_block = ".h." in name or ".layers." in name
        by_muon = kind == "muon" and in_block and parameter.dim() == 2
        assert group.get("matrices", False) is by_muon, name
        if not by_muon:
            assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.9), 1e-6)
            assert group["fused"]


SEPARATE = {
    "embedding_lr": 3e-2,
    "embedding_betas": (0.8, 0.99),
    "embedding_decay": 0.01,
    "head_lr": 2e-4,
    "head_betas": (0.7, 0.95),
    "head_decay": 0.0,
    "scalar_lr": 5e-3,
    "scalar_betas": (0.85, 0.9),
}


@every_family
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_embeddings_head_and_vectors_may_have_settings_of_their_own(family, kind):
    model = build(family)
    config = OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.3, **SEPARATE)
    plain = OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.3)
    of_model = {"block_class": model.block_class}
    groups = build_optimizer(model, config, **of_model).param_groups
    untied = model.network.lm_head.weight is not model.network.get_input_embeddings().weight
    others = build_optimizer(model, plain, **of_model).param_groups
    if kind == "adamw":  # whose matrices are with the others
        assert len(groups) == len(others) + 1 + untied
    for share in (1.0, 0.5):
        set_rates(SimpleNamespace(param_groups=groups), 1e-3 * share, decay_share=share)
    given = {id(p): group for group in groups for p in group["params"]}
    assert len(given) == sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    for name, parameter in model.named_parameters():
        is_table = any(part in name for part in ("wte", "wpe", "embed_"))
        role = "embedding" if is_table else "head" if "lm_head" in name else "other"
        role = "scalar" if parameter.dim() < 2 else role
        group, decay = given[id(parameter)], SEPARATE.get(f"{role}_decay", 0.3)
        assert group["lr"] == pytest.approx(SEPARATE.get(f"{role}_lr", 1e-3) / 2), name
        assert group["weight_decay"] == (0.0 if role == "scalar" else decay / 2), name
        if not group["matrices"]:
            assert group["betas"] == SEPARATE.get(f"{role}_betas", (0.9, 0.95)), name


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = build_optimizer(model, OptimizerConfig(lr=1e-3)).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


def test_a_load_restores_the_configured_settings():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [one], "weight_decay": 0.1 * n} for n, one in enumerate(weights)]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    put_back = capture_settings(optimizer)
    saved = torch.optim.AdamW([{"params": [one]} for one in weights], eps=1e-3, weight_decay=0.7)
    optimizer.load_state_dict(saved.state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.7]
    put_back(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-8, 1e-8]
    assert all(group["params"] for group in optimizer.param_groups)


@pytest.mark.parametrize("holder", ["loss_scaler", "loss_scale_config"])
def test_a_load_keeps_the_saved_loss_scale_and_the_configured_window(holder):
    def optimizer(window, scale):
        scaler = SimpleNamespace(scale_window=window, cur_scale=scale)
        return SimpleNamespace(param_groups=[], **{holder: scaler})

    loaded = optimizer(1000, 32.0)
    capture_settings(optimizer(500, 65536.0))(loaded)
    assert vars(loaded)[holder] == SimpleNamespace(scale_window=500, cur_scale=32.0)


@pytest.mark.parametrize("iterated", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_an_update_is_nearly_orthogonal_and_as_large_as_adamws(shape, iterated, monkeypatch):
    monkeypatch.setattr(module, "iteration_type", lambda device: iterated)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    update = scaled_orthogonal(matrix) / (0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5 and values.max() < 1.4
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (
        torch.nn.functional.cosine_similarity(update.flatten(), (left @ right).flatten(), dim=0)
        > 0.95
    )


def iterated_exactly(matrix):
    """Return the iteration in float64, on the singular values alone: a polynomial of each."""
    left, values, right = torch.linalg.svd(matrix.bfloat16().double(), full_matrices=False)
    a, b, c = (3.4445, -4.7750, 2.0315)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (200, 72), (192, 192)], ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rounding_to_bfloat16_costs_no_more_than_in_torchs_muon(shape, seed, monkeypatch):
    monkeypatch.setattr(module, "iteration_type", lambda device: torch.bfloat16)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = matrix.clone()
    torchs = torch.optim.Muon(
        [weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original"
    )
    torchs.step()
    exact = iterated_exactly(matrix)
    results = module.orthogonal(matrix), -weight.detach() / max(1, shape[0] / shape[1]) ** 0.5
    error, of_torch = (float((one.double() - exact).norm() / exact.norm()) for one in results)
    assert 5e-3 < of_torch < 2e-2  # so `exact` is what both approximate
    assert error <= of_torch * (1 + 1e-3)  # `weight` is divided, in float32


def optimizer_of(layer, config):
    """Return the optimizer of a model whose only block is a layer."""
    return build_optimizer(nn.Sequential(layer, nn.LayerNorm(1)), config, block_class=type(layer))


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("form", ["original", "match_rms_adamw"])
def test_updates_equal_those_of_torchs_muon_at_the_converted_rate(shape, form):
    layers = {"linear": nn.Linear(*shape[::-1], bias=False), "conv1d": Conv1D(shape[0], shape[1])}
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    theirs = nn.Parameter(start.clone())
    for layer in layers.values():  # Conv1D stores [inputs, outputs]
        layer.weight = nn.Parameter((start if isinstance(layer, nn.Linear) else start.T).clone())
    rate, decay = 0.02, 0.1
    wanted = torch.optim.Muon([theirs], lr=rate, weight_decay=decay, adjust_lr_fn=form)
    factor = 0.2 * shape[1] ** 0.5 if form == "original" else 1.0  # shape[1]: the layer's inputs
    config = OptimizerConfig(
        kind="muon", lr=1.0, matrix_lr=rate / factor, weight_decay=decay * factor
    )
    optimizers = [optimizer_of(layer, config) for layer in layers.values()]
    for draw in torch.randn((4, *shape), generator=torch.Generator()):
        theirs.grad = draw
        wanted.step()
        for layer, own in zip(layers.values(), optimizers, strict=True):
            set_rates(own, 1.0)
            layer.weight.grad = draw if isinstance(layer, nn.Linear) else draw.T
            own.step()
    moved = (theirs - start).norm()
    for found in (layers["linear"].weight, layers["conv1d"].weight.T):
        assert (found - theirs).norm() < 0.04 * moved  # bfloat16 in another order


def test_cautious_decay_leaves_elements_that_the_update_moves_away_from_zero():
    signs, weights = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), []
    for settings in ({"matrix_decay": 0.0}, {}, {"cautious_decay": True}):
        layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(layer.weight)
        config = OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.5, **settings)
        optimizer = optimizer_of(layer, config)
        layer.weight.grad = signs.clone()
        optimizer.step()
        weights.append(layer.weight.detach())
    bare, plain, cautious = weights
    assert torch.equal(bare < 1, signs > 0)
    torch.testing.assert_close(plain, bare - 0.05)
    torch.testing.assert_close(cautious, bare - 0.05 * (signs > 0))


@pytest.mark.parametrize("axis", [0, 1])
def test_normuon_gives_outputs_equal_updates_of_the_same_size(axis):
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn((32, 8) if axis == 0 else (8, 32), generator=draw)
    moments = Moments(torch.zeros(32), axis, 0.05)
    plain, update = scaled_orthogonal(matrix), scaled_orthogonal(matrix, moments)
    sizes = update.square().mean(1 - axis).sqrt()
    assert sizes.std() < 0.01 * sizes.mean() < 0.1 * plain.square().mean(1 - axis).sqrt().std()
    assert sizes.mean() == pytest.approx(0.2, rel=0.01)  # of AdamW
    cosine = torch.nn.functional.cosine_similarity(update, plain, dim=1 - axis)
    assert cosine.min() > 0.999  # each output keeps its direction


def test_a_skipped_update_changes_nothing():
    model = build("gpt2")
    optimizer = build_optimizer(model, MUON, block_class=model.block_class)
    assert isinstance(optimizer, MuonAndAdamW)
    for refused in (0.0, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if refused else 0.01)
        before = [p.detach().clone() for p in model.parameters()]
        momenta = [s["momentum_buffer"].clone() for s in _momenta(optimizer)]
        optimizer.found_inf = torch.tensor(refused)
        optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same is bool(refused)
    after = [state["momentum_buffer"] for state in _momenta(optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(momenta, after, strict=True))


def _momenta(optimizer):
    return [state for state in optimizer.state.values() if "momentum_buffer" in state]
