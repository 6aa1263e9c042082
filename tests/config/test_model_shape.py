import json
from pathlib import Path
from typing import Any

import pytest

from refocused.config import shipped_files
from refocused.config.model_shape import Attention, Eigenstates, Resonators, load_shape, shape_from
from refocused.system.errors import ConfigError

GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 500, "n_positions": 64}
GPT2 |= {"n_embd": 32, "n_layer": 2, "n_head": 4}
OTHERS: dict[str, Any] = {"vocab_size": 500, "max_position_embeddings": 64}
OTHERS |= {"hidden_size": 32, "num_hidden_layers": 2}
NEOX = OTHERS | {"model_type": "gpt_neox", "num_attention_heads": 4, "intermediate_size": 96}
QWEN = OTHERS | {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN |= {"intermediate_size": 96}
RESONANCE = OTHERS | {"model_type": "resonance", "num_resonators": 5}


def refusal(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as failure:
        shape_from(settings, where="x.json")
    return str(failure.value)


def test_gpt2_is_tied_with_learned_positions_and_four_times_its_width() -> None:
    shape = shape_from(GPT2, where="x")
    assert (shape.width, shape.layers, shape.max_length) == (32, 2, 64)
    assert shape.mixer == Attention(4, bias=True, key_heads=4, head_width=8)
    assert (shape.ffn_width, shape.tied, shape.learned_positions) == (128, True, True)
    assert shape_from(GPT2 | {"n_inner": 50}, where="x").ffn_width == 50
    assert [shape.padded_vocabulary(multiple) for multiple in (1, 128, 500)] == [500, 512, 500]


def test_neox_is_untied_and_rotates_under_either_name() -> None:
    shape = shape_from(NEOX, where="x")
    assert (shape.ffn_width, shape.tied, shape.learned_positions) == (96, False, False)
    for settings in ({"rotary_pct": 0.5}, {"rope_parameters": {"partial_rotary_factor": 1.0}}):
        assert shape_from(NEOX | settings, where="x").mixer == shape.mixer
    wrong = NEOX | {"rope_parameters": {"partial_rotary_factor": 1.1}}
    assert "expected a share from 0 to 1" in refusal(wrong)
    unset = {name: value for name, value in NEOX.items() if name != "intermediate_size"}
    assert shape_from(unset, where="x").ffn_width == 24_576  # transformers' constant, not 4 D


def test_resonance_has_resonators_in_place_of_heads() -> None:
    shape = shape_from(RESONANCE, where="x")
    assert shape.mixer == Resonators(5)  # which need not share the width
    assert (shape.ffn_width, shape.tied, shape.learned_positions) == (128, True, True)
    assert "num_resonator is unknown to transformers. Did you mean num_resonators?" in refusal(
        {"num_resonator" if k == "num_resonators" else k: v for k, v in RESONANCE.items()}
    )


def test_the_whole_file_is_kept_for_transformers(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    exported = {"architectures": ["GPT2LMHeadModel"], "resid_pdrop": 0.0, "use_cache": True}
    file.write_text(json.dumps(GPT2 | exported))
    assert load_shape(file).settings == GPT2 | exported


def test_missing_and_wrong_numbers_come_at_once() -> None:
    settings = {key: value for key, value in GPT2.items() if key != "n_layer"}
    lines = refusal(settings | {"n_head": "4", "n_embd": 0}).splitlines()
    assert lines == [
        "x.json: n_layer is missing.",
        "x.json: n_embd = 0: expected a whole number of at least 1.",
        "x.json: n_head = '4': expected a whole number of at least 1.",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bert"}, "'bert' is not supported. Families: gpt2, gpt_neox"),
        ({"n_iner": 64}, "n_iner is unknown to transformers. Did you mean n_inner?"),
        ({"n_head": 5}, "n_embd = 32 is not a multiple of n_head = 5"),
        ({"n_layer": 1001}, "n_layer = 1001: expected at most 1,000."),
    ],
)
def test_what_no_model_can_be_made_of_is_refused(changed: dict[str, Any], message: str) -> None:
    assert message in refusal(GPT2 | changed)


def test_qwen3_has_heads_of_their_own_width_on_shared_keys() -> None:
    assert shape_from(QWEN, where="x").mixer == Attention(4, False, key_heads=2, head_width=128)
    shape = shape_from(QWEN | {"head_dim": 16}, where="x")
    assert (shape.widths["queries"], shape.widths["keys"]) == (64, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing."),
        ({"head_dim": 15}, "a head is 15 wide; rotary positions need an even width."),
        ({"head_dim": 1.5}, "head_dim = 1.5: expected a whole number of at least 1."),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported. Remove it."),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping = 0: expected a number above 0"),
    ],
)
def test_groups_and_heads_that_no_attention_has_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    assert message in refusal(QWEN | changed)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"a\.json"):
        load_shape(file)


@pytest.mark.parametrize("scales", [4, [1, 0], [2.5], ["1"]])
def test_scales_that_are_no_list_of_whole_numbers_are_refused(scales: object) -> None:
    settings = json.loads((shipped_files() / "models" / "ten_tiny.json").read_text())
    assert shape_from(settings, where="ten_tiny").mixer == Eigenstates(16, (1, 2))
    with pytest.raises(ConfigError, match=r"scales = .*: expected a list of at most 16 numbers"):
        shape_from(settings | {"scales": scales}, where="ten_tiny")
