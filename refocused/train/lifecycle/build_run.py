"""From the sections of a run to the parts that the loop uses."""

import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import torch

from refocused.checkpoints.mirror.mirror import CheckpointMirror, Mirroring, MirrorSettings
from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.config.load_run import render_run
from refocused.config.run_config import RunConfig
from refocused.data.loader.open_data import DataParts, build_data
from refocused.data.manifest.shard_manifest import Manifest
from refocused.data.order.sequences import Position
from refocused.data.order.sources import describe_mixture
from refocused.engine.schedule import RatePlan
from refocused.estimate.flops import flops_per_token, mfu_fraction, possible_mfu
from refocused.estimate.memory import checkpoint_bytes
from refocused.evaluate.continuations import Encoder
from refocused.evaluate.multiple_choice import Examination, prepare
from refocused.evaluate.tasks import find_tasks, read_questions
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.throughput import Throughput, forecast
from refocused.models.causal_lm import DEFAULT_INITIALIZER_RANGE, untrained_loss
from refocused.system.errors import ConfigError, EvaluationError, tokenizer_errors
from refocused.system.hardware import gpu_spec
from refocused.system.logs import ProgressBar, erasure
from refocused.system.number_text import duration
from refocused.system.processes import identify
from refocused.system.world import World
from refocused.tokenizers.encoders import VOCABULARIES, TokenizerChoice, settings_file
from refocused.tokenizers.tokenizer_json import (
    TOKENIZER_FILE,
    as_transformers,
    saved_files,
    tokenizer_file,
)
from refocused.train.lifecycle.banner import uncompiled_fp8
from refocused.train.lifecycle.job import UNTRAINED, Job, Start
from refocused.train.lifecycle.model_and_engine import Built
from refocused.train.lifecycle.rewind import watch_spikes
from refocused.train.step.evaluation import TextSampler
from refocused.train.step.loop import Parts
from refocused.train.step.profile import StepProfiler
from refocused.train.step.reporter import Reporter
from refocused.train.step.saver import Saver
from refocused.train.step.step_figures import Cadence, RunFigures

logger = logging.getLogger(__name__)


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
        evaluation_sequences=config.evaluation.sequences,
        open_source=job.request.open_bucket,
    )


def assemble_parts(
    job: Job,
    data: DataParts,
    built: Built,
    *,
    branch: Branch = FIRST_BRANCH,
    start: Start = UNTRAINED,
    began_seconds: float,
    command_began_seconds: float,
) -> Parts:
    """Bring together what the loop uses; the session and its command began at monotonic times."""
    config, shape, world = job.loaded.config, job.loaded.shape, job.world
    rows = shape.padded_vocabulary(config.model.vocabulary_multiple)
    texts = build_texts(config, data.manifest, vocabulary=shape.vocabulary, world=world)
    figures = _figures(job, data, branch)
    throughput = Throughput(
        device_kind=world.device_kind,
        began_seconds=began_seconds,
        forecast=forecast(
            job.plan,
            validation_sequences=sum(len(one.validation.sequences) for one in data.sources),
            task_tokens=sum(len(one.ids) for task in texts.tasks for one in task.continuations),
            sample_tokens=config.evaluation.sample_tokens if texts.sampler else 0,
            exports=config.checkpoint.export_final,
        ),
    )
    reporter = Reporter(
        job.folder,
        figures=figures,
        engine=built.engine,
        throughput=throughput,
        world=world,
        dry_run=job.request.dry_run,
        command_began_seconds=command_began_seconds,
        more_of_state=lambda: {
            **data.cache.progress(),
            "lease": job.lease and job.lease.known,  # the last start whose head is known here
        },
    )
    done, freed = built.compilation, f"; {built.freed_memory}" if built.freed_memory else ""
    reporter.event(
        "compile_failed" if done.failed else "compute",
        f"  compute  {built.mixing}, {done.text}; CPU threads a rank: {torch.get_num_threads()}"
        f"{freed}",
        mixing=built.mixing,
        compiled=done.is_on,
        seconds=done.seconds,
    )
    if (warning := uncompiled_fp8(config.precision, done)) is not None:
        reporter.event("fp8_warning", warning, fp8=config.precision.fp8)
    spikes = watch_spikes(job, data, built, reporter)
    packages = ("refocused", "torch", "deepspeed", "transformers")
    stage, checkpoint = job.planned.choice.zero.stage, config.checkpoint
    facts = RunMetadata(
        run=config.run.name,
        zero_stage=stage,
        dtype=config.precision.resolved,
        versions={name: importlib.metadata.version(name) for name in packages},
        data_fingerprint=data.manifest.fingerprint,
        data_order=data.order_text,
        data_mixture=describe_mixture(data.order),
        parameters=built.parameters,
        run_yaml=render_run(config),
        model_json=json.dumps(dict(shape.settings), indent=1),
        origin=start.origin,
        tokenizer=texts.tokenizer or start.tokenizer,
    )
    least_bytes = checkpoint_bytes(shape, config, stage=stage)
    if world.storage_ranks > 1:  # each rank writes its share of the states; at stage 0 rank 0 all
        states = checkpoint_bytes(shape, config, stage=3)
        least_bytes = states * world.local_world_size // world.world_size if stage else 0
    mirror = None
    if checkpoint.mirror is not None and world.is_storage_rank:
        mirror = CheckpointMirror(
            MirrorSettings(
                run=job.folder,
                bucket=checkpoint.mirror,
                prefix=prefix_of(config.run.name),
                branch=branch,
                training=identify(os.getpid()),
                lease=None if job.lease is None else job.lease.token,
                credentials=job.request.credentials,
                drain_seconds=checkpoint.drain_minutes * 60,
                keep_remote=None if checkpoint.keep_remote == "all" else checkpoint.keep_remote,
                node=world.storage_rank,
                nodes=world.storage_ranks,
            )
        )
    saver = Saver(
        checkpointer=Checkpointer(
            job.checkpoints,
            world=world,
            facts=facts,
            branch=branch,
            history=job.folder / METRICS_FILE,
            least_bytes=least_bytes,
        ),
        compare=functools.partial(
            changes_since,
            facts=facts,
            world_size=world.world_size,
            allowed=job.request.allowed_changes,
        ),
        folder=job.checkpoints,
        engine=built.engine,
        mirror=Mirroring(mirror, report=reporter.event, world=world),
        settings=checkpoint,
        reporter=reporter,
        spikes=spikes,
        throughput=throughput,
        world=world,
        files_done=lambda state: data.files_done(state.position),
    )
    profiler = None
    if job.request.profile_steps and not job.request.dry_run and world.is_rank_0:
        profiler = StepProfiler(
            job.folder / "profile",
            steps=job.request.profile_steps,
            on_gpu=world.device_kind == "cuda",
            report=lambda text: reporter.event("profile", f"profile {text}"),
        )
    return Parts(
        world=world,
        engine=built.engine,
        loader=data.loader,
        validation_batches=data.validation_batches,
        plan=job.plan,
        total_steps=config.run.steps,
        rates=figures.rates,
        cadence=figures.cadence,
        throughput=throughput,
        reporter=reporter,
        saver=saver,
        spikes=spikes,
        validation_set=data.validation_set,
        vocabulary=shape.vocabulary,
        vocabulary_rows=rows,
        tasks=texts.tasks,
        sampler=texts.sampler,
        profiler=profiler,
        bar=_progress_bar(job, throughput, figures.cadence),
        untrained_loss=untrained_loss(
            rows=rows,
            width=shape.width,
            initializer_range=shape.settings.get("initializer_range", DEFAULT_INITIALIZER_RANGE),
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TextParts:
    """Tokenizer, tasks and text samples; the same on every rank."""

    tokenizer: Mapping[str, bytes]  # files stored in the checkpoints; empty if none are named
    tasks: Sequence[Examination] = ()  # tasks to evaluate
    sampler: TextSampler | None = None  # writes text samples; None if the run has no prompt


def build_texts(
    config: RunConfig, manifest: Manifest, *, vocabulary: int, world: World
) -> TextParts:
    """Read tokenizer and tasks on rank 0; all ranks call, and raise if one does not fit."""
    data, evaluation = config.data, config.evaluation
    context_tokens = config.model.sequence_length

    def read_tokenizer() -> tuple[bytes, int | None]:
        choice = TokenizerChoice.of_data(data)
        content = tokenizer_file(choice, vocabulary=vocabulary)
        ends = (data.document_id, data.separator_id, manifest.end_of_text_id)
        tokenizer = as_transformers(
            content,
            end_of_text_id=next((number for number in ends if number is not None), None),
            max_length=context_tokens,
            file=settings_file(choice),
        )
        if choice.name not in VOCABULARIES:  # of which each has but one
            logger.info("  tokens   texts end with %s", tokenizer.eos_token)
        return content, tokenizer.eos_token_id

    if not data.tokenizer_is_readable:
        return TextParts({})
    content, end = world.on_rank_0(read_tokenizer)
    tokenizer = as_transformers(content, end_of_text_id=end, max_length=context_tokens)
    files = saved_files(content, tokenizer.eos_token)
    if not (evaluation.tasks or evaluation.sample_prompt):
        return TextParts(files)

    def read_tasks() -> list[Examination]:
        try:
            encoder = Encoder(tokenizer, context_tokens=context_tokens, vocabulary=vocabulary)
            return [
                prepare(task.name, read_questions(task, limit=evaluation.task_items), encoder)
                for task in find_tasks(evaluation.tasks, data=None)
            ]
        except (ConfigError, EvaluationError) as error:
            raise ConfigError(f"evaluation.tasks: {error}") from None

    tasks = world.on_rank_0(read_tasks) if evaluation.tasks else ()
    prompt = evaluation.sample_prompt
    if prompt is None:
        return TextParts(files, tasks)
    with tokenizer_errors(TOKENIZER_FILE):
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ConfigError(
            f"evaluation.sample_prompt {prompt!r} has no token of data.tokenizer. Write a prompt "
            "of its words."
        )
    tokens, temperature = evaluation.sample_tokens, evaluation.sample_temperature
    how = tokens, context_tokens, config.run.seed, temperature
    return TextParts(files, tasks, TextSampler(tokenizer, prompt, *how))


def _progress_bar(job: Job, throughput: Throughput, cadence: Cadence) -> ProgressBar | None:
    """Prepare the bar on rank 0's terminal; None without one."""
    steps = job.loaded.config.run.steps
    if not job.world.is_rank_0 or job.request.dry_run or not erasure(sys.stdout):
        return None

    def left(step: int) -> str:
        seconds = throughput.seconds_left(cadence.ahead(step, steps, job.plan))
        return "" if seconds is None else f"left {duration(seconds)}"

    return ProgressBar(sys.stdout, steps, left)


def _figures(job: Job, data: DataParts, branch: Branch) -> RunFigures:
    config, world = job.loaded.config, job.world
    facts = gpu_spec(world.device_name) if world.device_kind == "cuda" else None
    length, rates = config.model.sequence_length, config.optimizer
    return RunFigures(
        name=config.run.name,
        branch=branch,
        total_steps=config.run.steps,
        plan=job.plan,
        rates=RatePlan(rates.lr, config.run.steps, config.schedule, rates.matrix_lr),
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
            flops_per_token=flops_per_token(job.loaded.shape, sequence_length=length),
            gpus=world.world_size,
            peak_flops=facts.bf16_flops if facts else None,
        ),
        per_hour_usd=config.cost.per_hour_usd,
        possible_mfu=possible_mfu(job.loaded),
        epoch_sequences=data.epoch_sequences,
        place=data.order.stream_from(Position()).number_of,
    )
