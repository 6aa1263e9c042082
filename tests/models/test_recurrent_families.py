"""Resonance and TEN: states, generation, recall, bfloat16."""

import json

import pytest
import torch
import transformers
from small_families import HYBRID, RECALL, SHAPES, build, relative, tokens

from refocused.config.model_shape import shape_from
from refocused.models.recall import CausalAttention
from refocused.system.errors import ConfigError

VARIANTS = {
    "resonance": {},
    "ten": {"scales": [1]},
    "ten, four scales": {"scales": [1, 2, 4, 8]},
    "ten, odd scale, no positions": {"scales": [3], "learned_positions": False},
    "resonance, recall": RECALL,
    "ten, recall": RECALL,
    "ten, hybrid": {"convolution_width": 2, "attention_every": 2, "attention_heads": 4},
}
own_families = pytest.mark.parametrize("family", ["resonance", "ten"])
every_variant = pytest.mark.parametrize("variant", VARIANTS)
GREEDY = {"do_sample": False, "pad_token_id": 0}


def stirred(variant, **changes):
    """Build a model with wide weights and a shifted spectrum."""
    changes = {"initializer_range": 0.2} | VARIANTS[variant] | changes
    model = build(variant.partition(",")[0], **changes).eval()
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_shift"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def elements(state):
    """Return the elements of a state, without incomplete groups, and keys and values."""
    grows = ("pending", "keys", "values", "real")
    held = (item for parts in state.parts for item in parts.items())
    return sum(part.numel() for name, part in held if not name.startswith(grows))


@every_variant
@torch.no_grad()
def test_a_state_equals_the_whole_prefix_and_does_not_grow(variant):
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
def test_generation_with_and_without_a_state_is_equal(variant, beams, tmp_path):
    stirred(variant).network.save_pretrained(tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    seen = []
    network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    asked = {"max_new_tokens": 18, "num_beams": beams, **GREEDY}
    carried = network.generate(tokens(2, 11), use_cache=True, **asked)
    assert seen == [11] + [1] * 17
    assert torch.equal(carried, network.generate(tokens(2, 11), use_cache=False, **asked))


@pytest.mark.parametrize("recall", [{}, HYBRID], ids=["plain", "hybrid"])
def test_padding_on_the_left_changes_nothing_in_resonance(recall):
    network = stirred("resonance", **recall).network
    short = tokens(1, 5)
    both = torch.cat((torch.cat((torch.full((1, 4), 7), short), dim=1), tokens(1, 9)))
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    alone = network.generate(short, max_new_tokens=8, **GREEDY)
    beside = network.generate(both, attention_mask=mask, max_new_tokens=8, **GREEDY)
    assert torch.equal(beside[0, 4:], alone[0])


def test_unsupported_inputs_of_a_recurrence_are_rejected():
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
def test_beyond_its_positions_resonance_in_chunks_equals_one_pass():
    ids, model = tokens(2, 150), stirred("resonance")
    chunked = model.logits(ids)
    for block in model.network.model.layers:
        block.mixer.chunk = 150
    assert relative(chunked, model.logits(ids)) < 1e-5


@every_variant
@torch.no_grad()
def test_bfloat16_errors_do_not_accumulate(variant):
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
def test_later_tokens_move_earlier_bfloat16_logits_by_less_than_rounding_does():
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
def test_a_compiled_block_is_one_graph(variant):
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
    gradients = [p.grad for p in model.parameters()]
    assert all(one is not None and one.abs().max() > 0 for one in gradients)


def test_phases_do_not_decay():
    names = {name for name, p in build("resonance").network.named_parameters() if p.dim() < 2}
    assert {name.rpartition(".")[2] for name in names} == {
        "phase",
        "decay_shift",
        "frequency_shift",
        "weight",  # of norms
        "bias",
    }


def test_a_group_of_tokens_applies_from_its_last_one():
    mixer = build("ten", scales=[4]).network.model.layers[0].mixer
    with torch.no_grad():
        inputs = torch.randn((1, 16, 64), generator=torch.Generator().manual_seed(2))
        plain = mixer(inputs)
        for changed in range(16):
            other = inputs.clone()
            other[:, changed] += 1
            moved = (mixer(other) - plain).abs().amax(dim=(0, 2)).nonzero().flatten().tolist()
            assert moved == list(range(changed // 4 * 4 + 3, 16))


@pytest.mark.parametrize("scales", [[1, 2, 4, 8], [3]], ids=str)
def test_loss_and_gradients_do_not_depend_on_the_chunk(scales):
    ids, results = tokens(2, 50), []
    for chunk in (1, 8, 64):
        model = build("ten", scales=scales, chunk_size=chunk).double()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


def test_the_recurrence_runs_in_float32_on_bf16_parameters(monkeypatch):
    seen = []

    def noting(beta, *modes, **others):
        seen.append((beta.dtype, *(mode.dtype for mode in modes)))
        return beta[0]

    monkeypatch.setattr("refocused.models.ten.chunked_scan", noting)
    build("ten").bfloat16().logits(tokens())
    assert set(seen) == {(torch.float32, torch.float64, torch.float64)}


@own_families
@pytest.mark.parametrize("heads", [0, 4])
def test_a_new_memory_finds_a_token_by_the_one_before_it(family, heads):
    """Queries and keys start equal, and half of the channels of each token hold the last one."""
    block = build(family, **RECALL | {"memory_heads": heads}).network.model.layers[0]
    assert (block.memory is not None) == (heads > 0)
    previous = block.convolution.weight.view(4, -1)[1]
    assert previous[0::2].mean().abs() < 0.1 and (previous[1::2].mean() > 0.9) == (heads > 0)
    if heads:
        query, key, value, _ = block.memory.read.weight.chunk(4)
        assert torch.equal(query, key) and not torch.equal(key, value)


@own_families
def test_a_plain_model_needs_no_settings_of_recall(family, tmp_path):
    network = build(family).network.eval()
    kinds = {type(module).__name__ for module in network.modules()}
    assert not kinds & {"CausalAttention", "Memory", "ShortConvolution"}
    network.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("convolution_width", "memory_heads", "attention_every", "attention_heads"):
        del config[name]
    file.write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, network(tokens()).logits)


@own_families
def test_every_second_block_of_a_hybrid_has_attention(family):
    layers = build(family, num_hidden_layers=5, **HYBRID).network.model.layers
    found = [isinstance(layer.mixer, CausalAttention) for layer in layers]
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
def test_wrong_settings_of_recall_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        shape_from(SHAPES["ten"] | settings, where="model.json")
