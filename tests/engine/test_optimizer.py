from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from small_families import build, where_attention_is
from torch import nn

from refocused.config.optimization import OptimizerConfig
from refocused.engine.optimizer import build_optimizer, capture_settings


@where_attention_is
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_parameter_is_in_one_group_with_its_decay_and_settings(
    family: str, kind: Literal["adamw", "muon"]
) -> None:
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


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = build_optimizer(model, OptimizerConfig(lr=1e-3)).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


def test_a_load_restores_the_configured_settings() -> None:
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
def test_a_load_keeps_the_saved_loss_scale_and_the_configured_window(holder: str) -> None:
    def optimizer(window: int, scale: float) -> SimpleNamespace:
        scaler = SimpleNamespace(scale_window=window, cur_scale=scale)
        return SimpleNamespace(param_groups=[], **{holder: scaler})

    loaded = optimizer(1000, 32.0)
    capture_settings(optimizer(500, 65536.0))(loaded)
    assert vars(loaded)[holder] == SimpleNamespace(scale_window=500, cur_scale=32.0)
