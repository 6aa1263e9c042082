"""Resonance and TEN: states, generation, bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_families import build, relative, tokens
from torch import Tensor

from refocused.models.causal_lm import CausalLM
from refocused.system.errors import ConfigError

VARIANTS: dict[str, dict[str, Any]] = {
    "resonance": {},
    "ten": {"scales": [1]},
    "ten, four scales": {"scales": [1, 2, 4, 8]},
    "ten, odd scale, no positions": {"scales": [3], "learned_positions": False},
    "resonance, recall": {"convolution_width": 4, "memory_heads": 4},
    "ten, recall": {"convolution_width": 4, "memory_heads": 4},
    "ten, hybrid": {"convolution_width": 2, "attention_every": 2, "attention_heads": 4},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def stirred(variant: str, **changes: Any) -> CausalLM:
    """Build a model with wide weights and a shifted spectrum."""
    changes = {"initializer_range": 0.2} | VARIANTS[variant] | changes
    model = build(variant.partition(",")[0], **changes).eval()
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_shift"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def elements(state: Any) -> int:
    """Return the elements of a state, without incomplete groups, and keys and values."""
    parts = sum(
        part.numel()
        for parts in state.parts
        for name, part in parts.items()
        if name in ("recent", "memory")
    )
    if hasattr(state, "layers"):
        return parts + sum(layer.numel() for layer in state.layers)
    return parts + sum(
        one.eigenstates.numel() + one.latest.numel() for b in state.blocks for one in b if one
    )


@every_variant
@torch.no_grad()
def test_a_state_equals_the_whole_prefix_and_does_not_grow(variant: str) -> None:
    network, ids = stirred(variant).network, tokens(2, 64)
    state, found, sizes = None, [], set()
    for piece in ids.split([5, 1, 1, 3, 24, *[1] * 10, 20], dim=1):
        outputs = network(piece, past_key_values=state, use_cache=True)
        state = outputs.past_key_values
        found.append(outputs.logits)
        sizes.add(elements(state))
    assert relative(torch.cat(found, dim=1), network(ids).logits) < 1e-5
    assert len(sizes) == 1
    assert state.get_seq_length() == 64


@every_variant
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_and_without_a_state_is_equal(
    variant: str, beams: int, tmp_path: Path
) -> None:
    stirred(variant).network.save_pretrained(tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    seen: list[int] = []
    network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    asked = {"max_new_tokens": 18, "num_beams": beams, **GREEDY}
    carried = network.generate(tokens(2, 11), use_cache=True, **asked)
    assert seen == [11] + [1] * 17
    assert torch.equal(carried, network.generate(tokens(2, 11), use_cache=False, **asked))


def test_padding_on_the_left_changes_nothing_in_resonance() -> None:
    network = stirred("resonance").network
    short = tokens(1, 5)
    both = torch.cat((torch.cat((torch.full((1, 4), 7), short), dim=1), tokens(1, 9)))
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    alone = network.generate(short, max_new_tokens=8, **GREEDY)
    beside = network.generate(both, attention_mask=mask, max_new_tokens=8, **GREEDY)
    assert torch.equal(beside[0, 4:], alone[0])


def test_unsupported_inputs_of_a_recurrence_are_rejected() -> None:
    with pytest.raises(ConfigError, match="mask_documents"):
        build("ten", document_id=7)
    network, ids = build("ten").network, tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="without padding"):
        network(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        network(tokens(1, 65))
    assert build("ten", learned_positions=False).network(tokens(1, 65)).logits.shape[1] == 65


@torch.no_grad()
def test_beyond_its_positions_resonance_in_chunks_equals_one_pass() -> None:
    ids, model = tokens(2, 150), stirred("resonance")
    chunked = model.logits(ids)
    for block in model.network.model.layers:
        block.chunk = 150
    assert relative(chunked, model.logits(ids)) < 1e-5


@every_variant
@torch.no_grad()
def test_bfloat16_errors_do_not_accumulate(variant: str) -> None:
    changes = {"max_position_embeddings": 1024, "initializer_range": 0.1}
    ids = tokens(2, 1025)
    models = (stirred(variant, **changes), stirred(variant, **changes).bfloat16())
    wanted, found = (model.logits(ids[:, :-1]).float() for model in models)
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.mean()) < 0.02
    assert float(error[:, -256:].mean()) < 1.5 * float(error[:, :256].mean())
    exact, rounded = (float(model(ids[:, :-1], ids[:, 1:])) for model in models)
    assert rounded == pytest.approx(exact, rel=2e-3)


@torch.no_grad()
def test_later_tokens_move_earlier_bfloat16_logits_by_less_than_rounding_does() -> None:
    """The FFT's float32 noise may round an output to the next bfloat16."""
    wide = {"max_position_embeddings": 256}
    ids = tokens(4, 256)
    exact, model = stirred("resonance", **wide), stirred("resonance", **wide).bfloat16()
    wanted, rounded = exact.logits(ids), model.logits(ids).float()
    moved = 0.0
    for place in range(31, 256, 32):
        other = ids.clone()
        other[:, place] += 1
        other %= 512
        moved = max(moved, relative(model.logits(other)[:, :place], rounded[:, :place]))
    assert moved <= relative(rounded, wanted)


@pytest.mark.slow
@every_variant
def test_a_compiled_block_is_one_graph(variant: str) -> None:
    torch._dynamo.reset()  # torch limits the graphs per function, also of other tests
    model, ids = stirred(variant), tokens(2, 64)
    with torch.no_grad():
        written = model.logits(ids)
        for block in model.network.model.layers:
            block.forward = torch.compile(
                block.forward, backend="aot_eager", fullgraph=True, dynamic=False
            )
        assert relative(model.logits(ids), written) < 1e-5
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradients: list[Tensor | None] = [p.grad for p in model.parameters()]
    assert all(one is not None and one.abs().max() > 0 for one in gradients)


def test_phases_do_not_decay() -> None:
    names = {name for name, p in build("resonance").network.named_parameters() if p.dim() < 2}
    assert {name.rpartition(".")[2] for name in names} == {
        "phase",
        "decay_shift",
        "frequency_shift",
        "weight",  # of norms
        "bias",
    }
