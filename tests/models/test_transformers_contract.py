"""Our families under transformers' tools: initialization, losses, hidden states."""

import json
import math

import pytest
import torch
import transformers
from small_families import SHAPES, build, every_family, tokens

from refocused.models.causal_lm import softcap_of
from refocused.models.head_loss import LogitTerms
from refocused.models.resonance import INTERFERENCE_RANGE, grid
from refocused.models.ten import initial_spectrum

# Standard deviation of each matrix at the start; where None, as small as 0.02 / sqrt(2 layers).
_PROJECTIONS = [f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")]
LLAMA = dict.fromkeys(("embed_tokens", "lm_head", *_PROJECTIONS), 0.02)
DEVIATIONS = {
    "gpt2": {
        "wte": 0.02,
        "wpe": 0.02,
        "attn.c_attn": 0.02,
        "mlp.c_fc": 0.02,
        "attn.c_proj": None,
        "mlp.c_proj": None,
    },
    "gpt_neox": {
        "embed_in": 0.02,
        "lm_head": 0.02,
        "query_key_value": 0.02,
        "attention.dense": 0.02,
        "dense_h_to_4h": 0.02,
        "dense_4h_to_h": 0.02,
    },
    "llama": LLAMA,
    "qwen3": LLAMA,
    "nanochat": {
        **dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"), 0.02),
        **{"o_proj": None, "fc1": 0.02, "fc2": 0.02},
    },
    "resonance": {
        "embed_tokens": 0.02,
        "embed_positions": 0.02,
        "resonators.weight.magnitude": 0.0,  # all are 1
        "resonators.interference": INTERFERENCE_RANGE,
        "gate": 0.02,
        "output": None,
        "ffn_in": 0.02,
        "ffn_out": None,
    },
    "ten": {
        "embed_tokens": 0.02,
        "embed_positions": 0.02,
        "in_weight": 0.02,
        "cells.0.mixing": 0.02,
        "cells.1.mixing": 0.02,
        "out_weight": None,
        "ffn_in": 0.02,
        "ffn_out": None,
    },
}


@every_family
def test_matrices_have_the_stated_initialization(family):
    layers = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    sizes = {"num_resonators": 32, "num_eigenstates": 32}  # enough to measure a deviation
    shape = {name: size for name, size in sizes.items() if name in SHAPES[family]}
    network = build(family, **{layers: 8}, **shape).network
    seen = set()
    for name, parameter in network.named_parameters():
        if parameter.dim() < 2:
            continue
        plain = f".{name.removesuffix('.weight')}"
        (kind,) = (kind for kind in DEVIATIONS[family] if plain.endswith(f".{kind}"))
        wanted = DEVIATIONS[family][kind]
        wanted = 0.02 / math.sqrt(2 * 8) if wanted is None else wanted
        assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.1), name
        seen.add(kind)
    assert seen == set(DEVIATIONS[family])


def plain_network(family):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(build(family).network.config)


@every_family
def test_accumulated_losses_are_divided_by_the_labels_of_all_passes(family):
    """As in transformers' Trainer, which passes the number and sums the losses."""
    network, ids = plain_network(family), tokens(4, 33)
    network(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    for row in ids.split(1):
        loss = network(input_ids=row, labels=row, num_items_in_batch=4 * 32).loss
        loss.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-7, msg=name)


@every_family
@torch.no_grad()
def test_hidden_states_and_the_last_logits_are_those_of_transformers_models(family):
    network, ids = plain_network(family).eval(), tokens(2, 16)
    outputs = network(input_ids=ids, output_hidden_states=True)
    states = outputs.hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 16, 64)] * 3  # two blocks
    head, terms = network.get_output_embeddings(), LogitTerms(softcap_of(network))
    torch.testing.assert_close(terms.cap(head(states[-1])), outputs.logits)
    embedded = network(inputs_embeds=network.get_input_embeddings()(ids), output_hidden_states=True)
    torch.testing.assert_close(embedded.hidden_states[0], states[0])
    assert network(input_ids=ids).hidden_states is None
    for kept, wanted in (
        (3, outputs.logits[:, -3:]),
        (0, outputs.logits),
        (torch.tensor([1, 7]), outputs.logits[:, [1, 7]]),
    ):
        torch.testing.assert_close(network(ids, logits_to_keep=kept).logits, wanted)
    parts = network(input_ids=ids, labels=ids, return_dict=False)
    torch.testing.assert_close(parts[1], outputs.logits)


@pytest.mark.parametrize("family", ["resonance", "ten"])
@torch.no_grad()
def test_the_spectrum_is_kept_beside_the_weights(tmp_path, family):
    """A longer `max_position_embeddings` must not change it: weights are relative to it."""
    changes = {"learned_positions": False} if family == "ten" else {}
    network, ids = build(family, **changes).network.eval(), tokens(2, 48)
    wanted = network(ids).logits
    network.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["spectrum_length"] == config["max_position_embeddings"] == 64
    file.write_text(json.dumps(config | {"max_position_embeddings": 256}))
    if family == "ten":  # without learned positions every tensor fits any length
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        torch.testing.assert_close(found, wanted)
    else:
        with pytest.raises(RuntimeError, match="mismatch"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    del config["spectrum_length"]  # as in earlier versions
    file.write_text(json.dumps(config))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(found, wanted)


def test_the_initial_spectra_do_not_change():
    """Other formulas would change trained models; they would need a new setting."""
    ten = initial_spectrum(5, longest=1000)
    for found, wanted in (
        (
            ten.log_decay,
            [-0.6955244713, -0.1345519603, -0.0321335740, -0.0079749983, -0.0019972555],
        ),
        (ten.frequency, [0.4298577633, 0.0317634091, 1.9416110387, 0.7416294239, 0.0017058599]),
        (grid(4, 1000)[0], [0.0139925876, 0.1957925071, 0.0027396438, 0.0383347058]),
        (grid(4, 1000)[1], [0.1963495408, 0.7853981634, 1.7671458676, 3.1415926536]),
    ):
        expected = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
