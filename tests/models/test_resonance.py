from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from refocused.models.causal_lm import CausalLM
from refocused.models.families import build_model
from refocused.models.resonance.resonators import kernel

SHAPE: dict[str, Any] = {
    "model_type": "resonance",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_resonators": 8,
    "initializer_range": 0.2,  # so that what a layer does is seen in the logits
}


def build(*, dropout: float = 0.0, **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    return build_model(
        SHAPE | changes,
        vocabulary=100,
        dropout=dropout,
        activation_checkpointing=False,
        chunk_tokens=64,
    )


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(100, (rows, length), generator=torch.Generator().manual_seed(1))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@torch.no_grad()
def test_a_state_carried_on_gives_what_the_whole_prefix_gives() -> None:
    model, ids = build().eval(), tokens(2, 64)
    whole = model.logits(ids)
    outputs = model.network(ids[:, :30], use_cache=True)
    state = outputs.past_key_values
    sizes = [layer.numel() for layer in state.layers]
    parts = (ids[:, 30:31], ids[:, 31:50], *ids[:, 50:].split(1, dim=1))
    later = [model.network(part, past_key_values=state).logits for part in parts]
    logits = [outputs.logits, *later]
    assert relative(torch.cat(logits, dim=1), whole) < 1e-5
    assert [layer.numel() for layer in state.layers] == sizes == [2 * 2 * 8 * 32] * 2
    assert state.get_seq_length() == 64


def test_generation_with_a_state_is_generation_without(tmp_path: Path) -> None:
    build().network.save_pretrained(tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = tokens(3, 12)
    asked: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    seen: list[int] = []
    network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    carried = network.generate(prompts, use_cache=True, **asked)
    assert seen == [12] + [1] * 29
    assert torch.equal(carried, network.generate(prompts, use_cache=False, **asked))
    beams = {"num_beams": 3, **asked}
    carried = network.generate(prompts, use_cache=True, **beams)
    assert torch.equal(carried, network.generate(prompts, use_cache=False, **beams))


def test_padding_on_the_left_changes_nothing() -> None:
    network = build().eval().network
    short, asked = tokens(1, 5), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    padded = torch.cat((torch.full((1, 4), 7), short), dim=1)
    both = torch.cat((padded, tokens(1, 9)))
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    alone = network.generate(short, use_cache=True, **asked)
    beside = network.generate(both, attention_mask=mask, use_cache=True, **asked)
    assert torch.equal(beside[0, 4:], alone[0])


@torch.no_grad()
def test_beyond_its_positions_chunks_give_what_one_pass_gives() -> None:
    ids = tokens(2, 150)
    chunked, whole = build().eval(), build().eval()
    for block in whole.network.model.layers:
        block.chunk = 150
    assert relative(chunked.logits(ids), whole.logits(ids)) < 1e-5


@pytest.mark.slow
def test_the_gradient_reaches_from_token_32000_to_token_100() -> None:
    model = build(max_position_embeddings=32768, hidden_size=8, num_resonators=16)
    embedded = torch.randn(1, 32001, 8, requires_grad=True)
    hidden = model.network.model(inputs_embeds=embedded).last_hidden_state
    (hidden[0, 32000] * torch.randn(8)).sum().backward()
    reach = embedded.grad[0].norm(dim=1)
    near = reach[31000:32000].median()
    print(f"\ngradient at token 100 of token 32,000: {reach[100]:.1e}; at near ones {near:.1e}")
    assert float(reach[100] / near) > 1e-2
    tuning = model.network.model.layers[0].resonators.tuning(torch.float32)
    far = kernel(tuning, 32768).detach()
    assert float(far[:, 31900:].abs().max()) > 1e-4  # it is the kernel that reaches, in one layer


def test_bfloat16_follows_float32() -> None:
    """Within 3 % of the largest logit, and 1 % of the loss."""
    model, ids = build(), tokens(4, 65)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        logits, loss = model.logits(inputs), model(inputs, labels)
        model.bfloat16()
        assert relative(model.logits(inputs), logits) < 0.03
        assert float(model(inputs, labels)) == pytest.approx(float(loss), rel=0.01)


@torch.no_grad()
def test_later_tokens_move_earlier_bfloat16_logits_by_less_than_rounding_does() -> None:
    """The FFT's float32 noise, from all tokens, may round an output to the next bfloat16."""
    wide = {"hidden_size": 64, "max_position_embeddings": 256}
    ids, exact, model = tokens(4, 256), build(**wide), build(**wide).bfloat16()
    exact_logits, logits = exact.logits(ids), model.logits(ids).float()
    moved = {"exact": 0.0, "bfloat16": 0.0}
    for place in range(31, 256, 32):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % 100
        for name, found, wanted in (
            ("exact", exact.logits(other), exact_logits),
            ("bfloat16", model.logits(other), logits),
        ):
            moved[name] = max(moved[name], relative(found[:, :place], wanted[:, :place]))
    assert moved["exact"] < 1e-5
    assert moved["bfloat16"] <= relative(logits, exact_logits)


def test_a_compiled_block_is_one_graph() -> None:
    model, ids = build(), tokens(2, 64)
    with torch.no_grad():
        eager = model.logits(ids)
        for block in model.network.model.layers:
            block.forward = torch.compile(
                block.forward, backend="aot_eager", fullgraph=True, dynamic=False
            )
        assert relative(model.logits(ids), eager) < 1e-5
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_phases_do_not_decay() -> None:
    names = {name for name, p in build().network.named_parameters() if p.dim() < 2}
    assert {name.rpartition(".")[2] for name in names} == {
        "phase",
        "decay_shift",
        "frequency_shift",
        "weight",  # of norms
        "bias",
    }
