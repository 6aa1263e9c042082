"""Start from scratch, from a checkpoint of this run, or from one elsewhere."""

import dataclasses
import functools
import logging
import math

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
    select_checkpoint,
)
from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import Origin
from refocused.engine.resharding import FillWeights
from refocused.engine.schedule import rate_change, saved_plan
from refocused.evaluate.origin import StoredModel, find_model, kept_tokenizer, match, open_model
from refocused.metrics.jsonl import read_json
from refocused.system.errors import CheckpointError, ConfigError, TrainingError
from refocused.tokenizers.encoders import TOKENIZER_CONFIG
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE
from refocused.train.lifecycle.job import UNTRAINED, Job, Start
from refocused.train.lifecycle.rewind import leave_out_again
from refocused.train.step.loop import Parts
from refocused.train.step.loss_check import check_first_loss, loss_on_random_tokens
from refocused.train.step.state import TrainState

logger = logging.getLogger(__name__)


def choose(job: Job) -> Selection:
    """Find, fetch and verify the requested checkpoint; all ranks call, and raise if it is bad."""
    chosen = decide_together(job.world, job.catalog, lambda catalog: _choose(job, catalog))
    if chosen.step is None:
        return chosen
    path = chosen.step.path  # each machine may hold its own part there
    return dataclasses.replace(chosen, step=job.world.on_all_ranks(lambda: read_checkpoint(path)))


def require_checkpoint(job: Job) -> None:
    """Raise before a mistyped run gets a folder: CheckpointError if it has none to resume from."""
    request = job.request
    is_free = request.resume in ("auto", "none", OR_START) or request.parent
    if not (is_free or (job.folder / "logs").exists()):
        catalog = job.catalog()
        if (name := own_request(request.resume, catalog)) is not None:
            catalog.resolve(name)


def _choose(job: Job, catalog: Catalog) -> Selection:
    request, run = job.request, job.loaded.config.run.name
    source = request.parent or run
    trusted = functools.partial(require_trust, run=source, trusted=request.trusts_others)
    own_name = None if request.parent else own_request(request.resume, catalog)
    if own_name is not None:
        selected = select_checkpoint(catalog, own_name)
        if selected.step is not None:
            trusted(selected.step.manifest, where=str(selected.step.path))
        return selected
    if job.world.storage_ranks > 1:
        raise CheckpointError(
            f"--resume {request.resume}: machines that keep the run's files each on its own disk "
            "resume from this run's steps alone. Set run.directory to a folder on a disk that all "
            "machines share, or copy that step to this run's place in checkpoint.mirror first."
        )
    if request.parent is None:
        found = find_elsewhere(request.resume, request.open_bucket)
    else:
        _require_new(job, catalog)
        theirs = job.catalog_of(request.parent)
        found = find_in_run(request.resume, theirs, request.open_bucket)
    trusted(found.manifest, where=found.where)
    return select_elsewhere(found, catalog)


def _require_new(job: Job, catalog: Catalog) -> None:
    """Refuse `--as NAME` for a run that has begun, here or in the mirror."""
    name, file = job.folder.name, job.folder / "state.json"
    state = read_json(file) or {}
    has_begun = file.exists() and ("phase" not in state or "run_id" in state)  # not just this start
    if catalog.entries() or has_begun:
        raise CheckpointError(
            f"--as {name}: the run {name} exists in {job.folder} or in the mirror. Choose another "
            f"name. To continue that run, give --run {name} in place of --resume and --as."
        )


def find_start(job: Job, chosen: Selection) -> Start:
    """Find and match the model of `model.start_from`, if it is read; all ranks raise alike."""
    model, world, shape = job.loaded.config.model, job.world, job.loaded.shape
    address = model.start_from
    if chosen.step is not None:
        if address is not None and world.is_rank_0:
            logger.info("  origin   not read: the run resumes %s", chosen.step.path.name)
        origin, names = chosen.step.manifest.origin, (TOKENIZER_FILE, TOKENIZER_CONFIG)
        saved = [chosen.step.path / name for name in names if origin]
        return Start(origin, {file.name: file.read_bytes() for file in saved if file.is_file()})
    if address is None:
        return UNTRAINED
    runs, open_url, trusts = job.folder.parent, job.request.open_bucket, job.request.trusts_others
    folder, revision = world.on_storage_ranks(
        lambda: find_model(address, runs=runs, open_url=open_url, trusts_pickles=trusts)
    )[world.storage_rank]
    assert folder is not None  # it is fetched

    def open_and_match() -> tuple[StoredModel, FillWeights]:
        stored, resizes = open_model(folder, trusts_pickles=trusts), bool(model.resize_vocabulary)
        return stored, match(stored, shape, where=address, preset=model.preset, resizes=resizes)

    stored, fill = world.on_all_ranks(open_and_match)
    data, stored_ids = job.loaded.config.data, stored.settings["vocab_size"]
    tokenizer, fingerprint = world.on_rank_0(
        lambda: (kept_tokenizer(folder, data, shape.vocabulary), stored.fingerprint())
    )
    origin = Origin(address=address, revision=revision, weights=fingerprint)
    new_ids, cut_ids = range(stored_ids, shape.vocabulary), range(shape.vocabulary, stored_ids)
    return Start(origin, tokenizer, fill, new_ids, cut_ids)


def start_or_resume(
    job: Job, parts: Parts, chosen: Selection, start: Start = UNTRAINED
) -> TrainState:
    """Return the state that training starts from, the engine to match; all ranks raise alike."""
    step, steps, report = chosen.step, job.loaded.config.run.steps, parts.reporter.event
    if step is None:
        text = _begin(parts, start)
        parts.reporter.begin(TrainState())
        report("start", f"  start    from step 0, {text}")
        return TrainState()
    if step.step > steps:
        raise ConfigError(
            f"{step.path.name} is beyond run.steps={steps}. Raise run.steps (or --max-steps), or "
            "resume from an earlier step."
        ).agreed()
    state = leave_out_again(job, parts, parts.saver.load(step), chosen.branch)
    parent, own_loss = chosen.branch.parent, state.validation_loss
    if parent is not None and state.best_step is not None and state.best_step < parent.step:
        # The best of the run that this one started from is no checkpoint of this run.
        is_own = own_loss is not None and state.validation_step == state.step == parent.step
        state = dataclasses.replace(
            state, best_loss=own_loss if is_own else None, best_step=state.step if is_own else None
        )
    parts.reporter.begin(state)
    origin = chosen.branch.parent if is_imported(step.path) else None
    place = step.path if origin is None else f"branch {origin.branch} of run {origin.run}"
    report("resume", f"  resume   step {state.step:,} ({place}, verified)")
    saved, now = step.manifest.world_size, job.world.world_size
    if saved != now:
        new = f"; {now - saved} new ranks draw their dropout from the seed" if now > saved else ""
        report("ranks", f"  ranks    {saved} -> {now}, the states are partitioned again{new}")
    saved_rates = saved_plan(step.path / "run.yaml")
    if change := rate_change(state.step, saved=saved_rates, now=parts.rates):
        report("schedule_warning", change)
    return state


def _begin(parts: Parts, start: Start) -> str:
    """Load the weights to start from, if any, and check the first loss; return both in words."""
    if start.fill is None or start.origin is None:
        return f"untrained loss {check_first_loss(parts):.4f}"
    parts.engine.load_weights(start.fill)
    loss, new, cut = loss_on_random_tokens(parts), start.new_ids, start.cut_ids
    if not math.isfinite(loss):
        raise TrainingError(
            f"The weights of {start.origin.address} have a loss of {loss}."
        ).agreed()
    changed = f", ids {new[0]:,} to {new[-1]:,} untrained" if new else ""
    if cut:
        changed = f", its ids {cut[0]:,} to {cut[-1]:,} cut"
    return f"weights of {start.origin}{changed}, loss {loss:.4f} on random tokens"


def own(job: Job, parts: Parts, chosen: Selection) -> None:
    """Take over a checkpoint's losses and its place before training; all ranks raise alike."""
    step, run = chosen.step, job.loaded.config.run.name
    parts.saver.set_aside(chosen.corrupt)
    if step is None:
        return
    parts.saver.checkpointer.restore_history(step, parent=job.request.parent)
    if is_imported(step.path):
        parts.saver.saved_step = job.world.on_rank_0(
            lambda: adopt(step, job.checkpoints, run=run, branch=chosen.branch).step
        )
