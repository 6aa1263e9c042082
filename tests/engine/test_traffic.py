from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import Ranks

PADDED = 1.02  # each parameter's parts are of equal size, the norm's numbers come on top


@pytest.mark.slow
def test_zero_3_sends_the_model_once_each_way_for_a_micro_batch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("traffic_ranks.py")
    ended = Ranks(2, [str(script), str(tmp_path)], folder=tmp_path).wait()
    assert ended.codes == [0, 0], ended.everything
    found = json.loads((tmp_path / "found.json").read_text())
    most = found["accumulation"] * found["parameters"] * PADDED
    first, *steps = found["steps"]  # the first one finds out in which order weights are needed
    assert first["gather"] > 0
    for sent in steps:
        assert 0 < sent["gather"] <= most
        assert 0 < sent["reduce"] <= most
