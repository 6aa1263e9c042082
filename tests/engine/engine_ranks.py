"""Train every case on this rank."""

import errno
import math
import os
from pathlib import Path
from typing import Any

import torch
from engine_cases import (
    CASES,
    DESCRIBED_AT,
    LENGTH,
    LOOKING,
    RATES,
    REFUSING,
    SAVED_AT,
    STARTING,
    WARMED,
    Case,
    passes_of,
    sequences,
    start_engine,
)
from small_families import VOCABULARY, build

from refocused.engine import deepspeed_patches, state_files
from refocused.engine.engine import Engine
from refocused.engine.finite_updates import Judge, Limits
from refocused.metrics.trackers import Histogram
from refocused.system.world import World


def train(
    engine: Engine, world: World, steps: range, folder: Path | None, *, grows: bool = False
) -> list[dict[str, Any]]:
    """Make some of the steps; after `SAVED_AT` of them save, where there is a folder.

    A copy made at the same time is written to another one when the steps are done.
    """
    records = []
    for step in steps:
        micro_losses = []
        micro_batches = passes_of(step, grows=grows)
        if grows:
            engine.begin_step(micro_batches)
        for accumulated in sequences()[step][:micro_batches]:
            ids = accumulated[world.rank]
            micro_losses.append(engine.accumulate(ids[:, :-1], ids[:, 1:]).item())
        described = describe(engine) if step in DESCRIBED_AT else None
        scale = engine.loss_scale()
        engine.update(RATES[step])
        norm = engine.gradient_norm()
        mean = sum(micro_losses) / len(micro_losses)
        records.append(
            {
                "loss": world.total([mean])[0] / world.world_size,
                "norm": None if norm is None or not math.isfinite(norm) else norm,
                "scale": scale,
                "skipped": engine.skipped_steps,
                "described": described,
            }
        )
        if folder is not None and step + 1 == SAVED_AT:
            written = engine.save_shards(folder)
            assert not written.errors, written.errors
            write_copy = engine.copy_shards(copy_of(folder))
    if folder is not None:
        written = write_copy()
        assert not written.errors, written.errors
    return records


def describe(engine: Engine) -> dict[str, Any]:
    """Summarize the histograms of this step over all parameters."""
    found: dict[str, dict[str, Histogram]] = {"weights": {}, "gradients": {}}
    for one in engine.histograms():
        group, _, name = one.name.partition("/")
        found[group][name] = one
    weights, gradients = found.values()
    return {
        "elements": sum(sum(one.counts) for one in weights.values()),
        "names": sorted(weights),
        "gradient names": sorted(gradients),
        "weights": math.sqrt(sum(one.squares for one in weights.values())),
        "gradient": math.sqrt(sum(one.squares for one in gradients.values())),
    }


def copy_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-copy")


def tensors_in(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor in the files below a folder."""
    found = {}
    for path in sorted(folder.rglob("*.pt")):
        file = torch._C.PyTorchFileReader(str(path))  # zipfile needs the CRC-32 that we omit
        for name in file.get_all_records():
            if name.startswith("data/"):
                found[f"{path.relative_to(folder)}/{name}"] = file.get_record(name)
    return found


def run(case: Case, world: World, scratch: Path) -> dict[str, Any]:
    """Train one case, and the second half of it again from its checkpoint."""
    undo = deepspeed_patches.undo_warm_up_step
    if case == WARMED:
        deepspeed_patches.undo_warm_up_step = lambda optimizer: None
    engine = start_engine(case, world)
    deepspeed_patches.undo_warm_up_step = undo
    random = torch.randint(
        VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(world.rank)
    )
    untrained = engine.validation_loss(random[:, :-1], random[:, 1:])
    folder = scratch / case.name
    if case.resumes and world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
        (copy_of(folder) / "ranks").mkdir(parents=True)
    world.barrier()
    steps = train(
        engine, world, range(len(RATES)), folder if case.resumes else None, grows=case.grows
    )
    found: dict[str, Any] = {
        "untrained": world.total([untrained.item()])[0] / world.world_size,
        "steps": steps,
    }
    engine.close()
    if case.resumes:
        world.barrier()
        found["copy is the same"] = tensors_in(folder) == tensors_in(copy_of(folder))
        engine = start_engine(case, world, seed=99)
        engine.load_shards(folder)
        found["resumed"] = train(engine, world, range(SAVED_AT, len(RATES)), None)
        engine.close()
    if case.resumes and case.stage > 0:
        engine = start_engine(case, world, seed=98)
        engine.load_resharded(folder, ranks=world.world_size)
        found["resharded"] = train(engine, world, range(SAVED_AT, len(RATES)), None)
        engine.close()
    return found


def look_without_training(case: Case, world: World) -> dict[str, Any]:
    """Validate and predict between the micro-batches of a model with dropout."""
    engine = start_engine(case, world)
    ids = sequences()[0, 0, world.rank]
    inputs, labels = ids[:, :-1], ids[:, 1:]
    validations, passes = [], []
    for _ in range(2):
        passes.append(engine.accumulate(inputs, labels).item())
        validations.append(engine.validation_loss(inputs, labels).item())
    predicted = engine.next_token_logits(inputs)
    with engine.weights_gathered():
        held = [engine.next_token_logits(inputs) for _ in range(2)]
    validations.append(engine.validation_loss(inputs, labels).item())
    engine.update(1e-3)
    plain = build(case.family).eval()
    with torch.no_grad():
        wanted, loss = plain.logits(inputs)[:, -1], plain(inputs, labels).item()
    engine.close()
    return {
        "passes": passes,
        "validations": validations,
        "plain": loss,
        "furthest logit": (predicted - wanted).abs().max().item(),
        "held alike": all(torch.equal(predicted, again) for again in held),
    }


def start_from_weights(case: Case, world: World) -> dict[str, Any]:
    """Load weights into an engine of other random ones, and look at its float32 masters."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = build(case.family).eval()
    wanted = dict(model.named_parameters())
    engine = start_engine(case, world, seed=99)

    def fill(target: torch.Tensor, name: str, start: int) -> None:
        target.copy_(wanted[name].detach().flatten()[start : start + target.numel()])

    engine.load_weights(fill)
    halves, exact = (
        [weight for group in getattr(engine._engine.optimizer, name, []) for weight in group]
        for name in ("fp16_groups", "fp32_groups")
    )  # of stage 0 in 16 bits
    masters = {id(half): master for half, master in zip(halves, exact, strict=case.stage == 0)}
    names = dict(engine._engine.module.named_parameters())
    is_exact = all(
        torch.equal(
            masters.get(id(weight), weight)
            if case.stage == 0
            else safe_get_full_fp32_param(weight),
            wanted[name],
        )
        for name, weight in names.items()
    )
    ids = sequences()[0, 0, world.rank]
    loss = engine.validation_loss(ids[:, :-1], ids[:, 1:]).item()
    with torch.no_grad():
        plain = model(ids[:, :-1], ids[:, 1:]).item()
    engine.close()
    return {"exact": is_exact, "loss": loss, "plain": plain}


def refuse_what_is_not_finite(case: Case, world: World) -> dict[str, Any]:
    """Make a step, then one with an infinite loss of finite gradient on rank 1, then a good one."""
    engine = start_engine(case, world)
    seen = sequences()[0, 0, 0]  # the same on every rank

    def validate() -> float:
        return engine.validation_loss(seen[:, :-1], seen[:, 1:]).item()

    made, losses = [], [validate()]
    for step in range(3):
        spoils = step == 1 and world.rank == 1
        for accumulated in sequences()[step]:
            ids = accumulated[world.rank]
            if spoils:
                hook = engine._engine.module.register_forward_hook(
                    lambda module, inputs, loss: loss + math.inf
                )
            engine.accumulate(ids[:, :-1], ids[:, 1:])
            if spoils:
                hook.remove()
                spoils = False
        made.append(engine.update(1e-2))
        losses.append(validate())
    engine.close()
    return {"made": world.gather([verdict.was_finite() for verdict in made]), "losses": losses}


def skip_a_spike(case: Case, world: World) -> dict[str, Any]:
    """Make steps 0, 1 and 2, of which 1 is skipped; then 0 and 2 alone in a new engine."""
    found: dict[str, Any] = {}
    for steps in ((0, 1, 2), (0, 2)):
        engine = start_engine(case, world)
        seen, losses, outcomes = sequences()[0, 0, 0], [], []
        for step in steps:
            limits = Limits(loss=0.0 if step == 1 else math.inf, skips=True)
            each = [
                engine.accumulate(ids[world.rank, :, :-1], ids[world.rank, :, 1:])
                for ids in sequences()[step]
            ]
            outcome = engine.update(1e-2, Judge(torch.stack(each).mean(), limits))
            assert outcome.was_finite()
            outcomes.append(world.gather(outcome.figures()))
            losses.append(engine.validation_loss(seen[:, :-1], seen[:, 1:]).item())
        found |= {"can skip": engine.can_skip, f"{len(steps)} steps": losses}
        if len(steps) == 3:
            found |= {"figures": outcomes[1], "norm": engine.gradient_norm()}
        engine.close()
    return found


def save_on_a_failing_disk(world: World, scratch: Path) -> dict[str, Any]:
    """Save with a full disk on rank 1, and once more with room."""
    engine = start_engine(Case(3), world)
    write = state_files.save_hashed

    def full_disk(content: object, path: Path) -> state_files.WrittenFile:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    if world.rank == 1:
        state_files.save_hashed = full_disk
    found = {}
    for attempt in ("full", "good"):
        folder = scratch / attempt
        if world.is_rank_0:
            (folder / "ranks").mkdir(parents=True)
        world.barrier()
        written = engine.save_shards(folder)
        found[attempt] = {
            "files": sorted(str(file.path.relative_to(folder)) for file in written.files),
            "errors": [error.errno for error in written.errors],
            "sizes_are_true": all(f.path.stat().st_size == f.size for f in written.files),
        }
        state_files.save_hashed = write
    engine.close()
    return found


def measure(world: World) -> dict[str, Any]:
    folder = Path.cwd()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    found: dict[str, Any] = {case.name: run(case, world, folder) for case in CASES}
    for case in LOOKING:
        found[f"look {case.name}"] = look_without_training(case, world)
    for case in STARTING:
        found[f"start {case.name}"] = start_from_weights(case, world)
    for case in REFUSING:
        found[f"refuse {case.name}"] = refuse_what_is_not_finite(case, world)
        found[f"skip {case.name}"] = skip_a_spike(case, world)
    return found | {"failing disk": world.gather(save_on_a_failing_disk(world, folder))}
