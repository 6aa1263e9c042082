"""A whole run: builds every part, resumes, trains, finishes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path

from refocused.checkpoints.step.step_directory import read_step
from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.load_run import LoadedRun, render_run
from refocused.config.run_config import RunConfig
from refocused.estimate.precision import with_dtype
from refocused.evaluate.final_model import prepare_final_model
from refocused.metrics.trackers import TrackedRun, start_tracking
from refocused.monitor.sampler.start_sampler import start_sampling
from refocused.system import logs
from refocused.system.errors import ConfigError, ExitCode, RefocusedError
from refocused.system.world import World
from refocused.train.lifecycle import banner, shutdown
from refocused.train.lifecycle.build_run import (
    assemble_catalog,
    assemble_data,
    assemble_engine,
    assemble_parts,
)
from refocused.train.lifecycle.job import Job, Plan, Request, settle
from refocused.train.lifecycle.launch_session import ENDING
from refocused.train.lifecycle.open_data import DataParts
from refocused.train.lifecycle.resume import (
    CannotResumeError,
    Chosen,
    choose,
    in_place_of,
    own,
    start_or_resume,
)
from refocused.train.lifecycle.run_folder import (
    claim_run,
    find_storage_ranks,
    require_one_mirror,
    writing,
)
from refocused.train.lifecycle.session import Session
from refocused.train.step.guards import explaining_lack_of_memory, fetch_together
from refocused.train.step.loop import Outcome, train
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest, budget_limit, time_limit

logger = logging.getLogger(__name__)


def run(loaded: LoadedRun, request: Request, world: World, session: Session) -> ExitCode:
    """Carry out a run on this rank; all ranks call it alike.

    Raises:
        RefocusedError: On every rank alike, where the run cannot start or go on, or was asked to
            stop before it trained.
    """
    while True:
        job, stop = _open(loaded, request, world, session)
        try:
            return _carry_out(job, loaded, stop, session)
        except CannotResumeError as error:
            if not request.or_start:
                raise
            job = dataclasses.replace(job, loaded=loaded)
            loaded, request = in_place_of(job, error), dataclasses.replace(request, resume="auto")
        logs.start_screen(world.rank)  # no more lines into the files of the other run


def _open(
    loaded: LoadedRun, request: Request, world: World, session: Session
) -> tuple[Job, StopRequest]:
    """Settle what is done, and take the run's folder."""
    world.on_all_ranks(lambda: _agree_on_configuration(loaded, world))
    loaded, planned, plan = _planned(loaded, request, world)
    config = loaded.config
    folder = Path(config.run.directory) / config.run.name
    if not request.dry_run:
        world.on_all_ranks(lambda: _open_folder(folder, world))
    world = find_storage_ranks(folder, world)
    require_one_mirror(config.checkpoint.mirror, world)
    session.presence.tell(run=str(folder))
    if not request.dry_run:
        world.on_storage_ranks(lambda: _claim(folder))
    stop = StopRequest(
        world,
        stop_file=None if request.dry_run else folder / "STOP",  # that of the run beside it
        signalled=lambda: session.signals.asked,
        orphaned=lambda: session.ancestors.gone,
    )
    return Job(loaded, request, planned, plan, world, folder), stop


def _planned(
    loaded: LoadedRun, request: Request, world: World
) -> tuple[LoadedRun, Plan, BatchPlan]:
    """Decide everything that the run file leaves open."""
    loaded, planned = settle(loaded, world, open_source=request.open_bucket)
    config = loaded.config
    plan = world.on_all_ranks(
        lambda: plan_batch(
            config.batch, world_size=world.world_size, sequence_length=config.model.sequence_length
        )
    )
    return loaded, planned, plan


def _carry_out(job: Job, given: LoadedRun, stop: StopRequest, session: Session) -> ExitCode:
    """Build every part, resume, train, finish; `given` is the run before it was planned."""
    world = job.world
    world.on_rank_0(lambda: _say_opening(job))
    stop.leave_if_asked()
    chosen = choose(job)
    job = _in_saved_precision(job, given, chosen)
    stop.leave_if_asked()
    data = world.on_all_ranks(lambda: assemble_data(job))
    with contextlib.closing(data.cache), explaining_lack_of_memory(job.plan, world=world):
        world.on_rank_0(lambda: _say_data(job, data))
        stop.leave_if_asked()
        parts = assemble_parts(
            job,
            data,
            assemble_engine(job),
            branch=chosen.branch,
            began_seconds=session.rank_began_seconds,
        )
        stop.leave_if_asked()
        state = start_or_resume(job, parts, chosen)
        stop.leave_if_asked()
        if job.request.dry_run:
            if not _read_first_step(parts, state, stop):
                return stop.agreed().exit_code
            world.on_storage_ranks(lambda: _write_to_mirror(job))
            parts.reporter.event("dry_run", "done  dry run: everything is in place, no step taken")
            return ExitCode.OK
        own(job, parts, chosen)
        _keep_to_limits(job.loaded.config, parts, stop, session)
        session.presence.tell(training=True)
        parts.reporter.add_to_state(data.cache.progress)
        session.signals.notices = session.training_notices
        return _train_and_finish(job, parts, state, stop, session)


def _in_saved_precision(job: Job, given: LoadedRun, chosen: Chosen) -> Job:
    """Plan again in the checkpoint's precision, where `precision.dtype: auto` chose another one.

    A resume on other hardware must not change the precision of a run.
    """
    path = chosen.path
    if path is None or given.config.precision.dtype != "auto":
        return job
    manifest = job.world.on_all_ranks(lambda: read_step(path)).manifest
    if manifest.dtype == job.loaded.config.precision.dtype:
        return job
    kept = job.world.on_all_ranks(lambda: with_dtype(given, manifest.dtype))
    loaded, planned, plan = _planned(kept, job.request, job.world)
    job = dataclasses.replace(job, loaded=loaded, planned=planned, plan=plan)
    if job.world.is_rank_0:
        logger.info(
            "  dtype    %s, as %s was saved; precision.dtype=%s --allow-change precision.dtype "
            "would change it",
            manifest.dtype,
            manifest.name,
            planned.native.dtype,
        )
        for line in banner.memory_lines(
            planned, precision=loaded.config.precision, world=job.world
        ):
            logger.info("%s", line)
    return job


def _keep_to_limits(config: RunConfig, parts: Parts, stop: StopRequest, session: Session) -> None:
    """Let the run's limits of time and money end it."""
    hours, budget = config.run.time_limit_hours, config.cost.budget_usd
    if hours is not None:
        stop.obey(time_limit(hours, began_seconds=session.began_seconds, clock=time.monotonic))
    if budget is not None:
        stop.obey(
            budget_limit(
                budget,
                spent_usd=parts.reporter.spent_usd,
                warn=lambda text: parts.reporter.event("budget_warning", text),
            )
        )


def _open_folder(folder: Path, world: World) -> None:
    """Make the run's folder and log into it."""
    with writing(folder):
        logs.start_files(folder / "logs", world.rank)


def _claim(folder: Path) -> None:
    """Be the one that trains the run; an earlier wish to stop it is forgotten."""
    with writing(folder):
        claim_run(folder)
        (folder / "STOP").unlink(missing_ok=True)


def _say_opening(job: Job) -> None:
    loaded, config = job.loaded, job.loaded.config
    first = banner.lines(
        name=config.run.name,
        shape=loaded.shape,
        vocabulary_multiple=config.model.vocabulary_multiple,
        plan=job.plan,
        planned=job.planned,
        precision=config.precision,
        changes=loaded.changes,
        world=job.world,
        digest=_digest(loaded)[:4],
    )
    expected = banner.expected_lines(loaded, job.planned, world=job.world)
    for line in (*first, *expected):
        logger.info("%s", line)


def _say_data(job: Job, data: DataParts) -> None:
    config = job.loaded.config
    for line in banner.data_lines(data, config.data, config.run.steps, job.plan):
        logger.info("%s", line)


def _agree_on_configuration(loaded: LoadedRun, world: World) -> None:
    """Refuse ranks that were given different settings: they would train different models."""
    digests = world.gather(_digest(loaded))
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ConfigError(
            f"rank {odd[0]} was started with other settings than rank 0 ({loaded.file}). Give "
            "every machine the same run file, model file and command line."
        )


def _digest(loaded: LoadedRun) -> str:
    """Return a SHA-256 over everything that decides what is trained."""
    parts = [render_run(loaded.config), dict(loaded.shape.settings), loaded.fragment]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_first_step(parts: Parts, state: TrainState, stop: StopRequest) -> bool:
    """Fetch and read the batches that training would begin with; False when asked to stop."""
    with contextlib.closing(parts.loader.batches_from(state.position)) as batches:
        return fetch_together(parts.world, batches.next_step, stop) is not None


def _write_to_mirror(job: Job) -> None:
    """Find out whether the mirror may be written, before hours depend on it."""
    remote = assemble_catalog(job).remote
    if remote is not None:
        remote.introduce()


def _train_and_finish(
    job: Job, parts: Parts, state: TrainState, stop: StopRequest, session: Session
) -> ExitCode:
    """Train, drain the mirror, say how it ended."""
    config = job.loaded.config
    job.world.on_storage_ranks(lambda: _begin(job.folder, render_run(config)))
    parts.saver.begin()
    start_sampling(
        job.folder, job.world, report=parts.reporter.event, log=config.log, cost=config.cost
    )
    tracked = TrackedRun(
        job.folder,
        name=config.run.name,
        step=state.step,
        settings={
            **config.model_dump(mode="json"),
            "shape": dict(job.loaded.shape.settings),
            "ranks": job.world.world_size,
            "device": job.world.device_name,
        },
        tracking=config.tracking,
        wandb_id=state.wandb_id,
        is_automatic=job.request.resume in ("auto", "latest"),
    )
    wandb_id = start_tracking(
        tracked, job.world, track=parts.reporter.track, report=parts.reporter.event
    )
    state = dataclasses.replace(state, wandb_id=wandb_id)
    parts.reporter.start(state)
    parts.reporter.write_state(parts.reporter.booked(state), "training")
    try:
        outcome = train(parts, state, stop)
        session.signals.notices = ENDING
        session.presence.tell(reason=outcome.stopped.name)
        return _finish(job, parts, outcome, stop)
    except BaseException as error:
        code = error.exit_code if isinstance(error, RefocusedError) else ExitCode.FAILED
        parts.reporter.write_failure(state, error, code)
        raise
    finally:
        if parts.profiler is not None:
            parts.profiler.close()


def _finish(job: Job, parts: Parts, outcome: Outcome, stop: StopRequest) -> ExitCode:
    """Write the sample, then end the run."""
    config, sample = job.loaded.config, None
    if parts.sampler is not None and not outcome.stopped:
        sample = parts.sampler.write(parts.engine, stopping=stop.agreed)
    return shutdown.finish(
        parts,
        outcome,
        stop,
        sample=sample,
        folder=job.folder,
        settings=config.checkpoint,
        command=job.request.command,
        final_model=prepare_final_model(
            job.folder,
            config.checkpoint,
            world=job.world,
            credentials_file=job.request.credentials_file,
            project=job.request.project,
        ),
        per_hour_usd=config.cost.per_hour_usd,
    )


def _begin(folder: Path, run_yaml: str) -> None:
    """Write the resolved run file."""
    with writing(folder):
        (folder / "run.yaml").write_text(run_yaml)
