"""A whole run: builds every part, resumes, trains, finishes."""

import contextlib
import dataclasses
import itertools
import logging
import socket
import time
from pathlib import Path

from refocused.checkpoints.resume.resume_selection import OR_START
from refocused.checkpoints.step.checkpoint_directory import Checkpoint
from refocused.config.load_run import LoadedRun, render_run
from refocused.estimate.memory_plan import with_dtype
from refocused.evaluate.final_model import prepare_final_model
from refocused.metrics.jsonl import number, read_json
from refocused.metrics.run_time import require_budget
from refocused.metrics.trackers import TrackedRun
from refocused.monitor.sampler.start_sampler import start_sampling
from refocused.system import logs
from refocused.system.errors import ConfigError, ExitCode, RefocusedError
from refocused.system.spot_notice import watch_for_notice
from refocused.system.world import World
from refocused.train.lifecycle import banner, shutdown
from refocused.train.lifecycle.build_run import assemble_data, assemble_parts
from refocused.train.lifecycle.job import Job, Request, settle, take_lease
from refocused.train.lifecycle.launch_session import ENDING
from refocused.train.lifecycle.model_and_engine import Built, assemble_engine, importing_model_code
from refocused.train.lifecycle.resume import (
    choose,
    find_start,
    own,
    require_checkpoint,
    start_or_resume,
)
from refocused.train.lifecycle.rewind import train_and_go_back
from refocused.train.lifecycle.run_folder import (
    StartNotice,
    claim_run,
    find_storage_ranks,
    has_newer_stop,
    require_one_mirror,
    writing,
)
from refocused.train.lifecycle.session import Session, exit_as_ordered
from refocused.train.step.guards import explaining_lack_of_memory, fetch_together
from refocused.train.step.loop import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest, budget_limit, time_limit

logger = logging.getLogger(__name__)
CLOCK_SECONDS = 300.0  # S3 refuses requests of a clock that is 15 minutes off


def run(loaded: LoadedRun, request: Request, world: World, session: Session) -> ExitCode:
    """Carry out a run on this rank; all ranks call it alike.

    Raises:
        RefocusedError: On every rank alike, if the run cannot start or continue, or was asked to
            stop before it trained.
    """
    job, stop = _open(loaded, request, world, session)
    session.start_up.end("plan")
    is_shown = world.is_rank_0 and not request.dry_run
    notice = StartNotice(job.folder if is_shown else None, is_claimed=True)
    try:
        return _carry_out(job, loaded, stop, session, notice)
    finally:
        notice.withdraw()
        if job.lease is not None and world.is_rank_0:
            job.lease.close()


def _open(
    loaded: LoadedRun, request: Request, world: World, session: Session
) -> tuple[Job, StopRequest]:
    """Plan the run, and open and claim its folder."""
    world.on_all_ranks(lambda: _agree_on_configuration(loaded, world))
    config = loaded.config
    folder = Path(config.run.directory) / config.run.name
    if not request.dry_run:
        world.on_rank_0(lambda: require_budget(folder, config.cost))
    loaded, planned = settle(loaded, world, open_source=request.open_bucket)
    config = loaded.config

    def open_folder() -> None:
        with writing(folder):
            logs.start_files(folder / "logs", world.rank)

    def claim() -> None:
        with writing(folder):
            claim_run(folder)
            if not has_newer_stop(folder, session.began_seconds):
                (folder / "STOP").unlink(missing_ok=True)

    if not request.dry_run:
        world.on_rank_0(lambda: require_checkpoint(Job(loaded, request, planned, world, folder)))
        world.on_all_ranks(open_folder)
    world = find_storage_ranks(folder, world)
    require_one_mirror(config.checkpoint.mirror, world)
    session.presence.report(run=str(folder))
    if not request.dry_run:
        world.on_storage_ranks(claim)
    # A dry run leaves the file to the run beside it.
    stop_file = None if request.dry_run else folder / "STOP"
    notice = watch_for_notice(config.run.spot_notice) if world.is_local_rank_0 else None
    stop = session.stop_request(world, stop_file=stop_file, notice=notice)
    job = Job(loaded, request, planned, world, folder)
    if not request.dry_run:
        stop.lease = take_lease(
            job, cancelled=lambda: stop.signalled() or (folder / "STOP").exists()
        )
    return dataclasses.replace(job, lease=stop.lease), stop


def _agree_on_configuration(loaded: LoadedRun, world: World) -> None:
    """Refuse ranks with other settings, which would train other models, or with another clock."""
    own = banner.settings_lines(loaded)
    pairs = itertools.zip_longest(own, world.broadcast(own), fillvalue="nothing")
    others = (f"{mine.strip()}, not {first.strip()}" for mine, first in pairs if mine != first)
    other = next(others, "")
    world.barrier()  # so that all read their clocks at one time
    ranks = world.gather((socket.gethostname(), time.time(), other))
    for rank, (host, clock, other) in enumerate(ranks):
        if other:
            raise ConfigError(
                f"rank {rank} was started with other settings than rank 0 ({loaded.file}): {host} "
                f"has {other}. Give every machine the same run file, model file and command line."
            )
        ahead = clock - ranks[0][1]
        if abs(ahead) > CLOCK_SECONDS:
            raise ConfigError(
                f"The clock of {host} is {abs(ahead) / 60:.0f} minutes "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {ranks[0][0]}. Buckets refuse "
                "requests of a wrong clock: set it (timedatectl set-ntp true)."
            )


def _carry_out(
    job: Job, given: LoadedRun, stop: StopRequest, session: Session, notice: StartNotice
) -> ExitCode:
    """Build every part, resume, train, finish; `given` is the run before it was planned."""
    world = job.world

    def enter(phase: str) -> None:
        stop.leave_if_asked()
        notice.show(phase)

    world.on_rank_0(lambda: _log(banner.opening_lines(job.loaded, job.planned, world)))
    enter("reads the checkpoint")
    imports = importing_model_code()
    chosen = choose(job)
    if (saved := chosen.step) is not None and not job.request.dry_run:
        usd = number(read_json(saved.path / "trainer.json") or {}, "cost_usd")
        done, cost = saved.step >= given.config.run.steps, given.config.cost
        world.on_rank_0(lambda: require_budget(job.folder, cost, is_done=done, saved_usd=usd))
    job = _in_saved_precision(job, given, chosen.step)
    config, start = job.loaded.config, find_start(job, chosen)
    enter("opens the data")
    session.start_up.end("checkpoint")
    data = world.on_all_ranks(lambda: assemble_data(job))
    with contextlib.closing(data.cache), explaining_lack_of_memory(job.plan, world=world):
        world.on_rank_0(lambda: _log(banner.data_lines(data, config, job.plan)))
        enter("builds the model and the engine")
        session.start_up.end("data")
        imports.join()
        if not job.request.dry_run:
            start_sampling(
                job.folder,
                world,
                log=config.log,
                cost=config.cost,
                hang_minutes=config.run.hang_minutes,
            )
        built = assemble_engine(
            job.loaded,
            job.planned,
            world,
            counts_padding=start.origin is None,
            replaces_weights=not (start.fill is None and chosen.step is None),
            end_phase=session.start_up.end,
        )
        parts = assemble_parts(
            job,
            data,
            built,
            branch=chosen.branch,
            start=start,
            began_seconds=session.start_up.began_seconds,
            command_began_seconds=session.began_seconds,
        )
        enter("loads the state")
        session.start_up.end("ready")
        state = start_or_resume(job, parts, chosen, start)
        enter("begins to train")
        session.start_up.end("load")
        if job.request.dry_run:
            return _end_dry_run(job, built, parts, state, stop)
        own(job, parts, chosen)
        if (hours := config.run.time_limit_hours) is not None:
            stop.limits.append(time_limit(hours, began_seconds=session.began_seconds))
        if (budget := config.cost.budget_usd) is not None:
            stop.limits.append(
                budget_limit(
                    budget,
                    spent_usd=lambda: parts.reporter.booked(TrainState()).cost_usd or 0.0,
                    warn=lambda text: parts.reporter.event("budget_warning", text),
                )
            )
        session.presence.report(training=True)
        session.signals.notices = session.training_notices
        return _train_and_finish(job, parts, state, stop, session)


def _in_saved_precision(job: Job, given: LoadedRun, saved: Checkpoint | None) -> Job:
    """Plan again in the checkpoint's precision if `precision.dtype: auto` chose another one.

    A resume on other hardware must not change the precision of a run.
    """
    if saved is None or given.config.precision.dtype != "auto":
        return job
    manifest, world = saved.manifest, job.world
    if manifest.dtype == job.loaded.config.precision.dtype:
        return job
    kept = world.on_all_ranks(lambda: with_dtype(given, manifest.dtype))
    loaded, planned = settle(kept, world, open_source=job.request.open_bucket)
    if world.is_rank_0:
        dtype_line = (
            f"  dtype    {manifest.dtype}, as {manifest.name} was saved; precision.dtype="
            f"{planned.native.dtype} --allow-change precision.dtype would change it"
        )
        memory = banner.memory_lines(planned, precision=loaded.config.precision, world=world)
        _log([dtype_line, *memory])
    return dataclasses.replace(job, loaded=loaded, planned=planned)


def _end_dry_run(
    job: Job, built: Built, parts: Parts, state: TrainState, stop: StopRequest
) -> ExitCode:
    """Read the first step's batches, and check that the mirror may be written."""
    with contextlib.closing(parts.loader.batches_from(state.position, made=state.step)) as batches:
        micro_batches = fetch_together(parts.world, batches.next_step, stop)
        if micro_batches is None:
            return stop.agreed().exit_code
        if job.request.at_the_end is not None:
            job.request.at_the_end(job, built, parts, state, micro_batches, batches.position)
            return ExitCode.OK  # the doctor has tried the mirror

    def write_to_mirror() -> None:
        remote = job.catalog().remote
        if remote is not None:
            remote.write_readme()

    job.world.on_storage_ranks(write_to_mirror)
    parts.reporter.event("dry_run", "done  dry run: everything is in place, no step taken")
    return ExitCode.OK


def _train_and_finish(
    job: Job, parts: Parts, state: TrainState, stop: StopRequest, session: Session
) -> ExitCode:
    config, reporter, resume = job.loaded.config, parts.reporter, job.request.resume

    def write_run_file() -> None:
        with writing(job.folder):
            (job.folder / "run.yaml").write_text(render_run(config))

    job.world.on_storage_ranks(write_run_file)
    parts.saver.checkpointer.prepare()
    parts.saver.mirror.start()
    if job.lease is not None:
        job.lease.handed_over = config.checkpoint.mirror is not None
        if job.world.is_rank_0:
            job.lease.lead(parts.saver.head)  # before state.json names the branch
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
        is_automatic=resume in ("auto", "latest") or (resume == OR_START and state.step > 0),
    )
    try:
        outcome = train_and_go_back(job, parts, state, stop, tracked, session.start_up)
        job.world.progress.begin("ending")
        session.signals.notices = ENDING
        session.presence.report(reason=outcome.stopped.name)
        final_model = prepare_final_model(
            job.folder, config.checkpoint, world=job.world, credentials=job.request.credentials
        )
        return shutdown.finish(job, parts, outcome, stop, final_model=final_model)
    except BaseException as error:
        if order := session.progress.ordered():  # it explains the error
            exit_as_ordered(*order, session.presence)
        code = error.exit_code if isinstance(error, RefocusedError) else ExitCode.FAILED
        reporter.write_failure(state, error, code)
        raise
    finally:
        if parts.profiler is not None:
            parts.profiler.close()


def _log(lines: list[str]) -> None:
    for line in lines:
        logger.info("%s", line)
