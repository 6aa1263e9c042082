"""Sequences that ranks share: losses and gradients of one rank with whole sequences."""

import itertools
import statistics

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    ACCUMULATION,
    DOCUMENT,
    RANKS,
    RATES,
    Case,
    make_step,
    sequences,
    start_engine,
    train_plainly,
)
from ranks import on_ranks
from small_families import WITH_ATTENTION, build, tokens

from refocused.models.sequence_parallel import join_sequence_group

TOLERANCE = 1e-5
KEY_HEADS = "num_key_value_heads"
SIZES = (2, 4)
FORMS = {"plain": {}, "recomputed": {"recomputes": True}, "masked": {"document_id": DOCUMENT}}
LOOKUP = {"convolution_width": 4, "memory_heads": 4, "attention_every": 3, "attention_heads": 4}
CASES = {
    f"{family}, {form}": (family, settings | ({} if family == "gpt2" else {KEY_HEADS: 4}))
    for family, (form, settings) in itertools.product(WITH_ATTENTION, FORMS.items())
} | {
    "ten": ("ten", {}),
    "ten, recomputed": ("ten", {"recomputes": True}),
    "ten, lookup": ("ten", {**LOOKUP, "num_hidden_layers": 3}),
}
STAGES = (0, 3)


def measure(world):
    found = {}
    groups = {size: join_sequence_group(world.rank, world.world_size, ranks=size) for size in SIZES}
    ids = tokens(4, 65)
    ids[:, ::9] = DOCUMENT
    labels = ids[:, 1:].clone()
    labels[:, 40:45] = -100  # all in one rank's slice
    for case, (family, settings) in CASES.items():
        model = build(family, **settings)
        whole = model(ids[:, :-1], labels)
        whole.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        for size, group in groups.items():
            model.zero_grad()
            model.sequence = group
            rows = ids.chunk(world.world_size // size)[world.rank // size]
            own = labels.chunk(world.world_size // size)[world.rank // size]
            loss = model(rows[:, :-1], own)
            loss.backward()
            with torch.no_grad():
                seen = model(rows[:, :-1], own)
                each = model(rows[:, :-1], own, of_each=True)
            counted = (group.own(own) != -100).sum()
            sums = torch.stack([each.double().sum(), counted.double()])
            dist.all_reduce(sums)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            error = max(
                float((p.grad / world.world_size - wanted[name]).abs().max())
                / float(wanted[name].abs().max())
                for name, p in model.named_parameters()
            )
            found[f"{case}, {size} ranks"] = {
                "loss": float(loss.detach()) - float(whole),
                "seen": float(seen) - float(whole),
                "of labels": float(sums[0] / sums[1]) - float(whole),
                "gradient": error,
            }
            model.sequence = None
    found |= {f"ZeRO-{stage}": _train(stage, world, groups[4]) for stage in STAGES}
    return found


def _train(stage, world, group):
    """Make the steps of a plain loop with an engine whose ranks share all sequences."""
    case = Case(stage, gradient_accumulation_steps=world.world_size // RANKS * ACCUMULATION)
    engine = start_engine(case, world, prepare=lambda model: setattr(model, "sequence", group))
    steps = zip(sequences().flatten(2, 3), RATES, strict=True)
    return [statistics.mean(make_step(engine, passes, rate)[0]) for passes, rate in steps]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    return on_ranks(measure, folder=folder, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_shared_sequences_have_the_loss_and_gradient_of_whole_ones(case, size, parts):
    found = [rank[f"{case}, {size} ranks"] for rank in parts]
    assert abs(sum(one["loss"] for one in found) / len(found)) < TOLERANCE
    assert abs(sum(one["seen"] for one in found) / len(found)) < TOLERANCE
    assert max(abs(one["of labels"]) for one in found) < TOLERANCE
    assert max(one["gradient"] for one in found) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_training_with_shared_sequences_equals_a_plain_loop(stage, parts):
    steps = zip(*(rank[f"ZeRO-{stage}"] for rank in parts), strict=True)
    found = [sum(step) / len(step) for step in steps]
    assert found == pytest.approx(train_plainly("gpt2").losses, abs=TOLERANCE)
