"""Runs that look for flipped bits compute the same as others, and find what is flipped."""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from engine_cases import (
    LENGTH,
    MICRO,
    MUON,
    OPTIMIZER,
    RATES,
    Case,
    allow_fp16,
    by_name,
    make_step,
    saved,
    sequences,
    start_engine,
)
from ranks import on_ranks

from refocused.engine.bit_checks import digest
from refocused.engine.compiled import compile_blocks
from refocused.system.errors import TrainingError

EQUAL = [
    *(Case(stage, dropout=0.2) for stage in (0, 1, 2, 3)),
    *(Case(stage, dtype="bf16", dropout=0.2) for stage in (0, 1, 3)),
    Case(3, dtype="fp16", dropout=0.2, initial_scale_power=21),  # begins with overflows
    Case(3, "gpt_neox", "bf16", dropout=0.2, recomputes=True),
    Case(3, offload_optimizer="cpu", offload_parameters="cpu", dropout=0.2),
    Case(3, "nanochat", gradient_accumulation_steps=1),
    Case(2, normuon=True),  # by Muon
    Case(3, "resonance"),
]
COMPILED = [Case(stage, dtype="bf16", dropout=0.2) for stage in (1, 3)]
FLIPS_OF_A_CASE = 2


def start(case, world, *, replay_every):
    """Build an engine, with compiled blocks in the cases that are."""

    def compile_(model):
        found = compile_blocks(
            model,
            block_class=model.block_class,
            batch_shape=(MICRO, LENGTH),
            dtype=case.dtype,
            choice="on",
            world=world,
            is_partitioned=case.stage == 3,
            backend="aot_eager",
        )
        assert found.is_on, found.text

    engine = start_engine(
        case,
        world,
        prepare=compile_ if case in COMPILED else lambda model: None,
        optimizer=MUON if case.normuon else OPTIMIZER,
        replay_every=replay_every,
    )
    torch.manual_seed(5 + world.rank)
    return engine


def train(case, world, *, replay_every):
    """Make steps; return losses, norms and outcomes, and the random state."""
    engine = start(case, world, replay_every=replay_every)
    records = []
    batches = sequences(gradient_accumulation_steps=case.gradient_accumulation_steps)
    for step, rate in enumerate(RATES[:4]):
        losses, outcome = make_step(engine, batches[step, :, world.rank], rate)
        outcome.explain(step)
        records.append([losses, str(engine.gradient_norm()), outcome.was_finite()])
    engine.close()
    return [*records, torch.rand(1).item()]


# The host skips updates in fp16, the device in the others.
FLIPPED = [Case(0), Case(1, dtype="bf16"), Case(2, dtype="fp16"), Case(3, "gpt_neox")]
KINDS = ("pass", "state")
STEP = 7  # named by the messages


def flip_bits(world, flips):
    """Flip bits one by one in engines of all cases; return what came of each.

    That is its kind and its rank, and the errors of the step before it and of its own.
    """
    allow_fp16()
    found = []
    for place, case in enumerate(FLIPPED):
        engine = start_engine(case, world, replay_every=1)
        good = flipped_step(engine, world)
        shards = saved(engine, world, Path.cwd() / case.name)
        for number in range(flips):
            draw = random.Random(f"{case.name} {number}")  # alike on all ranks until the flip
            rank, kind = draw.randrange(world.world_size), KINDS[(place + number) % 2]
            is_here = rank == world.rank
            told = in_pass if kind == "pass" else in_state
            found.append([kind, rank, good, told(engine, world, draw, is_here=is_here)])
            engine.load_shards(shards)
            good = flipped_step(engine, world)
        engine.close()
    return found


def in_pass(engine, world, draw, *, is_here):
    """Flip a bit of a layer's output, or of the gradient of that, in one of the two passes."""
    modules = list(engine._engine.module.modules())[1:]
    layers = [one for one in modules if not list(one.children()) and list(one.parameters())]
    layer, flipped_pass, of_gradient = draw.choice(layers), draw.randrange(2), draw.randrange(2)
    passes = itertools.count()

    def hook(module, inputs, output):
        if next(passes) != flipped_pass or not is_here:
            return
        if of_gradient and output.dim():  # the gradient of the loss is given to both passes
            output.register_hook(lambda gradient: flip(gradient.contiguous().clone(), draw))
        else:
            flip(output, draw)

    handle = layer.register_forward_hook(hook)
    found = flipped_step(engine, world)
    handle.remove()
    return found


def in_state(engine, world, draw, *, is_here):
    """Flip a bit of a weight, a master, a moment or a counter, before or after the passes."""
    values, is_early = draw.choice(state_of(engine)), draw.randrange(2)

    def act():
        if is_here:
            flip(values, draw)

    if is_early:
        act()
    return flipped_step(engine, world, before_update=lambda: None if is_early else act())


def flipped_step(engine, world, *, before_update=lambda: None):
    """Make a step of one pass; return whether its update was made and the error, or nothing."""
    engine.begin_step(1)
    passes = sequences()[0, :1, world.rank]
    _, outcome = make_step(engine, passes, before_update=lambda losses: before_update())
    try:
        outcome.explain(STEP)
    except TrainingError as error:
        return f"{outcome.was_finite()}: {error}"
    return ""


def flip(values, draw):
    """Flip one bit of a contiguous tensor in place."""
    raw = values.detach().view(-1).view(torch.uint8)
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return values


def state_of(engine):
    """Return this rank's weights, float32 masters, moments and counters."""
    optimizer = engine._engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state
    weights = [getattr(one, "ds_tensor", one.data) for one in engine._engine.module.parameters()]
    moments = [one for values in states.values() for one in values.values()]
    return [*weights, *(one.data for one in states), *moments]


def measure(world):
    found = {"flips": flip_bits(world, FLIPS_OF_A_CASE)}
    for case in [*EQUAL, *COMPILED]:
        found[case.name] = [train(case, world, replay_every=every) for every in (None, 2)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    return on_ranks(measure, folder=tmp_path_factory.mktemp("checks"))


def test_a_digest_changes_with_any_bit():
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(256, (n,), generator=draw).byte() for n in (300_003, 5, 0, 1)]
    whole = digest(parts)
    assert torch.equal(whole, digest([one.clone() for one in parts]))
    for part, place in ((0, 0), (0, 262_144), (0, 300_002), (1, 4), (3, 0)):
        for bit in range(8):
            parts[part][place] ^= 1 << bit
            assert not torch.equal(whole, digest(parts))
            parts[part][place] ^= 1 << bit


@pytest.mark.slow
@by_name([*EQUAL, *COMPILED])
def test_checks_change_no_bit_of_a_training(found, case):
    for rank in found:
        plain, checked = rank[case.name]
        assert checked == plain


def check_flips(told, *, flips):
    """Each flip was found, on its rank and as its kind, before the update of its step."""
    assert len(told) == flips
    for kind, rank, good, error in told:
        assert good == ""
        what = f"two passes of one micro-batch differ at step {STEP + 1}"
        if kind == "state":
            what = f"weights or optimizer state changed after the update of step {STEP}"
        assert re.match(rf"False: Silent corruption: {what} on rank {rank} \(CPU of", error)
        assert f"rank {1 - rank}" not in error


@pytest.mark.slow
def test_flips_are_found_on_every_rank_alike(found):
    first, second = found
    check_flips(first["flips"], flips=FLIPS_OF_A_CASE * len(FLIPPED))
    assert first["flips"] == second["flips"]


@pytest.mark.long
def test_a_hundred_of_a_hundred_flips_are_found(tmp_path):
    first, second = on_ranks(flip_bits, 25, folder=tmp_path, timeout=600)
    assert [kind for kind, *_ in first].count("pass") == 50
    check_flips(first, flips=100)
    assert first == second
