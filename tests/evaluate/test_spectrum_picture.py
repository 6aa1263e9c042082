"""The picture of horizons of resonance and TEN: each mode's initial and present place."""

import pytest
import torch
from evaluate.small_models import small_model

from refocused.evaluate.comparison import spectra

LAYERS = {"num_hidden_layers": 3, "max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("family", "name", "modes"), [("ten", "mixer.cells.{}", 10), ("resonance", "resonators", 8)]
)
def test_a_changed_mode_is_drawn_at_its_present_place(family: str, name: str, modes: int) -> None:
    scales = {"num_eigenstates": 5, "scales": [1, 2]} if family == "ten" else {}
    model = small_model(family, **LAYERS | scales).network
    shift = {"ten": "mixer.cells.0.rate_shift", "resonance": "resonators.decay_shift"}[family]
    with torch.no_grad():
        model.model.layers[1].get_parameter(shift)[4] = -3.0
    modules = spectra(model)
    names = [f"model.layers.{layer}.{name}" for layer in range(3)]
    parts = range(2 if family == "ten" else 1)
    assert [one.name for one in modules] == [one.format(part) for one in names for part in parts]
    moved = {
        (one.name, mode): float(one.now.log_decay[mode].detach() / one.start.log_decay[mode])
        for one in modules
        for mode in (one.now.log_decay != one.start.log_decay).nonzero().flatten().tolist()
    }
    assert moved == {(names[1].format(0), 4): pytest.approx(torch.e**-3)}
    for one in modules:
        # Tokens of scale 2 are twice as long.
        found, longest = one.start.horizon_tokens, 50 if one.name.endswith("cells.1") else 100
        assert 1 <= found.min() < 0.7 * longest < found.max() <= longest + 1
        assert one.summary()["modes"] == len(found) == modes
    last = modules[-1].summary()
    assert last["shortest_tokens"] < last["median_tokens"] < last["longest_tokens"] < 101
    assert family == "ten" or last["highest_frequency"] == pytest.approx(torch.pi)
