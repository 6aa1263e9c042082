"""Interrupted twice and resumed equals uninterrupted, bit for bit, for every pair of settings."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    Case,
    allow_fp16,
    by_name,
    make_step,
    saved,
    sequences,
    start_engine,
    tensors_in,
)
from ranks import on_ranks

STEPS = 18
# Not before the tenth: Adam's bias corrections as powers and as running products agree up to there.
SAVED_AT = (12, 15)


def case_of(dtype, offload, family, dropout, recomputes, gradient_accumulation_steps):
    return Case(
        3,
        family,
        dtype,
        offload_optimizer="none" if offload == "none" else "cpu",
        offload_parameters="cpu" if offload == "all" else "none",
        initial_scale_power=21,  # fp16 begins with overflows
        dropout=dropout,
        recomputes=recomputes,
        gradient_accumulation_steps=gradient_accumulation_steps,
        separate=family == "gpt_neox",  # its head is not tied
    )


# Each pair of two settings' values occurs at least once, except for families.
SETTINGS = [
    ("bf16", "none", "gpt2", 0.2, True, 2),
    ("bf16", "optimizer", "gpt_neox", 0.0, False, 2),
    ("bf16", "all", "gpt2", 0.2, True, 1),
    ("fp32", "none", "gpt_neox", 0.2, False, 1),
    ("fp32", "optimizer", "gpt2", 0.0, True, 1),
    ("fp32", "all", "gpt_neox", 0.2, True, 2),
    ("fp16", "none", "gpt2", 0.0, False, 1),
    ("fp16", "optimizer", "gpt_neox", 0.2, True, 2),
    ("fp16", "all", "gpt2", 0.0, False, 2),
]
EXACTNESS_CASES = [case_of(*settings) for settings in SETTINGS]


def start(case, world, *, seed):
    """Build an engine; its weights and its ranks' random states follow from the seed."""
    # The scale of fp16 grows again between the saves.
    engine = start_engine(case, world, seed=seed, scale_window=4)
    torch.manual_seed(seed + world.rank)
    return engine


def train(engine, case, world, steps):
    """Make steps; return for each this rank's losses, the scale, and the skipped steps."""
    records = []
    for step in steps:
        before = engine.loss_scale(), engine.skipped_steps
        passes = sequences(STEPS, case.gradient_accumulation_steps)[step, :, world.rank]
        losses, _ = make_step(engine, passes, 1e-3 * (1 + step % 3), decay_share=step / STEPS)
        records.append((losses, *before))
    return records


def run(case, world, scratch):
    engine = start(case, world, seed=1)
    straight = train(engine, case, world, range(SAVED_AT[0]))
    folder = saved(engine, world, scratch / "first")
    straight += train(engine, case, world, range(SAVED_AT[0], STEPS))
    uninterrupted = saved(engine, world, scratch / "straight")
    engine.close()
    resumed = []
    for steps in (range(*SAVED_AT), range(SAVED_AT[1], STEPS)):
        engine = start(case, world, seed=90 + len(resumed))
        engine.load_shards(folder)
        resumed += train(engine, case, world, steps)
        folder = saved(engine, world, scratch / f"after-{steps.stop}")
        engine.close()
    tensors = tensors_in(folder)
    random = [content for name, content in tensors.items() if name.startswith("ranks/")]
    return {
        "straight": straight,
        "resumed": resumed,
        "tensors are the same": tensors == tensors_in(uninterrupted),
        "random states": random,
    }


def measure(world):
    """Train every case on this rank, straight and interrupted twice."""
    allow_fp16()
    return {case.name: run(case, world, Path(case.name).absolute()) for case in EXACTNESS_CASES}


Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of all cases, from one start of the ranks."""
    return on_ranks(measure, folder=tmp_path_factory.mktemp("exactness"))


def test_every_pair_of_settings_is_covered():
    columns = [column for place, column in enumerate(zip(*SETTINGS, strict=True)) if place != 2]
    for one, other in itertools.combinations(columns, 2):
        assert {*zip(one, other, strict=True)} == {*itertools.product(one, other)}


@pytest.mark.slow
@by_name(EXACTNESS_CASES)
def test_two_interruptions_change_no_bit(found, case):
    for rank in found:
        assert rank[case.name]["resumed"] == rank[case.name]["straight"][SAVED_AT[0] :]
        assert rank[case.name]["tensors are the same"]
        first, second = rank[case.name]["random states"]
        assert first != second  # each rank restores its own
    if case.dtype == "fp16":  # both happened, before and after a save
        _, scales, skipped = zip(*found[0][case.name]["straight"], strict=True)
        assert skipped[-1] > 0
        assert max(scales[SAVED_AT[0] :]) > min(scales)
