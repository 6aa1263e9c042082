"""From the sections of a run to the parts that the loop uses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
from pathlib import Path

import torch

from refocused.checkpoints.mirror.mirror import CheckpointMirror, Mirroring
from refocused.checkpoints.mirror.mirror_status import MirrorSettings
from refocused.checkpoints.mirror.remote_steps import prefix_of
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import RunFacts
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.config.deepspeed import deepspeed_config
from refocused.config.load_run import render_run
from refocused.config.optimization import PrecisionConfig
from refocused.engine.build_engine import build_engine, load_deepspeed, set_product_precision
from refocused.engine.compiled import DTYPES, Compilation, compile_blocks
from refocused.engine.engine import Engine
from refocused.engine.shard_files import seed_everything
from refocused.estimate.flops import (
    CREDIBLE_MFU,
    CREDIBLE_MFU_IN_FP8,
    flops_per_token,
    mfu_fraction,
)
from refocused.estimate.memory_plan import plan_host
from refocused.estimate.run_cost import least_save_bytes
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.throughput import Throughput, forecast
from refocused.models.causal_lm import DEFAULT_INITIALIZER_RANGE, counted_parameters, untrained_loss
from refocused.models.families import build_model, register_families
from refocused.models.kernels import choose_mixing
from refocused.monitor.sampler.machine_readings import memory_now
from refocused.system.hardware import gpu_facts
from refocused.system.processes import identify
from refocused.train.lifecycle.banner import uncompiled_fp8
from refocused.train.lifecycle.job import Job
from refocused.train.lifecycle.open_data import DataParts, build_data
from refocused.train.lifecycle.tokenizer_and_tasks import build_texts
from refocused.train.step.garbage_collection import keep_freed_memory, quick_imports
from refocused.train.step.parts import Parts
from refocused.train.step.profile import StepProfiler
from refocused.train.step.reporter import Reporter
from refocused.train.step.saver import Saver
from refocused.train.step.step_figures import Cadence, RunFigures


def assemble_data(job: Job) -> DataParts:
    """Open and describe the data; every rank must call."""
    config = job.loaded.config
    return build_data(
        config.data,
        plan=job.plan,
        world=job.world,
        vocabulary=job.loaded.shape.vocabulary,
        seed=config.run.seed,
        steps=config.run.steps,
        evaluation_windows=config.evaluation.windows,
        credentials_file=job.request.credentials_file,
        project=job.request.project,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The model, partitioned over the ranks.

    Attributes:
        parameters: Elements of the whole model, padding included.
        mixing: What computes how positions meet.
        compilation: How the blocks are computed.
        kept: What becomes of freed memory on the host; empty: a step frees nothing large.
    """

    engine: Engine
    parameters: int
    mixing: str
    compilation: Compilation
    kept: str


def assemble_engine(job: Job) -> Built:
    """Build the model, alike on every rank, compile its blocks and partition it."""
    config, shape = job.loaded.config, job.loaded.shape
    with quick_imports():
        register_families()
        load_deepspeed()
    set_product_precision(config.precision)
    if config.run.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    seed_everything(config.run.seed, rank=0)
    model = build_model(
        shape.settings,
        vocabulary=shape.padded_vocabulary(config.model.vocabulary_multiple),
        dropout=config.model.dropout,
        activation_checkpointing=config.model.activation_checkpointing,
        chunk_tokens=config.model.head_chunk_tokens,
        document_id=config.data.document_id if config.data.mask_documents else None,
    )
    parameters = counted_parameters(model)
    mixing = choose_mixing(
        model,
        shape.mixer,
        config=config.model,
        dtype=DTYPES[config.precision.dtype],
        plan=job.plan,
        world=job.world,
    )
    if config.precision.fp8 != "none":
        from refocused.models.fp8 import compute_in_fp8

        compute_in_fp8(
            model, block_class=model.block_class, scaling=config.precision.fp8, world=job.world
        )
    compilation = compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(job.plan.micro, job.plan.sequence_length),
        dtype=config.precision.resolved,
        choice=config.model.compile,
        world=job.world,
        is_partitioned=job.planned.choice.zero.stage == 3,
    )
    settings = deepspeed_config(
        batch=job.plan,
        optimizer=config.optimizer,
        precision=config.precision,
        zero=job.planned.choice.zero,
        parameters=parameters,
        fragment=job.loaded.fragment,
    )
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=config.optimizer,
        precision=config.precision,
        world=job.world,
    )
    seed_everything(config.run.seed, rank=job.world.rank)
    host = plan_host(
        job.planned.choice,
        parameters=parameters,
        dtype=config.precision.resolved,
        ranks=job.world.world_size,
        ranks_here=job.world.local_world_size,
        device=job.world.device_kind,
        in_background=config.checkpoint.in_background,
    )
    kept = keep_freed_memory(
        host,
        available=memory_now().available,
        ranks_here=job.world.local_world_size,
        environment=os.environ,
    )
    return Built(engine, parameters, mixing, compilation, kept)


def assemble_parts(
    job: Job, data: DataParts, built: Built, *, branch: Branch = FIRST_BRANCH, began_seconds: float
) -> Parts:
    """Bring together what the loop uses.

    Args:
        job: The run.
        data: Where batches come from.
        built: The model.
        branch: The branch that training goes on with.
        began_seconds: When this process's session began, on the monotonic clock.
    """
    config, world = job.loaded.config, job.world
    engine, parameters, zero = built.engine, built.parameters, job.planned.choice.zero
    rows = job.loaded.shape.padded_vocabulary(config.model.vocabulary_multiple)
    texts = build_texts(
        config.data,
        config.evaluation,
        vocabulary=job.loaded.shape.vocabulary,
        context_tokens=config.model.sequence_length,
        seed=config.run.seed,
        world=world,
    )
    figures = _figures(job, data, branch)
    throughput = Throughput(
        device_kind=world.device_kind,
        began_seconds=began_seconds,
        forecast=forecast(
            job.plan,
            validation_windows=sum(len(one.validation.windows) for one in data.sources),
            task_tokens=sum(len(one.ids) for task in texts.tasks for one in task.continuations),
            sample_tokens=config.evaluation.sample_tokens if texts.sampler else 0,
            exports=config.checkpoint.export_final,
        ),
    )
    reporter = Reporter(
        job.folder,
        figures=figures,
        engine=engine,
        throughput=throughput,
        world=world,
        dry_run=job.request.dry_run,
    )
    _say_computation(built, reporter, precision=config.precision)
    facts = _facts(job, data, parameters, texts.tokenizer_json)
    saver = Saver(
        Checkpointer(
            job.checkpoints,
            world=world,
            facts=facts,
            branch=branch,
            history=job.folder / METRICS_FILE,
            least_bytes=least_save_bytes(
                parameters, zero.stage, optimizer=config.optimizer.kind, world=world
            ),
        ),
        compare=functools.partial(
            changes_since,
            facts=facts,
            world_size=world.world_size,
            allowed=job.request.allowed_changes,
        ),
        folder=job.checkpoints,
        branch=branch,
        engine=engine,
        mirror=Mirroring(
            _mirror(job, branch) if world.is_storage_rank else None,
            report=reporter.event,
            world=world,
        ),
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
        plan=job.plan,
        total_steps=config.run.steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        cadence=figures.cadence,
        throughput=throughput,
        reporter=reporter,
        saver=saver,
        vocabulary=job.loaded.shape.vocabulary,
        vocabulary_rows=rows,
        tasks=texts.tasks,
        sampler=texts.sampler,
        profiler=_profiler(job, reporter),
        untrained_loss=untrained_loss(
            rows=rows,
            width=job.loaded.shape.width,
            initializer_range=job.loaded.shape.settings.get(
                "initializer_range", DEFAULT_INITIALIZER_RANGE
            ),
        ),
    )


def _say_computation(built: Built, reporter: Reporter, *, precision: PrecisionConfig) -> None:
    """Tell how positions meet and how the blocks are computed."""
    done = built.compilation
    reporter.event(
        "compile_failed" if done.failed else "compute",
        f"  compute  {built.mixing}, {done.text}; CPU threads a rank: {torch.get_num_threads()}"
        + (f"; {built.kept}" if built.kept else ""),
        mixing=built.mixing,
        compiled=done.is_on,
        seconds=done.seconds,
    )
    warning = uncompiled_fp8(precision, done)
    if warning is not None:
        reporter.event("fp8_warning", warning, fp8=precision.fp8)


def _profiler(job: Job, reporter: Reporter) -> StepProfiler | None:
    """Prepare the trace that rank 0 was asked for."""
    if not job.request.profile_steps or job.request.dry_run or not job.world.is_rank_0:
        return None
    return StepProfiler(
        job.folder / "profile",
        steps=job.request.profile_steps,
        on_gpu=job.world.device_kind == "cuda",
        report=lambda text: reporter.event("profile", f"profile {text}"),
    )


def _figures(job: Job, data: DataParts, branch: Branch) -> RunFigures:
    """Collect what the reporter computes with."""
    config, world = job.loaded.config, job.world
    facts = gpu_facts(world.device_name) if world.device_kind == "cuda" else None
    return RunFigures(
        name=config.run.name,
        branch=branch,
        total_steps=config.run.steps,
        plan=job.plan,
        optimizer=config.optimizer,
        schedule=config.schedule,
        cadence=Cadence(
            log=config.log.interval,
            validation=config.evaluation.interval,
            checkpoint=config.checkpoint.interval,
            keep_epochs=config.checkpoint.keep_epochs,
            save_best=config.checkpoint.save_best,
            tasks=config.evaluation.task_interval if config.evaluation.tasks else 0,
            sample=config.evaluation.sample_interval if config.evaluation.sample_prompt else 0,
            histograms=config.tracking.histogram_interval,
        ),
        mfu=functools.partial(
            mfu_fraction,
            flops_per_token=flops_per_token(
                job.loaded.shape, sequence_length=config.model.sequence_length
            ),
            gpus=world.world_size,
            peak_flops=facts.bf16_flops if facts else None,
        ),
        per_hour_usd=config.cost.per_hour_usd,
        credible_mfu=CREDIBLE_MFU if config.precision.fp8 == "none" else CREDIBLE_MFU_IN_FP8,
        epoch_windows=data.epoch_windows,
    )


def _facts(job: Job, data: DataParts, parameters: int, tokenizer_json: bytes | None) -> RunFacts:
    """Collect what every checkpoint of the run says alike."""
    config = job.loaded.config
    fingerprint, by_size = data.manifest.fingerprint, data.manifest.fingerprint_by_size
    return RunFacts(
        run=config.run.name,
        zero_stage=job.planned.choice.zero.stage,
        dtype=config.precision.resolved,
        versions={
            name: importlib.metadata.version(name)
            for name in ("refocused", "torch", "deepspeed", "transformers")
        },
        data_fingerprint=fingerprint,
        data_fingerprint_by_size=None if by_size == fingerprint else by_size,
        data_order=data.order_text,
        data_mixture=data.mixture_text,
        parameters=parameters,
        run_yaml=render_run(config),
        model_json=json.dumps(dict(job.loaded.shape.settings), indent=1),
        tokenizer_json=tokenizer_json,
    )


def _mirror(job: Job, branch: Branch) -> CheckpointMirror | None:
    """Prepare the background copy from this disk, if the run has one."""
    checkpoint = job.loaded.config.checkpoint
    if checkpoint.mirror is None:
        return None
    return CheckpointMirror(
        MirrorSettings(
            run=job.folder,
            bucket=checkpoint.mirror,
            prefix=prefix_of(job.loaded.config.run.name),
            branch=branch,
            training=identify(os.getpid()),
            credentials_file=job.request.credentials_file,
            project=job.request.project,
            drain_seconds=checkpoint.drain_minutes * 60,
            keep_remote=None if checkpoint.keep_remote == "all" else checkpoint.keep_remote,
            node=job.world.storage_rank,
            nodes=job.world.storage_ranks,
        )
    )


def assemble_catalog(job: Job) -> Catalog:
    """List the run's checkpoints, here and in the mirror."""
    mirror = job.loaded.config.checkpoint.mirror
    if mirror is None:
        return Catalog(job.checkpoints)
    if "://" not in mirror:
        with contextlib.suppress(OSError):  # listing it says that it is not there
            Path(mirror).expanduser().mkdir(parents=True, exist_ok=True)
    bucket = job.request.open_bucket(mirror)
    return Catalog(job.checkpoints, bucket, prefix_of(job.loaded.config.run.name))
