"""The initial weights that a run's settings ask for in place of the preset's."""

import math

import pytest
import torch
from small_families import build, every_family, tokens
from torch import nn
from transformers.pytorch_utils import Conv1D

from refocused.config.model_shape import families
from refocused.config.run_config import ModelConfig
from refocused.models.families import initialize

MODEL = ModelConfig(preset="mine", sequence_length=64)


def initialized(family, **settings):
    """Return a model, and the names of the weights that its settings changed."""
    model = build(family)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    initialize(model, MODEL.model_copy(update=settings), families()[family])
    changed = {name for name, weight in model.named_parameters() if not weight.equal(before[name])}
    return model, changed


@every_family
def test_without_settings_no_weight_changes_and_no_number_is_drawn(family):
    build(family)
    drawn = torch.rand(1)  # the next number
    _, changed = initialized(family)
    assert (changed, torch.rand(1)) == (set(), drawn)


@every_family
def test_with_zero_projections_each_block_begins_as_the_identity(family):
    model, changed = initialized(family, zero_projections=True)
    body, seen = model.network.base_model, []
    for block in body.h if hasattr(body, "h") else body.layers:
        block.register_forward_hook(lambda block, given, result: seen.append((given[0], result)))
    model(tokens()[:, :-1], tokens()[:, 1:])
    assert len(seen) == 2
    for given, result in seen:
        assert given.equal(result if isinstance(result, torch.Tensor) else result[0])
    assert changed and all(name.endswith(families()[family].projections) for name in changed)


@every_family
def test_matrices_are_uniform_with_the_variance_of_one_over_their_inputs(family):
    model, changed = initialized(family, matrix_init="fan_in")
    drawn = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and "lm_head" not in name:
            drawn[f"{name}.weight"] = layer.weight
            inputs = layer.weight.shape[0 if isinstance(layer, Conv1D) else 1]
            limit = math.sqrt(3 / inputs)
            assert 0.98 * limit < layer.weight.abs().max() <= limit
            assert float(layer.weight.detach().var()) * inputs == pytest.approx(1, abs=0.06)
    assert changed == drawn.keys() and len(drawn) >= 4


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("nanochat", False)])
def test_embedding_and_head_have_their_own_deviations(family, tied):
    model, changed = initialized(family, embedding_std=0.8)
    assert len(changed) == 1
    weight = model.network.get_input_embeddings().weight
    assert float(weight.detach().std()) == pytest.approx(0.8, rel=0.02)
    if not tied:
        model, changed = initialized(family, head_std=1e-3)
        assert changed == {"network.lm_head.weight"}
        weight = model.network.lm_head.weight
        assert float(weight.detach().std()) == pytest.approx(1e-3, rel=0.02)
        assert not initialized(family, head_std=0.0)[0].network.lm_head.weight.any()
