from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

PADDED = 1.02  # each parameter's parts are of equal size, the norm's numbers come on top


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("traffic")
    script = Path(__file__).with_name("traffic_ranks.py")
    ended = Ranks(2, [str(script), str(folder)], folder=folder).wait()
    assert ended.codes == [0, 0], ended.everything
    content: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return content


@pytest.mark.slow
def test_zero_3_sends_the_model_once_each_way_for_a_micro_batch(found: dict[str, Any]) -> None:
    most = found["accumulation"] * found["parameters"] * PADDED
    first, *steps = found["steps"]  # the first one finds out in which order weights are needed
    assert first["gather"] > 0
    for sent in steps:
        assert 0 < sent["gather"] <= most
        assert 0 < sent["reduce"] <= most


@pytest.mark.slow
def test_a_save_sends_no_weights(found: dict[str, Any]) -> None:
    assert found["in a save"].get("gather", 0) < 0.01 * found["parameters"]


@pytest.mark.slow
def test_a_sample_gathers_the_model_once(found: dict[str, Any]) -> None:
    for_each_token, held = found["in samples"]
    assert 0 < held <= found["parameters"] * PADDED < for_each_token


@pytest.mark.slow
def test_no_compiler_is_imported_where_nothing_is_compiled(found: dict[str, Any]) -> None:
    assert not found["inductor"]
    assert found["compile"] == "torch"  # torch's own is back
