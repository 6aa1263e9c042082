from typing import Any

import pytest
import torch
import transformers

from refocused.config.load_run import find_config, load_run
from refocused.config.model_shape import ModelShape, load_shape, shape_from
from refocused.estimate.flops import (
    block_elements,
    count_parameters,
    flops_per_token,
    mfu_fraction,
    possible_mfu,
)
from refocused.models.families import register_families

PRESETS = (
    "demo_gpt2",
    "gpt2_1b",
    "neox_1_2b",
    "llama_493m",
    "qwen3_492m",
    "nanochat_d12",
    "resonance_small",
    "resonance_xlarge",
    "ten_large_32k",
)


def preset(name: str) -> ModelShape:
    return load_shape(find_config("models", name))


def test_padding_and_embeddings_are_counted_apart() -> None:
    # 257 x 192 + 256 x 192 + 4 x (12 x 192^2 + 13 x 192) + 2 x 192
    assert count_parameters(preset("demo_gpt2")).total == 1_878_336
    count = count_parameters(preset("gpt2_124m"), vocabulary_multiple=128)
    assert count.padding == 47 * 768
    assert (count.total, count.allocated) == (124_439_808, 124_475_904)
    untied = count_parameters(preset("neox_1_2b"), vocabulary_multiple=128)
    assert untied.padding == 47 * 2048 * 2
    assert untied.without_embeddings == 1_208_602_624


RECALL = {"convolution_width": 4, "memory_heads": 4, "attention_every": 3, "attention_heads": 8}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in PRESETS),
        *((name, {"tie_word_embeddings": not preset(name).tied}) for name in PRESETS),
        *((name, RECALL) for name in ("resonance_small", "ten_nano")),
    ],
)
def test_transformers_builds_as_many_parameters_as_are_counted(
    name: str, changes: dict[str, Any]
) -> None:
    register_families()
    settings: dict[str, Any] = {**preset(name).settings, **changes}
    shape = shape_from(settings, where=name)
    padded = settings | {"vocab_size": shape.padded_vocabulary(128)}
    config = transformers.AutoConfig.for_model(**padded)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    built = sum(parameter.numel() for parameter in set(model.parameters()))
    assert count_parameters(shape, vocabulary_multiple=128).allocated == built


# A convolution takes 3 passes of two FFTs and a product for each channel. A mode of TEN's scales
# meets averages of 2 and 4 tokens less often, and no length.
MODES = 2 * 160 * (1 + 1 / 2 + 1 / 4)


@pytest.mark.parametrize(
    ("name", "length", "in_products", "beside_them"),
    [
        ("gpt2_1b", 2048, 24 * 12 * 1536**2 + 50_000 * 1536, 12 * 24 * 1536 * 2048),
        (
            "qwen3_1b",
            2048,
            30 * 1536 * (2 * 2048 + 2 * 1024 + 3 * 4608) + 50257 * 1536,
            12 * 30 * 2048 * 2048,
        ),
        ("resonance_small", 2**15, 6 * 10 * 768**2 + 50257 * 768, 6 * 3 * 768 * (10 * 16 + 6)),
        ("resonance_small", 2**16, 6 * 10 * 768**2 + 50257 * 768, 6 * 3 * 768 * (10 * 17 + 6)),
        *(
            ("ten_medium_32k", T, 12 * (8 * 1280**2 + 3 * MODES * 1280) + 50257 * 1280, 288 * MODES)
            for T in (1024, 2**15)
        ),
    ],
)
def test_flops_of_a_token_by_hand(
    name: str, length: int, in_products: float, beside_them: float
) -> None:
    flops = flops_per_token(preset(name), sequence_length=length)
    assert flops == 6 * in_products + beside_them


def test_the_known_speed_of_eight_h100s() -> None:
    flops = flops_per_token(preset("gpt2_1b"), sequence_length=2048)
    speed, peak = 2000 * 1_048_576 / 3600, 989.4e12
    share = mfu_fraction(speed, flops_per_token=flops, gpus=8, peak_flops=peak)
    assert share == pytest.approx(0.40, abs=0.005)
    assert mfu_fraction(1.0, flops_per_token=1.0, gpus=1, peak_flops=None) is None


@pytest.mark.parametrize("length", [1024, 2048])
def test_an_mfu_is_possible_up_to_the_peak_of_what_kernels_do(length: int) -> None:
    run = ("gpt2_1b_8xh100_fast", f"model.sequence_length={length}", "precision.dtype=bf16")
    shape = load_run(run[0], run[1:]).shape
    counted = flops_per_token(shape, sequence_length=length)
    attention = shape.layers * 12.0 * shape.width * length
    blocks = shape.layers * 6.0 * block_elements(shape)
    assert possible_mfu(load_run(run[0], run[1:])) == counted / (counted - attention / 2)
    masked = load_run(run[0], [*run[1:], "data.mask_documents=true", "data.document_id=0"])
    assert possible_mfu(masked) == pytest.approx(counted / (counted - attention))
    to_fp8 = load_run(run[0], [*run[1:], "precision.fp8=tensorwise"])
    assert possible_mfu(to_fp8) == pytest.approx(counted / (counted - attention / 2 - blocks / 2))
