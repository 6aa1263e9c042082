"""The parts that look up content against their definitions, token by token."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_families import SHAPES, build, relative, tokens
from torch import Tensor

from refocused.config.model_shape import shape_from
from refocused.models.recall import (
    CausalAttention,
    Memory,
    RecallParts,
    ShortConvolution,
    doubled_sums,
    matrix_scan,
)
from refocused.system.errors import ConfigError

ROWS, HEADS, LENGTH, WIDE = 2, 3, 150, 8
RECALL: dict[str, Any] = {"convolution_width": 4, "memory_heads": 4}
HYBRID = RECALL | {"attention_every": 2, "attention_heads": 4}
OWN = pytest.mark.parametrize("family", ["resonance", "ten"])


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(dtype: torch.dtype = torch.float64, *, fastest: float = 2.0) -> list[Tensor]:
    """Return queries, keys, values, log-decays down to -2 `fastest`, and a state."""
    query, key, value = draw(3, ROWS, HEADS, LENGTH, WIDE)
    rates = torch.tensor([fastest, 0.05, 1e-4], dtype=torch.float64)[:, None]
    decay = -rates * 2 * draw(ROWS, HEADS, LENGTH, seed=4).sigmoid()
    tensors = (query, key, value, decay, draw(ROWS, HEADS, WIDE, WIDE, seed=5))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def test_sums_of_deterministic_runs_are_cumulative_sums() -> None:
    for length in (1, 2, 7, 128, 150):
        values = draw(2, 3, length).requires_grad_()
        pull = draw(2, 3, length, seed=9)
        torch.testing.assert_close(doubled_sums(values), values.cumsum(-1))
        (found,) = torch.autograd.grad((doubled_sums(values) * pull).sum(), values)
        (wanted,) = torch.autograd.grad((values.cumsum(-1) * pull).sum(), values)
        torch.testing.assert_close(found, wanted)


def sequential(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: S_t = a_t S_{t-1} + k_t v_t^T, y_t = q_t^T S_t."""
    outputs = []
    for t in range(query.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        state = state + key[:, :, t, :, None] * value[:, :, t, None, :]
        outputs.append((query[:, :, t, None, :] @ state).squeeze(2))
    return torch.stack(outputs, dim=2), state


@pytest.mark.parametrize("chunk", [1, 7, 32, 150, 1000])
def test_the_matrix_scan_and_its_gradients_equal_the_recurrence(chunk: int) -> None:
    arguments = sample()
    results = []
    for outputs, last in (
        sequential(*arguments),
        matrix_scan(*arguments[:-1], chunk=chunk, state=arguments[-1]),
    ):
        loss = (outputs * draw(*outputs.shape, seed=6)).sum() + (last * draw(*last.shape)).sum()
        results.append((outputs, last, *torch.autograd.grad(loss, arguments)))
    for wanted, found in zip(*results, strict=True):
        assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize("together", [1, 4, 20])
def test_states_of_chunks_are_carried_from_group_to_group(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refocused.models.recall.CHUNKS_TOGETHER", together)
    arguments = [one.detach() for one in sample()]
    found = matrix_scan(*arguments[:-1], chunk=8, state=arguments[-1])
    for one, wanted in zip(found, sequential(*arguments), strict=True):
        assert relative(one, wanted) < 1e-12


def test_fast_decays_neither_overflow_nor_lose_float32() -> None:
    """exp(-sum) of a chunk alone would be exp(1,000)."""
    wanted, _ = sequential(*sample(fastest=20.0))
    arguments = sample(torch.float32, fastest=20.0)
    found, _ = matrix_scan(*arguments[:-1], chunk=64, state=arguments[-1])
    assert relative(found, wanted) < 1e-5
    gradients = torch.autograd.grad(found.sum(), arguments[:-1])
    assert all(bool(one.isfinite().all()) for one in gradients)


def test_a_short_convolution_starts_as_the_identity_and_adds_its_taps() -> None:
    convolution, inputs = ShortConvolution(5, 3).double(), draw(2, 9, 5)
    assert torch.equal(convolution(inputs), inputs)
    taps = draw(3, 5, seed=8)
    with torch.no_grad():
        convolution.weight.copy_(taps.flatten())
    before = torch.cat((torch.zeros(2, 2, 5, dtype=torch.float64), inputs), dim=1)
    wanted = inputs + sum(taps[j] * before[:, 2 - j : 11 - j] for j in range(3))
    torch.testing.assert_close(convolution(inputs), wanted)


@OWN
@pytest.mark.parametrize("heads", [0, 4])
def test_a_new_memory_finds_a_token_by_the_one_before_it(family: str, heads: int) -> None:
    """Queries and keys start equal, and half of the channels of each token hold the last one."""
    model = build(family, **RECALL | {"memory_heads": heads})
    parts = next(one for one in model.modules() if isinstance(one, RecallParts))
    assert parts.convolution is not None and (parts.memory is not None) == (heads > 0)
    previous = parts.convolution.weight.view(4, -1)[1]
    assert previous[0::2].mean().abs() < 0.1 and (previous[1::2].mean() > 0.9) == (heads > 0)
    if parts.memory is not None:
        query, key, value, _ = parts.memory.read.weight.chunk(4)
        assert torch.equal(query, key) and not torch.equal(key, value)


@torch.no_grad()
def test_a_memory_is_its_defining_equations() -> None:
    torch.manual_seed(0)
    memory, inputs = Memory(12, heads=3, longest=64).double(), draw(2, 20, 12)
    q, k, v, g = (inputs @ memory.read.weight.T).view(2, 20, 4, 3, 4).permute(2, 0, 3, 1, 4)
    gates = memory.gates(inputs).view(2, 20, 2, 3).permute(2, 0, 3, 1)
    rates = torch.tensor([1 / 64, 1 / 128, 1 / 256], dtype=torch.float64)
    write = torch.sigmoid(gates[1] - 3)[..., None]
    heard, _ = sequential(
        (2 * q).softmax(-1),
        (2 * k).softmax(-1),
        torch.cat((v, torch.ones_like(v[..., :1])), -1) * write,
        -2 * rates[:, None] * gates[0].sigmoid(),
        torch.zeros(2, 3, 4, 5, dtype=torch.float64),
    )
    heard = g.sigmoid() * heard[..., :-1] / (heard[..., -1:] + 1e-6)
    wanted = memory.out(heard.transpose(1, 2).reshape(2, 20, 12))
    assert relative(memory(inputs), wanted) < 1e-13


@torch.no_grad()
def test_attention_is_softmax_over_earlier_tokens() -> None:
    torch.manual_seed(0)
    attention, inputs = CausalAttention(12, heads=3).double(), draw(2, 20, 12)
    q, k, v = attention.read(inputs).view(2, 20, 3, 3, 4).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / math.sqrt(4)).masked_fill(~torch.ones(20, 20).tril().bool(), -math.inf)
    wanted = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 12))
    assert relative(attention(inputs), wanted) < 1e-13


@OWN
@torch.no_grad()
def test_no_part_sees_later_tokens(family: str) -> None:
    model, ids = build(family, initializer_range=0.2, **HYBRID).double().eval(), tokens(1, 40)
    wanted = model.logits(ids)
    for place in (3, 20, 39):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % 512
        moved = (model.logits(other) - wanted).abs().amax(dim=(0, 2))
        assert float(moved[:place].max()) < 1e-12
        assert float(moved[place]) > 1e-3


@OWN
def test_a_plain_model_has_its_old_parameters_and_settings(family: str, tmp_path: Path) -> None:
    network = build(family).network.eval()
    names = [name for name, _ in network.named_parameters()]
    assert not [name for name in names if "recall" in name or "attention" in name]
    network.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("convolution_width", "memory_heads", "attention_every", "attention_heads"):
        del config[name]  # as an export of before
    file.write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, network(tokens()).logits)


@OWN
def test_every_second_block_of_a_hybrid_has_attention(family: str) -> None:
    layers = build(family, num_hidden_layers=5, **HYBRID).network.model.layers
    found = [any(isinstance(m, CausalAttention) for m in layer.modules()) for layer in layers]
    assert found == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_heads": 3}, r"hidden_size = 64 is not a multiple of memory_heads = 3\."),
        ({"attention_every": 1}, r"attention_every = 1 leaves no block of eigenstates\."),
        ({"convolution_width": -4}, r"convolution_width = -4: expected a whole number of at least"),
        ({"memory_head": 4}, r"memory_head is unknown .* Did you mean memory_heads\?"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from(SHAPES["ten"] | settings, where="model.json")


@torch.no_grad()
def test_padding_on_the_left_changes_nothing_in_a_hybrid_resonance() -> None:
    network = build("resonance", initializer_range=0.2, **HYBRID).network.eval()
    short = tokens(1, 5)
    padded = torch.cat((torch.full((1, 4), 7), short), dim=1)
    mask = (torch.arange(9) >= 4).long()[None]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = network.generate(short, **asked)
    beside = network.generate(padded, attention_mask=mask, **asked)
    assert torch.equal(beside[0, 4:], alone[0])
