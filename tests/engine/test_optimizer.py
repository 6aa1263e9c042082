from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_cases import fresh_model
from torch import nn

from refocused.config.optimization import OptimizerConfig
from refocused.engine.optimizer import OptimizerSettings, build_optimizer

ADAM = OptimizerConfig(lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_matrices_decay_and_biases_and_norms_do_not(family: str) -> None:
    model = fresh_model(family)
    decay = {
        id(parameter): group["weight_decay"]
        for group in build_optimizer(model, ADAM).param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        plain = name.endswith(".bias") or "ln_" in name or "norm" in name
        assert decay[id(parameter)] == (0.0 if plain else 0.3), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_every_parameter_is_in_one_group_once(family: str) -> None:
    model = fresh_model(family)
    groups = build_optimizer(model, ADAM).param_groups
    given = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(given) == sorted(id(parameter) for parameter in model.parameters())
    assert len(given) == len({*given})


def test_the_settings_reach_torch() -> None:
    for group in build_optimizer(fresh_model("gpt2"), ADAM).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.9), 1e-6)
        assert group["fused"]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = build_optimizer(model, ADAM).param_groups
    assert [p is model.weight for p in group["params"]] == [True]
    assert isinstance(build_optimizer(model, ADAM), torch.optim.AdamW)


@pytest.mark.parametrize("holder", ["loss_scaler", "loss_scale_config"])
def test_a_load_leaves_the_scale_and_the_settings_that_are_configured(holder: str) -> None:
    def optimizer(window: int, scale: float) -> SimpleNamespace:
        scaler = SimpleNamespace(scale_window=window, cur_scale=scale)
        return SimpleNamespace(param_groups=[{"params": [], "eps": scale}], **{holder: scaler})

    settings = OptimizerSettings.of(optimizer(500, 65536.0))
    loaded = optimizer(1000, 32.0)
    settings.put_back(loaded)
    assert vars(loaded)[holder] == SimpleNamespace(scale_window=500, cur_scale=32.0)
    assert loaded.param_groups == [{"params": [], "eps": 65536.0}]


def test_an_optimizer_without_a_loss_scale_gets_none() -> None:
    plain = SimpleNamespace(param_groups=[])
    OptimizerSettings.of(plain).put_back(plain)
    assert vars(plain) == {"param_groups": []}
