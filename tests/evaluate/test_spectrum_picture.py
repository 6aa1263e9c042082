from __future__ import annotations

import pytest
import torch

from refocused.evaluate.comparison import spectra
from refocused.models.resonance.resonance import ResonanceConfig, ResonanceForCausalLM
from refocused.models.ten.ten import TenConfig, TenForCausalLM

COMMON = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3}
COMMON |= {"max_position_embeddings": 100}


def ten() -> TenForCausalLM:
    return TenForCausalLM(TenConfig(num_eigenstates=5, scales=[1, 2], **COMMON))


def resonance() -> ResonanceForCausalLM:
    return ResonanceForCausalLM(ResonanceConfig(num_resonators=7, **COMMON))


def test_every_mode_of_every_scale_is_there() -> None:
    modules = spectra(ten())
    assert [len(one.now.frequency) for one in modules] == [10] * 6
    longest = [one.summary()["longest_tokens"] for one in modules]
    assert all(70 < found < 100 for found in longest[0::2])
    assert all(35 < found < 50 for found in longest[1::2])  # tokens of twice the length


def test_resonators_ring_for_1_to_all_tokens() -> None:
    modules = spectra(resonance())
    assert [one.name for one in modules] == [f"model.layers.{i}.resonators" for i in range(3)]
    summary = modules[0].summary()
    assert summary["modes"] == 7
    assert 1 < summary["shortest_tokens"] < summary["longest_tokens"] < 101
    assert summary["highest_frequency"] == pytest.approx(torch.pi)


@pytest.mark.parametrize("family", ["ten", "resonance"])
def test_a_mode_that_slowed_down_is_seen_where_it_is_now(family: str) -> None:
    model = ten() if family == "ten" else resonance()
    shifts = {"ten": "mixer.cells.0.rate_shift", "resonance": "resonators.decay_shift"}
    with torch.no_grad():
        model.model.layers[1].get_parameter(shifts[family])[4] = -3.0
    moved = [
        (number, mode)
        for number, one in enumerate(spectra(model))
        for mode in (one.now.log_decay != one.start.log_decay).nonzero().flatten().tolist()
    ]
    first_of_block_1 = 2 if family == "ten" else 1
    assert moved == [(first_of_block_1, 4)]
    one = spectra(model)[first_of_block_1]
    ratio = one.now.log_decay[4].detach() / one.start.log_decay[4]
    assert float(ratio) == pytest.approx(torch.e**-3)
