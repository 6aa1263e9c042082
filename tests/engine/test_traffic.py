"""What each stage of ZeRO sends in a step, by kind of collective, against what is computed."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from end_to_end.forked import measured

from refocused.estimate.step_time import collective_bytes

PADDED = 1.02  # each parameter's parts are of equal size
KINDS = {
    "all_gather": {"all_gather_into_tensor", "all_gather"},
    "all_reduce": {"all_reduce"},
    "reduce_scatter": {"reduce_scatter_tensor", "reduce_scatter"},
}
STEPS = [
    *(f"{stage}, {dtype}" for stage in (0, 1, 2, 3) for dtype in ("bf16", "fp32")),
    *(f"{stage}, small buckets" for stage in (1, 2, 3)),
    "3, kept",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(measured("traffic_ranks", tmp_path_factory.mktemp("traffic"))[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_sends_what_is_computed_by_the_collectives_that_are_named(
    found: dict[str, Any], case: str
) -> None:
    stage, setting = int(case[0]), case[3:]
    computed = collective_bytes(
        found["parameters"],
        stage=stage,
        size=2 if setting == "bf16" else 4,
        accumulation=found["accumulation"],
        gathers=1 if setting == "kept" else found["accumulation"],
    )
    # The first one finds out in which order weights are needed.
    for sent in found["steps"][case][1:]:
        assert {kind for kind, names in KINDS.items() if names & set(sent)} == set(computed)
        assert set(sent) <= set().union(*KINDS.values())  # no broadcast, no reduce to one rank
        for kind, size in computed.items():
            counted = sum(sent[name][1] for name in KINDS[kind] & set(sent))
            assert size <= counted <= size * PADDED


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in STEPS if not one.startswith("0")])
def test_gradients_leave_in_few_buckets(found: dict[str, Any], case: str) -> None:
    bucket = found["bucket"] if "small" in case else found["parameters"]
    # A bucket leaves when the next gradient does not fit: each two of them hold more than one.
    most = 2 * math.ceil(found["parameters"] / bucket) if "small" in case else 1
    backwards = 1 if case.startswith("1") else found["accumulation"]
    for sent in found["steps"][case][1:]:
        kinds = KINDS["all_reduce"] | KINDS["reduce_scatter"]
        calls = sum(sent[name][0] for name in kinds & set(sent))
        assert backwards * math.ceil(found["parameters"] / bucket) <= calls <= backwards * most


@pytest.mark.slow
def test_a_save_sends_no_weights(found: dict[str, Any]) -> None:
    assert found["in a save"] == {}


@pytest.mark.slow
def test_a_sample_gathers_the_model_once(found: dict[str, Any]) -> None:
    for_each_token, held = (sent["all_gather_into_tensor"][1] for sent in found["in samples"])
    assert 0 < held <= 4 * found["parameters"] * PADDED < for_each_token


def test_no_compiler_is_imported_where_nothing_is_compiled() -> None:
    script = (
        "import sys, torch\n"
        "from refocused.engine.build_engine import load_deepspeed\n"
        "load_deepspeed()\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "assert torch.compile.__module__ == 'torch'  # its own is back"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"DS_ACCELERATOR": "cpu"})
