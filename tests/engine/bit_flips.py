"""Flip single bits on one of two ranks, at random places: 100 in all, of every kind."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_cases import Case, sequences, start_engine
from torch import Tensor

from refocused.engine.engine import Engine
from refocused.system.errors import TrainingError
from refocused.system.world import World

# The host skips updates in fp16, the device in the others.
CASES = [Case(0), Case(1, dtype="bf16"), Case(2, dtype="fp16"), Case(3, "gpt_neox")]
KINDS = ("pass", "state")
STEP = 7  # named by the messages


def flip_bits(world: World, flips: int) -> list[Any]:
    """Flip bits one by one in engines of all cases; return what came of each.

    That is its kind and its rank, and the errors of the step before it and of its own.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    found = []
    for place, case in enumerate(CASES):
        engine = start_engine(case, world, replay_every=1)
        good = make_step(engine, world)
        shards = Path.cwd() / case.name
        if world.is_rank_0:
            (shards / "ranks").mkdir(parents=True)
        world.barrier()
        assert not engine.save_shards(shards).errors
        world.barrier()
        for number in range(flips):
            draw = random.Random(f"{case.name} {number}")  # alike on all ranks until the flip
            rank, kind = draw.randrange(world.world_size), KINDS[(place + number) % 2]
            is_here = rank == world.rank
            told = in_pass if kind == "pass" else in_state
            found.append([kind, rank, good, told(engine, world, draw, is_here=is_here)])
            engine.load_shards(shards)
            good = make_step(engine, world)
        engine.close()
    return found


def in_pass(engine: Engine, world: World, draw: random.Random, *, is_here: bool) -> str:
    """Flip a bit of a layer's output, or of the gradient of that, in one of the two passes."""
    modules = list(engine._engine.module.modules())[1:]
    layers = [one for one in modules if not list(one.children()) and list(one.parameters())]
    layer, flipped_pass, of_gradient = draw.choice(layers), draw.randrange(2), draw.randrange(2)
    passes = itertools.count()

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        if next(passes) != flipped_pass or not is_here:
            return
        if of_gradient and output.dim():  # the gradient of the loss is given to both passes
            output.register_hook(lambda gradient: flip(gradient.contiguous().clone(), draw))
        else:
            flip(output, draw)

    handle = layer.register_forward_hook(hook)
    found = make_step(engine, world)
    handle.remove()
    return found


def in_state(engine: Engine, world: World, draw: random.Random, *, is_here: bool) -> str:
    """Flip a bit of a weight, a master, a moment or a counter, before or after the passes."""
    values, is_early = draw.choice(state_of(engine)), draw.randrange(2)

    def act() -> None:
        if is_here:
            flip(values, draw)

    if is_early:
        act()
    return make_step(engine, world, before_update=lambda: None if is_early else act())


def make_step(
    engine: Engine, world: World, *, before_update: Callable[[], None] = lambda: None
) -> str:
    """Make a step of one pass; return whether its update was made and the error, or nothing."""
    ids = sequences()[0, 0, world.rank]
    engine.begin_step(1)
    engine.accumulate(ids[:, :-1], ids[:, 1:])
    before_update()
    outcome = engine.update(1e-3)
    try:
        outcome.explain(STEP)
    except TrainingError as error:
        return f"{outcome.was_finite()}: {error}"
    return ""


def flip(values: Tensor, draw: random.Random) -> Tensor:
    """Flip one bit of a contiguous tensor in place."""
    raw = values.detach().view(-1).view(torch.uint8)
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return values


def state_of(engine: Engine) -> list[Tensor]:
    """Return this rank's weights, float32 masters, moments and counters."""
    optimizer = engine._engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state
    weights = [getattr(one, "ds_tensor", one.data) for one in engine._engine.module.parameters()]
    moments = [one for values in states.values() for one in values.values()]
    return [*weights, *(one.data for one in states), *moments]
