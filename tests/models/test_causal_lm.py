import dataclasses
import itertools
import math

import pytest
import torch
import transformers
from small_families import (
    HYBRID,
    SHAPES,
    WITH_ATTENTION,
    build,
    every_family,
    tokens,
    where_attention_is,
)
from torch.nn.attention import flex_attention

from refocused.config import model_shape, shipped_files
from refocused.config.model_shape import load_shape
from refocused.estimate.flops import count_parameters
from refocused.models import families
from refocused.models.causal_lm import counted_parameters, document_positions, untrained_loss
from refocused.models.families import build_model
from refocused.system.errors import ConfigError


@every_family
def test_the_loss_equals_transformers_on_shifted_labels(family):
    model, ids = build(family), tokens()
    plain = transformers.AutoModelForCausalLM.from_config(model.network.config)
    plain.load_state_dict(model.network.state_dict())
    wanted = plain(input_ids=ids, labels=ids).loss
    loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    wanted.backward()
    loss.backward()
    for (name, mine), other in zip(
        model.network.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in SHAPES),
        *(("ten", {"scales": scales}) for scales in ([1, 2, 4, 8], [3])),
        *((family, HYBRID) for family in ("resonance", "ten")),
    ],
)
@pytest.mark.parametrize("changed", [1, 20, 47])
def test_no_logit_depends_on_a_later_token(family, changes, changed):
    model, ids = build(family, initializer_range=0.2, **changes), tokens(2, 48)
    other = ids.clone()
    other[:, changed] = (other[:, changed] + 1) % 512
    with torch.no_grad():
        before, after = model.logits(ids), model.logits(other)
    largest = (before - after).abs().amax(dim=(0, 2)) / before.abs().max()
    assert float(largest[:changed].max()) <= 1e-5
    if 1 in changes.get("scales", [1]):  # with scales a group applies once it has ended
        assert float(largest[changed:].min()) > 1e-4  # and every later one depends on it


@every_family
def test_a_model_whose_weights_are_replaced_takes_the_memory_of_one_block(family):
    layers = {("n_layer" if family == "gpt2" else "num_hidden_layers"): 6}
    whole = build(family, **layers)
    with families.shared_weights():
        shared = build(family, **layers)
    assert counted_parameters(shared) == counted_parameters(whole)
    assert sum(_storages(shared).values()) < 0.5 * sum(_storages(whole).values())
    buffers = zip(shared.named_buffers(), whole.named_buffers(), strict=True)
    assert all(mine[0] == other[0] and mine[1].equal(other[1]) for mine, other in buffers)
    assert len(_storages(build(family))) == len(list(build(family).parameters()))  # none shared


def _storages(model):
    return {one.data_ptr(): one.numel() for one in model.parameters()}


@pytest.mark.parametrize(
    "file", sorted((shipped_files() / "models").glob("*.json")), ids=lambda file: file.stem
)
def test_a_shipped_shape_has_the_counted_parameters(file):
    shape = load_shape(file)
    with torch.device("meta"):
        model = build_model(
            shape.settings,
            vocabulary=shape.padded_vocabulary(128),
            dropout=0.0,
            activation_checkpointing=False,
            chunk_tokens=2048,
        )
    counted = count_parameters(shape, vocabulary_multiple=128)
    assert counted_parameters(model) == counted.allocated


@every_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_saved_model_predicts_the_same_when_transformers_reads_it(family, tied, tmp_path):
    model, ids = build(family, tie_word_embeddings=tied), tokens(2, 32)
    embedding = model.network.get_input_embeddings().weight
    assert (model.network.get_output_embeddings().weight is embedding) is tied
    model.network.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        # GPT-2's activation is rounded less often here than in transformers.
        torch.testing.assert_close(model.logits(ids), plain(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gpt2s_activation_equals_transformers_in_one_kernel(dtype):
    network = build("gpt2").network
    assert network.config.activation_function == "gelu_new"  # what is exported
    written_out = transformers.activations.ACT2FN["gelu_new"]
    sample = torch.linspace(-8, 8, 4001, dtype=dtype).requires_grad_()
    fused = network.transformer.h[0].mlp.act
    within = 1e-13 if dtype == torch.float64 else 2e-6
    for mine, theirs in zip(
        _value_and_slope(fused, sample), _value_and_slope(written_out, sample), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=within, atol=within)
    assert fused(sample).grad_fn.name() == "GeluBackward0"


def _value_and_slope(function, sample):
    value = function(sample)
    (gradient,) = torch.autograd.grad(value.sum(), sample)
    return value, gradient


@every_family
def test_a_checkpointed_block_is_computed_twice_with_the_same_result(family):
    ids, passes, results = tokens(), [], []
    for recomputes in (False, True):
        model = build(family, dropout=0.1, recomputes=recomputes)
        calls = []
        for module in model.modules():
            if type(module).__name__.endswith(("MLP", "GatedResonators", "TenMixer")):
                module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        torch.manual_seed(3)  # the recomputation draws the same dropout again
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        passes.append(len(calls))
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert passes == [2, 4]
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-8)


@every_family
def test_a_validation_with_checkpointed_blocks_has_no_gradients(family):
    model, needed = build(family, recomputes=True), []
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, model.block_class)):
            module.register_forward_hook(lambda *given: needed.append(given[-1].requires_grad))
    with torch.no_grad():
        model(tokens(), tokens())
    assert len(needed) >= 3
    assert not any(needed)  # or each variant would compile a graph


@every_family
def test_the_embedding_has_the_rows_of_the_padded_vocabulary(family):
    model = build(family, vocabulary=640)
    assert model.network.get_input_embeddings().weight.shape == (640, 64)
    assert model.logits(tokens(1, 8)).shape == (1, 8, 640)
    assert model.logits(tokens(1, 8), last=1).shape == (1, 1, 640)


def test_an_unknown_family_is_rejected_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'bert' is not supported\. Choose from gpt2, gpt_neox"):
        build("gpt2", model_type="bert")


def test_a_family_that_transformers_lacks_is_named(monkeypatch):
    newer = dataclasses.replace(model_shape.families()["llama"], classes="Llama99")
    monkeypatch.setattr(families, "families", lambda: {"llama": newer})
    with pytest.raises(
        ConfigError, match=r"transformers \d.* has no Llama99Config\. Install a newer"
    ):
        build("llama")


DOCUMENT = 7  # the id that begins a document in the tests below


def packed_rows():
    """Return rows of several documents, and the place of each document."""
    ids = tokens(3, 40)
    ids[ids == DOCUMENT] += 1
    cuts = [[0, 5, 6, 23, 40], [13, 14, 40], [40]]  # a row may begin within a document
    for row, places in zip(ids, cuts, strict=True):
        row[[place for place in places if place < 40]] = DOCUMENT
    edges = [[0, *(place for place in places if place)] for places in cuts]
    return ids, [[slice(*pair) for pair in itertools.pairwise(row)] for row in edges]


@pytest.fixture(params=["dense", "blocks"])
def shape_of_blocks(request, monkeypatch):
    """Return the shape of a pass if FlexAttention is to run, else None."""
    # FlexAttention refuses a backward pass on CPUs, although it has one without inductor.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    return lambda ids: ids.shape if request.param == "blocks" else None


@where_attention_is
def test_a_masked_document_is_predicted_independently(family, shape_of_blocks):
    ids, documents = packed_rows()
    masked = build(family, initializer_range=0.2, document_id=DOCUMENT)
    masked.block_shape = shape_of_blocks(ids)
    open_ = build(family, initializer_range=0.2)
    with torch.no_grad():
        packed, unmasked = masked.logits(ids), open_.logits(ids)
        for row, slices in enumerate(documents):
            for number, document in enumerate(slices):
                alone = open_.logits(ids[row : row + 1, document])[0]
                scale = float(alone.abs().max())
                torch.testing.assert_close(
                    packed[row, document], alone, rtol=0, atol=1e-5 * max(1.0, scale)
                )
                if number:  # without the mask it depends on earlier documents
                    assert float((unmasked[row, document] - alone).abs().max()) > 1e-2 * scale


@where_attention_is
@pytest.mark.parametrize("recomputes", [False, True])
def test_no_gradient_crosses_a_masked_border(family, recomputes, shape_of_blocks):
    ids, _ = packed_rows()
    model = build(family, document_id=DOCUMENT, recomputes=recomputes)
    model.block_shape = shape_of_blocks(ids[:1])
    embedded = []
    hook = model.network.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(output) or output.retain_grad()
    )
    labels = torch.full((1, 40), -100)
    labels[0, 20] = 3  # inside the document of tokens 6 to 22
    model(ids[:1], labels).backward()
    hook.remove()
    gradient = embedded[0].grad
    assert gradient is not None
    reached = gradient[0].abs().amax(dim=1) > 0
    assert reached.nonzero().flatten().tolist() == list(range(6, 21))


def test_positions_restart_with_each_document():
    ids = torch.tensor([[7, 1, 7, 7, 2, 3], [1, 2, 3, 7, 1, 1], [1, 1, 1, 1, 1, 1]])
    assert document_positions(ids, document_id=7).tolist() == [
        [0, 1, 0, 0, 1, 2],
        [0, 1, 2, 0, 1, 2],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("family", "width"),
    [*((name, 64) for name in SHAPES), *((name, 1024) for name in WITH_ATTENTION)],
)
def test_the_untrained_loss_of_a_wide_model_is_above_ln_v(family, width):
    name = model_shape.families()[family].width
    model, ids = build(family, **{name: width}), tokens(8, 64)
    with torch.no_grad():
        loss = float(model(ids[:, :-1], ids[:, 1:]))
    expected = untrained_loss(rows=512, width=width, initializer_range=0.02)
    assert expected - math.log(512) == pytest.approx(width * 0.0002)
    assert loss == pytest.approx(expected, abs=0.1)
    # A too wide initialization does not raise the expected loss.
    wide = untrained_loss(rows=512, width=64, initializer_range=1.0)
    assert wide == pytest.approx(math.log(512) + 1.0)
