"""A whole run: builds every part, resumes, trains, finishes. The only reader of `RunConfig`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from refocused import logs
from refocused.bucket.open import open_bucket
from refocused.checkpoints.catalog import Catalog
from refocused.checkpoints.checkpointer import Checkpointer, RunFacts
from refocused.checkpoints.choice import choose_step
from refocused.checkpoints.mirror import CheckpointMirror
from refocused.checkpoints.mirror_status import MirrorSettings
from refocused.checkpoints.process_identity import identify
from refocused.checkpoints.remote_steps import prefix_of
from refocused.checkpoints.step_directory import read_step
from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.decode import LoadedRun, render_run
from refocused.config.deepspeed import deepspeed_config
from refocused.engine.build import build_engine
from refocused.engine.engine import Engine
from refocused.engine.randomness import seed_everything
from refocused.errors import ConfigError, ExitCode, RefocusedError
from refocused.estimate import flops_per_token, mfu_fraction
from refocused.hardware import gpu_facts
from refocused.models.gpt import build_gpt, counted_parameters
from refocused.monitoring.throughput import Throughput
from refocused.training import ending, opening
from refocused.training.cadence import Cadence
from refocused.training.data import DataParts, build_data
from refocused.training.loop import fetch_together, train
from refocused.training.parts import Parts
from refocused.training.reporter import Reporter, RunFigures
from refocused.training.sample import write_sample
from refocused.training.saver import Saver
from refocused.training.state import TrainState
from refocused.training.stopping import StopRequest
from refocused.training.validation import check_first_loss
from refocused.world import World

logger = logging.getLogger(__name__)

INTERRUPTED = (
    "^C    stopping after this step and saving; the launcher allows 30 s. A STOP file in the run's "
    "folder stops without a limit."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for besides the run file.

    Attributes:
        resume: `auto`, `latest`, `best`, `none`, a step, a name or a path.
        dry_run: Build and check everything, train nothing.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.
    """

    resume: str
    dry_run: bool
    credentials_file: Path | None
    project: str | None


def run(loaded: LoadedRun, request: Request, world: World) -> ExitCode:
    """Carry out a run on this rank; all ranks call it alike.

    Raises:
        RefocusedError: On every rank alike, where the run cannot start or go on.
    """
    world.together(lambda: _agree_on_configuration(loaded, world))
    config = loaded.config
    plan = world.together(
        lambda: plan_batch(
            config.batch, world_size=world.world_size, sequence_length=config.model.sequence_length
        )
    )
    folder = Path(config.run.directory) / config.run.name
    world.together(lambda: _open_folder(folder, world))
    stop = StopRequest(world, stop_file=folder / "STOP", interruption_notice=INTERRUPTED)
    stop.install()
    world.first_does(lambda: _say_opening(loaded, plan, world))
    data = world.together(lambda: _build_data(loaded, request, plan, world))
    try:
        world.first_does(lambda: logger.info("%s", opening.data_line(data, config.run.steps, plan)))
        engine, parameters = _build_engine(loaded, plan, world)
        parts = _build_parts(loaded, request, plan, data, engine, parameters, world, folder)
        state = world.together(lambda: _start_or_resume(loaded, request, parts, folder))
        if request.dry_run:
            _read_first_step(parts, state)
            parts.reporter.event("dry_run", "done  dry run: everything is in place, no step taken")
            return ExitCode.OK
        return _train_and_finish(loaded, parts, state, stop, folder)
    finally:
        data.cache.close()


def _open_folder(folder: Path, world: World) -> None:
    """Make the run's folder and log into it."""
    with _writing(folder):
        logs.start_files(folder / "logs", world.rank)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Name the run's folder when it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The run's folder {folder} cannot be written: {error.strerror}. Make room there, or "
            "set run.directory to a folder on another disk."
        ) from error


def _say_opening(loaded: LoadedRun, plan: BatchPlan, world: World) -> None:
    config = loaded.config
    for line in opening.lines(
        name=config.run.name,
        shape=loaded.shape,
        vocabulary_multiple=config.model.vocabulary_multiple,
        plan=plan,
        zero=config.zero,
        precision=config.precision,
        changes=loaded.changes,
        world=world,
        digest=_digest(loaded)[:4],
    ):
        logger.info("%s", line)


def _build_data(loaded: LoadedRun, request: Request, plan: BatchPlan, world: World) -> DataParts:
    config = loaded.config
    return build_data(
        config.data,
        plan=plan,
        world=world,
        vocabulary=loaded.shape.vocabulary,
        seed=config.run.seed,
        evaluation_windows=config.evaluation.windows,
        credentials_file=request.credentials_file,
        project=request.project,
    )


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


def _build_engine(loaded: LoadedRun, plan: BatchPlan, world: World) -> tuple[Engine, int]:
    """Build the model, alike on every rank, and partition it; also return its parameters."""
    config, shape = loaded.config, loaded.shape
    seed_everything(config.run.seed, rank=0)
    model = build_gpt(
        shape.settings,
        vocabulary=shape.padded_vocabulary(config.model.vocabulary_multiple),
        dropout=config.model.dropout,
        activation_checkpointing=config.model.activation_checkpointing,
        chunk_tokens=config.model.head_chunk_tokens,
    )
    parameters = counted_parameters(model)
    settings = deepspeed_config(
        batch=plan,
        optimizer=config.optimizer,
        precision=config.precision,
        zero=config.zero,
        parameters=parameters,
        fragment=loaded.fragment,
    )
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=config.optimizer,
        precision=config.precision,
        world=world,
    )
    seed_everything(config.run.seed, rank=world.rank)
    return engine, parameters


def _build_parts(
    loaded: LoadedRun,
    request: Request,
    plan: BatchPlan,
    data: DataParts,
    engine: Engine,
    parameters: int,
    world: World,
    folder: Path,
) -> Parts:
    """Bring together what the loop uses."""
    config = loaded.config
    figures = _figures(loaded, plan, world)
    throughput = Throughput(time.monotonic)
    reporter = Reporter(folder, figures=figures, engine=engine, throughput=throughput, world=world)
    checkpoints = folder / "checkpoints"
    saver = Saver(
        Checkpointer(checkpoints, world=world, facts=_facts(loaded, data, parameters)),
        folder=checkpoints,
        engine=engine,
        mirror=_mirror(loaded, request, folder) if world.is_first else None,
        settings=config.checkpoint,
        reporter=reporter,
        throughput=throughput,
        world=world,
        files_done=data.files_done,
    )
    return Parts(
        world=world,
        engine=engine,
        loader=data.loader,
        validation_batches=data.validation_batches,
        plan=plan,
        total_steps=config.run.steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        cadence=figures.cadence,
        throughput=throughput,
        reporter=reporter,
        saver=saver,
        vocabulary_rows=loaded.shape.padded_vocabulary(config.model.vocabulary_multiple),
    )


def _figures(loaded: LoadedRun, plan: BatchPlan, world: World) -> RunFigures:
    """Collect what the reporter computes with."""
    config = loaded.config
    facts = gpu_facts(world.device_name) if world.device_kind == "cuda" else None
    return RunFigures(
        name=config.run.name,
        total_steps=config.run.steps,
        plan=plan,
        optimizer=config.optimizer,
        schedule=config.schedule,
        cadence=Cadence(
            log=config.log.interval,
            validation=config.evaluation.interval,
            checkpoint=config.checkpoint.interval,
        ),
        mfu=functools.partial(
            mfu_fraction,
            flops_per_token=flops_per_token(
                loaded.shape, sequence_length=config.model.sequence_length
            ),
            gpus=world.world_size,
            peak_flops=facts.bf16_flops if facts else None,
        ),
        per_hour_usd=config.cost.per_hour_usd,
    )


def _facts(loaded: LoadedRun, data: DataParts, parameters: int) -> RunFacts:
    """Collect what every checkpoint of the run says alike."""
    config = loaded.config
    return RunFacts(
        run=config.run.name,
        zero_stage=config.zero.stage,
        dtype=config.precision.dtype,
        versions={
            name: importlib.metadata.version(name)
            for name in ("refocused", "torch", "deepspeed", "transformers")
        },
        data_fingerprint=data.manifest.fingerprint,
        data_order=f"seed {config.run.seed}, blocks of {data.order.block_shards} shards, "
        f"{data.order.windows_per_epoch} windows of {config.model.sequence_length} tokens",
        parameters=parameters,
        run_yaml=render_run(config),
        model_json=json.dumps(dict(loaded.shape.settings), indent=1),
    )


def _mirror(loaded: LoadedRun, request: Request, folder: Path) -> CheckpointMirror | None:
    """Prepare the background copy, if the run has one."""
    checkpoint = loaded.config.checkpoint
    if checkpoint.mirror is None:
        return None
    return CheckpointMirror(
        MirrorSettings(
            run=folder,
            bucket=checkpoint.mirror,
            prefix=prefix_of(loaded.config.run.name),
            training=identify(os.getpid()),
            credentials_file=request.credentials_file,
            project=request.project,
            drain_seconds=checkpoint.drain_minutes * 60,
        )
    )


def _start_or_resume(loaded: LoadedRun, request: Request, parts: Parts, folder: Path) -> TrainState:
    """Return the state that training starts from, with the engine to match."""
    config, world = loaded.config, parts.world
    catalog = functools.partial(
        _catalog, config.checkpoint.mirror, config.run.name, request, folder / "checkpoints"
    )
    path = world.first_does(lambda: _chosen_path(catalog(), request.resume))
    if path is None:
        loss = check_first_loss(parts)
        parts.reporter.event("start", f"  start    from step 0, untrained loss {loss:.4f}")
        return TrainState()
    step = world.together(lambda: read_step(path))
    state = parts.saver.load(step)
    if state.step > config.run.steps:
        raise ConfigError(
            f"{step.path.name} is beyond run.steps={config.run.steps}. Raise run.steps (or "
            "--max-steps), or resume from an earlier step."
        )
    parts.reporter.begin(state)
    parts.reporter.event("resume", f"  resume   step {state.step:,} ({step.path}, verified)")
    return state


def _chosen_path(catalog: Catalog, request: str) -> Path | None:
    step = choose_step(catalog, request)
    return None if step is None else step.path


def _catalog(mirror: str | None, name: str, request: Request, checkpoints: Path) -> Catalog:
    """List the run's checkpoints, here and in the mirror."""
    if mirror is None:
        return Catalog(checkpoints)
    if "://" not in mirror:
        with contextlib.suppress(OSError):  # listing it says that it is not there
            Path(mirror).expanduser().mkdir(parents=True, exist_ok=True)
    bucket = open_bucket(mirror, credentials_file=request.credentials_file, project=request.project)
    return Catalog(checkpoints, bucket, prefix_of(name))


def _read_first_step(parts: Parts, state: TrainState) -> None:
    """Fetch and read the batches that training would begin with."""
    with contextlib.closing(parts.loader.batches_from(state.position)) as batches:
        fetch_together(parts, batches)


def _train_and_finish(
    loaded: LoadedRun, parts: Parts, state: TrainState, stop: StopRequest, folder: Path
) -> ExitCode:
    """Train, drain the mirror, say how it ended."""
    config, world = loaded.config, parts.world
    world.first_does(lambda: _begin(folder, render_run(config)))
    parts.saver.go_on_from(state)
    parts.saver.start_mirror()
    parts.reporter.write_state(state, "training")
    try:
        outcome = train(parts, state, stop)
    except RefocusedError as error:
        parts.reporter.event("failed", "", error=str(error))
        parts.reporter.write_state(state, "failed")
        raise
    sample = None
    if config.evaluation.sample_prompt is not None and not outcome.stopped:
        sample = write_sample(
            parts.engine,
            config.evaluation.sample_prompt,
            tokens=config.evaluation.sample_tokens,
            sequence_length=config.model.sequence_length,
            vocabulary=loaded.shape.vocabulary,
            seed=config.run.seed,
        )
    return ending.finish(parts, outcome, sample=sample, folder=folder, settings=config.checkpoint)


def _begin(folder: Path, run_yaml: str) -> None:
    """Write the resolved run file, and forget an earlier wish to stop."""
    with _writing(folder):
        (folder / "run.yaml").write_text(run_yaml)
        (folder / "STOP").unlink(missing_ok=True)
