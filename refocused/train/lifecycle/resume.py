"""Start from scratch or from a checkpoint, and go back to one before a spike."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.import_checkpoint import (
    adopt,
    find_elsewhere,
    find_in_run,
    is_imported,
    own_request,
    require_trust,
    select_elsewhere,
)
from refocused.checkpoints.resume.resume_selection import (
    OR_START,
    Selection,
    decide_together,
    list_checkpoints,
    newest,
    present_branch,
    select_checkpoint,
)
from refocused.checkpoints.step.checkpoint_directory import (
    Checkpoint,
    read_checkpoint,
    recorded_branch,
)
from refocused.checkpoints.step.checkpoint_manifest import Origin
from refocused.engine.resharding import FillWeights
from refocused.engine.schedule import rate_change, saved_plan
from refocused.evaluate.origin import StoredModel, find_model, kept_tokenizer, match, open_model
from refocused.metrics.jsonl import read_json
from refocused.metrics.trackers import TrackedRun, start_tracking
from refocused.models.causal_lm import DEFAULT_INITIALIZER_RANGE, untrained_loss
from refocused.system.errors import (
    CheckpointError,
    CheckpointUnavailableError,
    ConfigError,
    ExitCode,
    TrainingError,
)
from refocused.system.world import World
from refocused.tokenizers.encoders import TOKENIZER_CONFIG
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE
from refocused.train.step.loop import Trainer, train
from refocused.train.step.reporter import TRACKERS_END_S
from refocused.train.step.spikes import SHORT, SpikeError
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason

if TYPE_CHECKING:
    from refocused.config.load_run import LoadedRun
    from refocused.config.run_config import RunConfig
    from refocused.train.lifecycle.trainer import Request

logger = logging.getLogger(__name__)

FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1 of the formula


def catalog_of(config: RunConfig, request: Request, run: str | None = None) -> Catalog:
    """List the checkpoints of the run, or of another `run` in the same place, local and remote."""
    run, mirror = run or config.run.name, config.checkpoint.mirror
    checkpoints = Path(config.run.directory) / run / "checkpoints"
    if mirror is None:
        return Catalog(checkpoints)
    if "://" not in mirror:
        with contextlib.suppress(OSError):  # listing it reports that it is missing
            Path(mirror).expanduser().mkdir(parents=True, exist_ok=True)
    return Catalog(checkpoints, request.open_bucket(mirror), prefix_of(run))


def require_checkpoint(config: RunConfig, request: Request) -> None:
    """Raise before a mistyped run gets a folder: CheckpointError if it has none to resume from."""
    is_free = request.resume in ("auto", "none", OR_START) or request.parent
    if not (is_free or (Path(config.run.directory) / config.run.name / "logs").exists()):
        catalog = catalog_of(config, request)
        if (name := own_request(request.resume, catalog)) is not None:
            catalog.resolve(name)


def select(config: RunConfig, request: Request, world: World) -> Selection:
    """Find, fetch and verify the requested checkpoint; all ranks call, and raise if it is bad."""
    folder = Path(config.run.directory) / config.run.name

    def decide(catalog: Catalog) -> Selection:
        trusted = functools.partial(
            require_trust, run=request.parent or folder.name, trusted=request.trusts_others
        )
        name = None if request.parent else own_request(request.resume, catalog)
        if name is not None:
            selected = select_checkpoint(catalog, name)
            if selected.checkpoint is not None:
                trusted(selected.checkpoint.manifest, where=str(selected.checkpoint.path))
            return selected
        if world.storage_ranks > 1:
            raise CheckpointError(
                f"--resume {request.resume}: machines that keep the run's files each on its own "
                "disk resume from this run's steps alone. Set run.directory to a folder on a disk "
                "that all machines share, or copy that step to this run's place in "
                "checkpoint.mirror first."
            )
        if request.parent is None:
            source = find_elsewhere(request.resume, request.open_bucket)
        else:
            # Refuse `--as NAME` for a run that has begun, here or in the mirror.
            file = folder / "state.json"
            state = read_json(file) or {}
            only_starts = "phase" in state and "run_id" not in state  # this start's own notice
            if catalog.entries() or (file.exists() and not only_starts):
                raise CheckpointError(
                    f"--as {folder.name}: the run {folder.name} exists in {folder} or in the "
                    "mirror. Choose another name. To continue that run, give --run "
                    f"{folder.name} in place of --resume and --as."
                )
            parent = catalog_of(config, request, request.parent)
            source = find_in_run(request.resume, parent, request.open_bucket)
        trusted(source.manifest, where=source.where)
        return select_elsewhere(source, catalog)

    selected = decide_together(world, lambda: catalog_of(config, request), decide)
    if selected.checkpoint is None:
        return selected
    path = selected.checkpoint.path  # each machine may hold its own part there
    return dataclasses.replace(
        selected, checkpoint=world.on_all_ranks(lambda: read_checkpoint(path))
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The model that a run starts from, or started from before a resume."""

    origin: Origin | None = None  # None: random weights
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # the model's files
    fill: FillWeights | None = None  # reads the weights; None on a resume
    new_ids: range = range(0)  # of the vocabulary, which the model does not have
    cut_ids: range = range(0)  # of the model, which the vocabulary does not have


def find_start(
    loaded: LoadedRun, request: Request, world: World, resumed: Checkpoint | None
) -> Start:
    """Find and match the model of `model.start_from`, if it is read; all ranks raise alike."""
    config, shape = loaded.config, loaded.shape
    model, address = config.model, config.model.start_from
    if resumed is not None:
        if address is not None and world.is_rank_0:
            logger.info("  origin   not read: the run resumes %s", resumed.path.name)
        origin, names = resumed.manifest.origin, (TOKENIZER_FILE, TOKENIZER_CONFIG)
        saved = [resumed.path / name for name in names if origin]
        return Start(origin, {file.name: file.read_bytes() for file in saved if file.is_file()})
    if address is None:
        return Start()
    runs, trusts = Path(config.run.directory), request.trusts_others
    folder, revision = world.on_storage_ranks(
        lambda: find_model(address, runs=runs, open_url=request.open_bucket, trusts_pickles=trusts)
    )[world.storage_rank]
    assert folder is not None  # it is fetched

    def open_and_match() -> tuple[StoredModel, FillWeights]:
        stored, resizes = open_model(folder, trusts_pickles=trusts), bool(model.resize_vocabulary)
        return stored, match(stored, shape, where=address, preset=model.preset, resizes=resizes)

    stored, fill = world.on_all_ranks(open_and_match)
    stored_ids = stored.settings["vocab_size"]
    tokenizer, fingerprint = world.on_rank_0(
        lambda: (kept_tokenizer(folder, config.data, shape.vocabulary), stored.fingerprint())
    )
    origin = Origin(address=address, revision=revision, weights=fingerprint)
    new_ids, cut_ids = range(stored_ids, shape.vocabulary), range(shape.vocabulary, stored_ids)
    return Start(origin, tokenizer, fill, new_ids, cut_ids)


def start_or_resume(trainer: Trainer, selected: Selection, start: Start) -> TrainState:
    """Return the state that training starts from, the engine to match; all ranks raise alike."""
    step, steps, reporter = selected.checkpoint, trainer.total_steps, trainer.reporter
    if step is None:
        if start.fill is None or start.origin is None:
            weights = f"untrained loss {check_first_loss(trainer):.4f}"
        else:
            trainer.engine.load_weights(start.fill)
            loss = loss_on_random_tokens(trainer, ids=trainer.shape.vocabulary)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"The weights of {start.origin.address} have a loss of {loss}."
                ).agreed()
            new, cut, changed = start.new_ids, start.cut_ids, ""
            if new:
                changed = f", ids {new[0]:,} to {new[-1]:,} untrained"
            if cut:
                changed = f", its ids {cut[0]:,} to {cut[-1]:,} cut"
            weights = f"weights of {start.origin}{changed}, loss {loss:.4f} on random tokens"
        reporter.begin(TrainState())
        reporter.event("start", f"  start    from step 0, {weights}")
        return TrainState()
    if step.step > steps:
        raise ConfigError(
            f"{step.path.name} is beyond run.steps={steps}. Raise run.steps (or --max-steps), or "
            "resume from an earlier step."
        ).agreed()
    loaded = trainer.saver.load(step)

    def with_rewinds() -> TrainState:
        # `state.json` knows the rewinds of a branch that has no checkpoint of its own yet.
        record = read_json(trainer.folder / "state.json") or {}
        if recorded_branch(trainer.folder) != selected.branch or "left_out" not in record:
            return loaded
        return TrainState.from_record({**loaded.as_record(), "left_out": record["left_out"]})

    state = trainer.world.on_rank_0(with_rewinds)
    trainer.data.loader.leave_out(state.left_out)
    for first, stop in state.left_out:
        text = f"  skip     stream[{first}:{stop}], which a rewind left out"
        reporter.event("left_out", text)
    parent, loss_there = selected.branch.parent, state.validation_loss
    if parent is not None and state.best_step is not None and state.best_step < parent.step:
        # The best of the run that this one started from is no checkpoint of this run.
        is_best = loss_there is not None and state.validation_step == state.step == parent.step
        state = state.with_best(is_present=is_best)
    reporter.begin(state)
    origin = parent if is_imported(step.path) else None
    source = step.path if origin is None else f"branch {origin.branch} of run {origin.run}"
    reporter.event("resume", f"  resume   step {state.step:,} ({source}, verified)")
    saved, now = step.manifest.world_size, trainer.world.world_size
    if saved != now:
        added = f"; {now - saved} new ranks draw their dropout from the seed" if now > saved else ""
        text = f"  ranks    {saved} -> {now}, the states are partitioned again{added}"
        reporter.event("ranks", text)
    saved_rates = saved_plan(step.path / "run.yaml", step.manifest.total_steps)
    if change := rate_change(state.step, saved=saved_rates, now=trainer.rates):
        reporter.event("schedule_warning", change)
    return state


def expected_first_loss(trainer: Trainer) -> tuple[int, float]:
    """Return the rows of the embedding with padding, and the loss of a right initialisation."""
    shape = trainer.shape
    rows = shape.padded_vocabulary(trainer.config.model.vocabulary_multiple)
    model, preset = trainer.config.model, shape.settings.get("initializer_range")
    spread = model.embedding_std if shape.tied else model.head_std
    if spread is None:
        spread = DEFAULT_INITIALIZER_RANGE if preset is None else preset
    return rows, untrained_loss(rows=rows, width=shape.width, initializer_range=spread)


def check_first_loss(trainer: Trainer) -> float:
    """Return the untrained model's loss on random tokens.

    Random, because in real text the next token is often the same again, which a tied head finds
    likely before it has learned anything.

    Raises:
        TrainingError: It is far from the expected one: the weights are initialised wrongly.
    """
    rows, expected = expected_first_loss(trainer)
    loss = loss_on_random_tokens(trainer, ids=rows)
    if not abs(loss - expected) <= FIRST_LOSS_TOLERANCE:
        raise TrainingError(
            f"The untrained model's loss on random tokens is {loss:.3f}; with ln(V) = "
            f"{math.log(rows):.3f} it should be {expected:.3f} within "
            f"{FIRST_LOSS_TOLERANCE}. The weights are not initialised as they should be; nothing "
            "was trained. Check initializer_range in the model's JSON, and model.embedding_std."
        )
    return loss


def loss_on_random_tokens(trainer: Trainer, *, ids: int) -> float:
    """Return the mean over all ranks, for tokens below `ids`."""
    seed = trainer.world.rank // trainer.plan.sequence_parallel
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ids, (1, trainer.plan.sequence_length + 1), generator=generator)
    loss = trainer.engine.validation_loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return trainer.world.total([float(loss)])[0] / trainer.world.world_size


def take_over(trainer: Trainer, selected: Selection, *, parent: str | None) -> None:
    """Take over a checkpoint's losses and its place before training; all ranks raise alike."""
    step, saver = selected.checkpoint, trainer.saver
    saver.set_aside(selected.corrupt)
    if step is None:
        return
    saver.checkpointer.restore_history(step, parent=parent)
    if is_imported(step.path):
        run, branch = trainer.config.run.name, selected.branch
        saver.saved_step = trainer.world.on_rank_0(
            lambda: adopt(step, saver.folder, run=run, branch=branch).step
        )


def train_and_go_back(
    trainer: Trainer, state: TrainState, tracked: TrackedRun
) -> tuple[TrainState, StopReason]:
    """Track and train from a state on, and again from an earlier one after each rewind."""
    reporter, world = trainer.reporter, trainer.world
    while True:
        wandb_id = start_tracking(tracked, world, track=reporter.track, report=reporter.event)
        state = dataclasses.replace(state, wandb_id=wandb_id)
        trainer.meter.end_phase("ready")
        reporter.start(state)
        reporter.write_state(reporter.booked(state), "training")
        try:
            return train(trainer, state)
        except SpikeError as spike:
            state = go_back(trainer, state, spike)
        tracked = dataclasses.replace(tracked, step=state.step, is_automatic=False)


def select_before(catalog: Catalog, step: int) -> Selection:
    """Select the newest usable checkpoint up to a step, and a new branch; raise without one."""
    entries = list_checkpoints(catalog, "latest")
    present = present_branch(catalog, entries)
    earlier = [entry for entry in entries if entry.step <= step]
    checkpoint = newest(catalog, earlier, [], must_exist=True)
    assert checkpoint is not None
    number = max([present.number, *(entry.branch for entry in entries)]) + 1
    return Selection(checkpoint, present.fork(checkpoint.step, number=number))


def go_back(trainer: Trainer, state: TrainState, spike: SpikeError) -> TrainState:
    """Load the newest checkpoint before a spike's sequences in place; all ranks raise alike.

    `state` is one since the last rewind. Raises TrainingError if the run has gone back
    `run.max_rewinds` times, or if there is no such checkpoint.
    """
    first, stop, most = spike.sequences.start, spike.sequences.stop, trainer.config.run.max_rewinds
    if len(state.left_out) >= most:
        raise TrainingError(
            f"{spike}. The run has gone back run.max_rewinds={most} times, and stops. The last "
            "checkpoint is good: resume with a lower optimizer.lr, or with more run.max_rewinds."
        ).agreed()
    world, saver = trainer.world, trainer.saver
    try:
        selected = decide_together(
            world, trainer.catalog, lambda catalog: select_before(catalog, spike.good_step)
        )
    except CheckpointUnavailableError:
        raise
    except CheckpointError as error:
        raise TrainingError(
            f"{spike}. No usable checkpoint of step {spike.good_step:,} or before is left to go "
            f"back to. Start again with 'data.skip=[\"stream[{first}:{stop}]\"]', and a shorter "
            "checkpoint.interval."
        ).agreed() from error
    assert selected.checkpoint is not None  # or an error
    path, branch = selected.checkpoint.path, selected.branch
    left_out = (*state.left_out, (first, stop))
    trainer.reporter.event(
        "rewind_warning",
        f"{spike}. Going back to step {selected.checkpoint.step:,}, on branch {branch.number} "
        f"(rewind {len(left_out)} of {most}). Leaving out stream[{first}:{stop}]: "
        f"{textwrap.shorten(spike.names, **SHORT)}",
        step=spike.step,
        to_step=selected.checkpoint.step,
        branch=branch.number,
        sequences=[first, stop],
        names=spike.names,
    )
    trainer.reporter.end_tracking(ExitCode.OK, limit_seconds=TRACKERS_END_S)
    trainer.meter.lap("step", continued=True)
    trainer.reporter.go_back(dataclasses.replace(state, step=spike.step))
    loaded = saver.load(world.on_all_ranks(lambda: read_checkpoint(path)))
    saver.checkpointer.branch = branch
    saver.mirror.start(branch)
    if trainer.stop.lease is not None and world.is_rank_0:
        trainer.stop.lease.lead(saver.head)
    trainer.data.loader.leave_out(left_out)
    return dataclasses.replace(loaded, left_out=left_out, wandb_id=state.wandb_id)
