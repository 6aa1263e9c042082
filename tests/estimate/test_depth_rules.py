"""Settings of a depth, beside those that nanochat's script prints for it (commit 92d63d4)."""

import json
import math

import pytest

from refocused.config.model_shape import load_shape
from refocused.estimate.depth_rules import derive, model_of, scaling_parameters, width_of
from refocused.estimate.flops import count_parameters

# Depth, vocabulary: tokens of a step and steps, as scripts/base_train.py computes them from the
# matrices and the head (without its gates of value embeddings, which our model does not have).
NANOCHAT = {
    (12, 32768): (2**19, 2520),
    (20, 32768): (2**20, 4980),
    (24, 32768): (2**20, 8352),
    (26, 32768): (2**20, 10510),
    (4, 4096): (2**17, 384),
}


def settings(depth, vocabulary=32768, length=2048):
    rules = derive(depth, vocabulary=vocabulary, sequence_length=length)
    return {name: value for name, (value, _) in rules.items()}


@pytest.mark.parametrize(("depth", "vocabulary"), NANOCHAT)
def test_the_parameters_are_those_of_the_model(tmp_path, depth, vocabulary):
    (tmp_path / "d.json").write_text(json.dumps(model_of(depth, vocabulary=vocabulary)))
    shape = load_shape(tmp_path / "d.json")
    count = count_parameters(shape)
    assert scaling_parameters(depth, vocabulary) == count.matrices + count.head
    assert (shape.width, shape.layers, shape.max_length) == (width_of(depth), depth, 2048)
    assert shape.mixer.head_width == 128


@pytest.mark.parametrize(("depth", "vocabulary"), NANOCHAT)
def test_batch_and_steps_are_nanochats(depth, vocabulary):
    chosen = settings(depth, vocabulary)
    tokens = chosen["batch.global_batch_size"] * 2048
    assert (tokens, chosen["run.steps"]) == NANOCHAT[depth, vocabulary]


def test_depth_12_has_the_rates_that_were_tuned_there():
    at_12 = settings(12)
    # Of a square matrix: 0.02 there is 0.02 / (0.2 sqrt(768)) of ours, with the decay of a step.
    assert at_12["optimizer.matrix_lr"] == pytest.approx(0.02 / (0.2 * math.sqrt(768)), rel=2e-3)
    decayed = at_12["optimizer.matrix_lr"] * at_12["optimizer.matrix_decay"]
    assert decayed == pytest.approx(0.02 * 0.28, rel=5e-3)
    assert at_12["optimizer.lr"] == 0.008


def test_rates_and_decay_are_scaled_with_batch_width_and_horizon():
    at_24 = settings(24)
    # T_epoch = B / (lr x decay x D) is that of depth 12.
    horizon = scaling_parameters(24, 32768) / scaling_parameters(12, 32768)
    decayed = at_24["optimizer.matrix_lr"] * at_24["optimizer.matrix_decay"]
    assert 2 / (decayed * horizon) == pytest.approx(1 / (0.02 * 0.28), rel=1e-2)
    assert at_24["optimizer.lr"] == pytest.approx(0.008 * math.sqrt(2) * math.sqrt(0.5), rel=1e-3)
    assert at_24["optimizer.matrix_lr"] == pytest.approx(
        0.02 * math.sqrt(2) / (0.2 * math.sqrt(1536)), rel=3e-3
    )


def test_small_depths_have_a_sequence_a_step_and_a_step():
    tiny = settings(1, vocabulary=300, length=2**17)
    assert tiny["batch.global_batch_size"] == 1 and tiny["run.steps"] >= 1
    assert width_of(1) == 128 and width_of(3) == 256
