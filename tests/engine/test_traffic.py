"""The collectives of a step under each ZeRO stage, against the expected bytes."""

import contextlib
import functools
import inspect
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_cases import ACCUMULATION, Case, make_step, sequences, start_engine
from ranks import on_ranks

from refocused.estimate.step_time import collective_bytes
from refocused.models.causal_lm import counted_parameters

BUCKET = 40_000  # elements: the model has 136,960, the largest matrix 32,768
SMALL = {"reduce_bucket_size": BUCKET}
GATHERING = {"stage3_param_persistence_threshold": 0}  # or this small model stays gathered
# By name: stage, precision, DeepSpeed settings. The last is saved and samples.
CASES = {
    **{
        f"{stage}, {dtype}": (stage, dtype, {}) for stage in (0, 1, 2) for dtype in ("bf16", "fp32")
    },
    **{f"{stage}, small buckets": (stage, "fp32", SMALL) for stage in (1, 2)},
    "3, kept": (3, "fp32", {}),
    "3, bf16": (3, "bf16", GATHERING),
    "3, small buckets": (3, "fp32", GATHERING | SMALL),
    "3, fp32": (3, "fp32", GATHERING),
}

SENT = Counter()  # bytes of whole tensors, by collective
CALLS = Counter()

# The argument that is of full size, or a list of its parts.
WHOLE = {
    "all_gather_into_tensor": "output_tensor",
    "all_gather": "tensor_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter": "input_list",
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_to_all_single": "input",
}
LEAST_ELEMENTS = 64  # fewer are norms and flags


def count_what_is_sent():
    """Wrap torch's collectives, before DeepSpeed imports them."""
    for name, whole in WHOLE.items():
        setattr(dist, name, counting(name, getattr(dist, name), whole))


def counting(name, function, whole):
    signature = inspect.signature(function)

    def counted(*args, **named):
        tensors = signature.bind(*args, **named).arguments[whole]
        parts = tensors if isinstance(tensors, list) else [tensors]
        if sum(part.numel() for part in parts) >= LEAST_ELEMENTS:
            SENT[name] += sum(part.numel() * part.element_size() for part in parts)
            CALLS[name] += 1
        return function(*args, **named)

    return counted


def counted_in(act):
    """Return the calls and bytes of each collective during an action."""
    SENT.clear(), CALLS.clear()
    act()
    return {name: [CALLS[name], SENT[name]] for name in SENT}


def measure(world):
    count_what_is_sent()
    steps = {}
    for name, (stage, dtype, zero) in CASES.items():
        fragment = {"zero_optimization": zero} if zero else {}
        engine = start_engine(Case(stage, dtype=dtype), world, fragment=fragment)
        steps[name] = [
            counted_in(functools.partial(make_step, engine, passes))
            for passes in sequences()[:4, :, world.rank]
        ]
        if name != list(CASES)[-1]:
            engine.close()
    saved = counted_in(lambda: engine.save_shards(Path("saved").absolute()))
    holding = (contextlib.nullcontext(), engine.weights_gathered())
    return {
        "steps": steps,
        "in a save": saved,
        "in samples": [counted_in(functools.partial(sample, engine, one)) for one in holding],
        "parameters": counted_parameters(engine._engine.module),
        "accumulation": ACCUMULATION,
        "bucket": BUCKET,
    }


def sample(engine, holding):
    with holding:
        for length in (4, 5, 6):
            engine.next_token_logits(sequences()[0, 0, 0, :, :length])


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
def found(tmp_path_factory):
    return on_ranks(measure, folder=tmp_path_factory.mktemp("traffic"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_has_the_expected_collectives_and_bytes(found, case):
    stage, setting = int(case[0]), case[3:]
    computed = collective_bytes(
        found["parameters"],
        stage=stage,
        size=2 if setting == "bf16" else 4,
        micro_batches=found["accumulation"],
        gathers=1 if setting == "kept" else found["accumulation"],
    )
    # The first step records the order of weights.
    for sent in found["steps"][case][1:]:
        assert {kind for kind, names in KINDS.items() if names & set(sent)} == set(computed)
        assert set(sent) <= set().union(*KINDS.values())  # no broadcast, no reduce to one rank
        for kind, size in computed.items():
            counted = sum(sent[name][1] for name in KINDS[kind] & set(sent))
            assert size <= counted <= size * PADDED


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in STEPS if not one.startswith("0")])
def test_gradients_leave_in_few_buckets(found, case):
    bucket = found["bucket"] if "small" in case else found["parameters"]
    # A bucket is sent when the next gradient does not fit, so two of them exceed one.
    most = 2 * math.ceil(found["parameters"] / bucket) if "small" in case else 1
    backwards = 1 if case.startswith("1") else found["accumulation"]
    for sent in found["steps"][case][1:]:
        kinds = KINDS["all_reduce"] | KINDS["reduce_scatter"]
        calls = sum(sent[name][0] for name in kinds & set(sent))
        assert backwards * math.ceil(found["parameters"] / bucket) <= calls <= backwards * most


@pytest.mark.slow
def test_a_save_sends_no_weights(found):
    assert found["in a save"] == {}


@pytest.mark.slow
def test_a_sample_gathers_the_model_once(found):
    first, second = (sent.get("all_gather_into_tensor", (0, 0))[1] for sent in found["in samples"])
    assert 0 < first <= 4 * found["parameters"] * PADDED
    assert second <= first  # a small model stays gathered until the next training pass


def test_no_compiler_is_imported_without_compiling():
    script = (
        "import sys, torch\n"
        "from refocused.engine.deepspeed_patches import load_deepspeed\n"
        "load_deepspeed()\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "assert torch.compile.__module__ == 'torch'  # its own is back"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"DS_ACCELERATOR": "cpu"})
