"""A whole run on one rank: agree, plan, claim the folder, build, resume, train, finish.

Read `run` from top to bottom; the functions below it are in the order in which it calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials, open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.mirror.lease import Lease
from refocused.checkpoints.mirror.mirror import CheckpointMirror, Mirroring, MirrorSettings
from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.resume.resume_selection import OR_START, Selection
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.cadence import Cadence
from refocused.config.deepspeed import deepspeed_config
from refocused.config.load_run import LoadedRun, render_run
from refocused.config.run_config import RunConfig
from refocused.data.loader.open_data import DataParts, build_data, describe_sources
from refocused.data.manifest.shard_manifest import Manifest
from refocused.data.manifest.vocabulary import decide_vocabulary, require_room_for_tokenizer
from refocused.data.order.sources import describe_mixture, tokens_of_epochs
from refocused.engine.build_engine import build_engine, set_product_precision
from refocused.engine.compiled import DTYPES, Compilation, compile_blocks
from refocused.engine.deepspeed_patches import load_deepspeed
from refocused.engine.engine import Engine
from refocused.engine.schedule import RatePlan
from refocused.estimate import memory_plan
from refocused.estimate.flops import flops_per_token, mfu_fraction, possible_mfu
from refocused.estimate.memory import checkpoint_bytes, usable_bytes
from refocused.estimate.memory_plan import Choice, choose, largest_micro, plan_host, refuse_cpu
from refocused.evaluate.continuations import Encoder
from refocused.evaluate.core import encode_task
from refocused.evaluate.final_model import prepare_final_model
from refocused.evaluate.multiple_choice import EncodedTask
from refocused.evaluate.tasks import find_tasks
from refocused.evaluate.text_samples import TextSampler
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.jsonl import number, read_json
from refocused.metrics.meter import Meter, forecast
from refocused.metrics.run_time import require_budget
from refocused.metrics.trackers import TrackedRun
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import build_model, initialize, register_families, shared_weights
from refocused.models.kernels import choose_kernels
from refocused.models.sequence_parallel import join_sequence_group
from refocused.monitor.sampler.start_sampler import begin_on_end, start_sampling
from refocused.system import logs
from refocused.system.errors import (
    ConfigError,
    EvaluationError,
    ExitCode,
    RefocusedError,
    TrainingError,
    short_reason,
    tokenizer_errors,
)
from refocused.system.hardware import cpu_flags, gpu_spec, memory_now
from refocused.system.logs import ProgressBar, erasure
from refocused.system.number_text import duration
from refocused.system.processes import identify, this_process
from refocused.system.spot_notice import watch_for_notice
from refocused.system.world import World
from refocused.tokenizers.encoders import VOCABULARIES, Ids, TokenizerChoice, settings_file
from refocused.tokenizers.tokenizer_json import (
    TOKENIZER_FILE,
    as_transformers,
    byte_lengths,
    saved_files,
    tokenizer_file,
)
from refocused.train.lifecycle import banner, shutdown
from refocused.train.lifecycle.launch_session import ENDING
from refocused.train.lifecycle.resume import (
    Start,
    catalog_of,
    find_start,
    require_checkpoint,
    select,
    start_or_resume,
    take_over,
    train_and_go_back,
)
from refocused.train.lifecycle.run_folder import (
    StartNotice,
    claim_run,
    find_storage_ranks,
    has_newer_stop,
    require_one_mirror,
    write_run_files,
    writing,
)
from refocused.train.lifecycle.session import Session
from refocused.train.step.garbage_collection import keep_freed_memory, quick_imports
from refocused.train.step.guards import explaining_lack_of_memory, fetch_together
from refocused.train.step.loop import Trainer
from refocused.train.step.profile import StepProfiler
from refocused.train.step.reporter import Reporter
from refocused.train.step.saver import Saver
from refocused.train.step.spikes import SpikeWatch
from refocused.train.step.stopping import StopRequest

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Options of the command line besides the run file."""

    resume: str  # `auto`, `latest`, `best`, `none`, a step, a name, a path or a `gs://` address
    dry_run: bool  # build and check everything, train nothing
    command: str  # the command that was typed, for the summary
    credentials: Credentials = BY_ENVIRONMENT  # to `gs://`
    allowed_changes: frozenset[str] = frozenset()  # settings that may differ from the checkpoint's
    trusts_others: bool = False  # a checkpoint of another run may be taken over
    parent: str | None = None  # the run that `resume` is a checkpoint of, if the run is a new one
    profile_steps: int = 0  # steps to trace after the first ones; 0: none
    at_the_end: Callable[..., None] | None = None  # of a dry run: `Trial.take_step`

    def open_bucket(self, url: str) -> Bucket:
        """Return the bucket of an address, reached with the command line's credentials."""
        return open_bucket(url, self.credentials)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The choices made for the hardware, and its memory."""

    choice: Choice  # stage, offloads, micro-batch and the memory they take
    batch: BatchPlan  # of a step
    memory_bytes: float | None  # of the smallest GPU; None without GPUs
    native: memory_plan.NativeDtype  # what the hardware of all ranks computes fastest in
    is_native_by_choice: bool  # whether `precision.dtype: auto` chose it


def run(loaded: LoadedRun, request: Request, world: World, session: Session) -> ExitCode:
    """Carry out a run on this rank; all ranks call it alike.

    Raises:
        RefocusedError: On every rank alike, if the run cannot start or continue, or was asked to
            stop before it trained.
    """
    given, trains, meter = loaded, not request.dry_run, session.meter
    folder = Path(loaded.config.run.directory) / loaded.config.run.name
    meter.device_kind, end_phase = world.device_kind, meter.end_phase

    # Agree and plan. Nothing is written so far: a mistyped run gets no folder.
    world.on_all_ranks(lambda: banner.require_equal_settings(given, world))
    if trains:
        world.on_rank_0(lambda: require_budget(folder, given.config.cost))
    loaded, planned = settle(given, world, open_source=request.open_bucket)
    config = loaded.config
    if trains:
        world.on_rank_0(lambda: require_checkpoint(config, request))

    # Open the folder, find out which ranks write it, and claim it against other starts.
    def open_folder() -> None:
        with writing(folder):
            logs.start_files(folder / "logs", world.rank)

    def claim() -> None:
        with writing(folder):
            claim_run(folder)
            if not has_newer_stop(folder, session.began_seconds):
                (folder / "STOP").unlink(missing_ok=True)

    if trains:
        world.on_all_ranks(open_folder)
    world = find_storage_ranks(folder, world)
    require_one_mirror(config.checkpoint.mirror, world)
    session.report(run=str(folder))
    if trains:
        world.on_storage_ranks(claim)
    spot = watch_for_notice(config.run.spot_notice) if world.is_local_rank_0 else None
    stop = StopRequest(
        world,
        config=config,
        began_seconds=session.began_seconds,
        stop_file=folder / "STOP" if trains else None,  # a dry run leaves it to the run beside it
        signalled=lambda: session.signals.asked,
        orphaned=lambda: session.ancestors.gone,
        notice=lambda: None if spot is None else spot.text,
    )
    # The lease is in the mirror, or else in the run's folder.
    if trains:
        mirror = config.checkpoint.mirror
        stop.lease = Lease(
            open_bucket(
                mirror or str(folder.absolute()),
                request.credentials,
                retry=Retry(attempts=4),  # the lease's thread tries again later
            ),
            "" if mirror is None else prefix_of(config.run.name),
            token=world.broadcast(secrets.token_hex(8)),
            training=this_process(),
            known=str((read_json(folder / "state.json") or {}).get("lease")),
        )
    lease = stop.lease
    if lease is not None:

        def is_cancelled() -> bool:
            return stop.signalled() or (folder / "STOP").exists()

        world.on_rank_0(lambda: lease.acquire(cancelled=is_cancelled))
    end_phase("plan")

    with contextlib.ExitStack() as closing:
        if lease is not None and world.is_rank_0:
            closing.callback(lease.close)
        notice = StartNotice(folder if world.is_rank_0 and trains else None, is_claimed=True)
        closing.callback(notice.withdraw)

        def enter(phase: str) -> None:
            stop.leave_if_asked()
            notice.show(phase)

        # Select the checkpoint first: it may decide the precision, and that the budget is spent.
        world.on_rank_0(lambda: _log(banner.opening_lines(loaded, planned, world)))
        enter("reads the checkpoint")
        # Verifying a checkpoint and listing the data wait for disks and the network, on rank 0;
        # the other ranks wait for rank 0. Meantime, all import what the engine needs.
        imports = threading.Thread(target=_import_model_code, daemon=True)
        imports.start()
        selected = select(config, request, world)
        made = trained = 0
        if (saved := selected.checkpoint) is not None:
            made, trained = saved.step, saved.manifest.tokens
            # A resume on other hardware must not change the precision of a run.
            dtype = saved.manifest.dtype
            if given.config.precision.dtype == "auto" and dtype != config.precision.dtype:
                kept = world.on_all_ranks(lambda: memory_plan.with_dtype(given, dtype))
                loaded, planned = settle(kept, world, open_source=request.open_bucket)
                config = loaded.config
                as_saved = (
                    f"  dtype    {dtype}, as {saved.manifest.name} was saved; precision.dtype="
                    f"{planned.native.dtype} --allow-change precision.dtype would change it"
                )
                memory = banner.memory_lines(loaded, planned, world)
                world.on_rank_0(lambda: _log([as_saved, *memory]))
        counted_in = loaded
        loaded = world.on_all_ranks(
            lambda: counted_in.with_steps(planned.batch, made=made, trained=trained)
        )
        config = loaded.config
        if saved is not None and trains:
            usd = number(read_json(saved.path / "trainer.json") or {}, "cost_usd")
            done = made >= config.run.total_steps
            world.on_rank_0(
                lambda: require_budget(folder, config.cost, is_done=done, saved_usd=usd)
            )
        start = find_start(loaded, request, world, saved)
        enter("opens the data")
        end_phase("checkpoint")
        data = world.on_all_ranks(
            lambda: build_data(
                config.data,
                plan=planned.batch,
                world=world,
                vocabulary=loaded.shape.vocabulary,
                seed=config.run.seed,
                steps=config.run.total_steps,
                evaluation_sequences=config.evaluation.sequences,
                open_source=request.open_bucket,
            )
        )
        closing.enter_context(contextlib.closing(data.cache))
        closing.enter_context(explaining_lack_of_memory(planned.batch, world=world))
        world.on_rank_0(lambda: _log(banner.data_lines(data, loaded, planned.batch)))
        enter("builds the model and the engine")
        end_phase("data")
        imports.join()
        if trains:
            start_sampling(
                folder,
                world,
                log=config.log,
                cost=config.cost,
                hang_minutes=config.run.hang_minutes,
            )
        # The vocabulary's padding is not counted in the loss of weights that never had it.
        model, mixing, compilation = assemble_model(
            loaded,
            planned,
            world,
            counts_padding=start.origin is None,
            replaces_weights=start.fill is not None or saved is not None,
        )
        parameters = counted_parameters(model)
        end_phase("model")
        engine = assemble_engine(loaded, planned, world, model, meter)
        host = plan_host(
            loaded,
            planned.choice,
            ranks=world.world_size,
            ranks_here=world.local_world_size,
            device=world.device_kind,
        )
        freed_memory = keep_freed_memory(
            host,
            available=memory_now().available,
            ranks_here=world.local_world_size,
            environment=os.environ,
        )
        end_phase("engine")
        trainer = assemble_trainer(
            loaded,
            planned,
            request,
            stop,
            data,
            engine,
            selected=selected,
            start=start,
            parameters=parameters,
            session=session,
        )
        reporter = trainer.reporter
        freed = f"; {freed_memory}" if freed_memory else ""
        reporter.event(
            "compile_failed" if compilation.failed else "compute",
            f"  compute  {mixing}, {compilation.text}; CPU threads a rank: "
            f"{torch.get_num_threads()}{freed}",
            mixing=mixing,
            compiled=compilation.is_on,
            seconds=compilation.seconds,
        )
        if config.precision.fp8 != "none" and not compilation.is_on:
            reporter.event("fp8_warning", banner.UNCOMPILED_FP8, fp8=config.precision.fp8)
        enter("loads the state")
        end_phase("ready")
        state = start_or_resume(trainer, selected, start)
        enter("begins to train")
        end_phase("load")

        if request.dry_run:
            # Read the first step's batches, and check that the mirror may be written.
            position, made = state.position, state.step
            with contextlib.closing(data.loader.batches_from(position, made=made)) as batches:
                micro_batches = fetch_together(world, batches.next_step, stop)
                if micro_batches is None:
                    return stop.agreed().exit_code
                if request.at_the_end is not None:
                    compute = f"{mixing}, {compilation.text}"
                    after = batches.position
                    request.at_the_end(trainer, planned, compute, state, micro_batches, after)
                    return ExitCode.OK  # the doctor has tried the mirror

            def write_to_mirror() -> None:
                if (remote := trainer.catalog().remote) is not None:
                    remote.write_readme()

            world.on_storage_ranks(write_to_mirror)
            reporter.event("dry_run", "done  dry run: everything is in place, no step taken")
            return ExitCode.OK

        # From here on the run's files change, and a stop saves.
        take_over(trainer, selected, parent=request.parent)
        stop.reporter = reporter
        session.report(training=True)
        session.signals.notices = session.training_notices

        write_files = functools.partial(write_run_files, folder, loaded, planned.batch, data)
        world.on_storage_ranks(write_files)
        setup = banner.setup_record(loaded, planned, data, world=world, command=request.command)
        reporter.event("setup", "", **setup)
        trainer.saver.checkpointer.prepare()
        trainer.saver.mirror.start()
        if lease is not None:
            lease.handed_over = config.checkpoint.mirror is not None
            if world.is_rank_0:
                lease.lead(trainer.saver.head)  # before state.json names the branch
        resume = request.resume
        tracked = TrackedRun(
            folder,
            name=config.run.name,
            step=state.step,
            settings={
                **config.model_dump(mode="json"),
                "shape": dict(loaded.shape.settings),
                "ranks": world.world_size,
                "device": world.device_name,
            },
            tracking=config.tracking,
            wandb_id=state.wandb_id,
            is_automatic=resume in ("auto", "latest") or (resume == OR_START and state.step > 0),
        )
        try:
            ended, stopped = train_and_go_back(trainer, state, tracked)
            world.progress.begin("ending")
            session.signals.notices = ENDING
            session.report(reason=stopped.name)
            final_model = prepare_final_model(
                folder, config.checkpoint, world=world, credentials=request.credentials
            )
            code = shutdown.finish(
                trainer, ended, stopped, command=request.command, final_model=final_model
            )
            # Only a supervisor knows that a failure is final. A Ctrl+C may come at the end, too.
            was_asked = stop.agreed().exit_code == ExitCode.INTERRUPTED
            was_over = world.broadcast(session.notice.found_complete())
            if session.launch is None and world.is_local_rank_0 and not was_asked:
                node, step = world.node, ended.step
                _log(begin_on_end(config, code, step=step, was_over=was_over, node=node))
            return code
        except BaseException as error:
            if order := session.progress.ordered():  # it explains the error
                session.exit_as_ordered(*order)
            code = error.exit_code if isinstance(error, RefocusedError) else ExitCode.FAILED
            reporter.write_failure(state, error, code)
            raise
        finally:
            if trainer.profiler is not None:
                trainer.profiler.close()


def _log(lines: Sequence[str]) -> None:
    for line in lines:
        logger.info("%s", line)


def settle(
    loaded: LoadedRun, world: World, *, open_source: Callable[[str], Bucket]
) -> tuple[LoadedRun, Plan]:
    """Return the run with all `auto` settings decided, and its plan; every rank must call.

    An `auto` micro-batch on GPUs is the largest that the memory of a real step proves to fit.
    `open_source` opens a source of the data, which may have to give the vocabulary.

    Raises:
        RefocusedError: On every rank: nothing fits, the global batch cannot be divided, a large
            model would train on the CPU by accident, or the vocabulary cannot be found or does not
            fit the tokenizer.
    """

    def vocabulary() -> int:
        require_room_for_tokenizer(loaded, fetch=True)
        return decide_vocabulary(loaded, open_source).shape.vocabulary

    loaded = loaded.with_vocabulary(world.on_rank_0(vocabulary))
    given = loaded.config

    def tokens() -> int:
        buckets = {"": open_source(given.data.address)}
        return tokens_of_epochs(given, describe_sources(buckets, given.data))

    loaded = loaded.with_tokens(lambda: world.on_rank_0(tokens))
    if world.device_kind == "cpu":
        world.on_all_ranks(lambda: refuse_cpu(loaded, ranks=world.world_size))
    # The dtype of the least capable rank, so that all ranks decide alike.
    on_gpu, is_auto = world.device_kind == "cuda", loaded.config.precision.dtype == "auto"
    fastest_here = memory_plan.native_dtype(
        capability=torch.cuda.get_device_capability(world.device) if on_gpu else None,
        cpu_flags=cpu_flags(),
        cpu_gain=memory_plan.cpu_bf16_gain,
    )
    native = max(
        world.gather(fastest_here),
        key=lambda fastest: memory_plan.FASTEST_FIRST.index(fastest.dtype),
    )
    if is_auto:
        loaded = world.on_all_ranks(lambda: memory_plan.with_dtype(loaded, native.dtype))
    config, memory_bytes = loaded.config, None
    if on_gpu:  # of the smallest one
        total = torch.cuda.get_device_properties(world.device).total_memory
        memory_bytes = -world.largest([-total])[0]
    ranks = {"ranks": world.world_size, "ranks_here": world.local_world_size}
    choice = world.on_all_ranks(lambda: choose(loaded, memory_bytes=memory_bytes, **ranks))

    def decided(choice: Choice) -> tuple[LoadedRun, Plan]:
        batch = config.batch.model_copy(update={"micro_batch_size": choice.micro_batch_size})
        settled = config.model_copy(update={"zero": choice.zero, "batch": batch})
        plan = world.on_all_ranks(
            lambda: plan_batch(batch, world_size=world.world_size, **config.model.sequence)
        )
        planned = Plan(choice, plan, memory_bytes, native, is_auto)
        return dataclasses.replace(loaded, config=settled), planned

    if config.batch.micro_batch_size == "auto" and memory_bytes is not None:

        def measure(micro_batch_size: int) -> tuple[int, int, int]:
            return memory_of_a_step(
                *decided(dataclasses.replace(choice, micro_batch_size=micro_batch_size)), world
            )

        micro_batch_size = largest_micro(
            loaded,
            choice,
            ranks=world.world_size,
            limit=usable_bytes(memory_bytes),
            measure=measure,
        )
        measured, _ = decided(dataclasses.replace(choice, micro_batch_size=micro_batch_size))
        choice = choose(measured, memory_bytes=memory_bytes, **ranks)
    return decided(choice)


def _import_model_code() -> None:
    with quick_imports():
        register_families()
        load_deepspeed()


def assemble_model(
    loaded: LoadedRun,
    planned: Plan,
    world: World,
    *,
    counts_padding: bool = True,
    replaces_weights: bool = False,
) -> tuple[CausalLM, str, Compilation]:
    """Build the model, alike on every rank, and compile its blocks.

    `counts_padding`: the loss's softmax has the vocabulary's padding rows, too.
    `replaces_weights`: others are loaded before a step, so that under ZeRO-3 no rank needs to hold
    the whole model.

    Returns:
        The model, the implementation of its sequence mixer, and how its blocks are computed.
    """
    config, plan, stage = loaded.config, planned.batch, planned.choice.zero.stage
    _import_model_code()
    set_product_precision(config.precision)
    if config.run.deterministic or config.run.replay_every:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.run.seed)
    shares_weights = replaces_weights and stage == 3
    with shared_weights() if shares_weights else contextlib.nullcontext():
        model = build_model(
            loaded.shape.settings,
            vocabulary=loaded.shape.padded_vocabulary(config.model.vocabulary_multiple),
            dropout=config.model.dropout,
            activation_checkpointing=config.model.activation_checkpointing,
            chunk_tokens=config.model.head_chunk_tokens,
            document_id=config.data.document_id if config.data.mask_documents else None,
            z_loss=config.model.z_loss,
        )
    initialize(model, config.model, loaded.shape.record)
    model.sequence = join_sequence_group(
        world.rank, world.world_size, ranks=config.model.sequence_parallel
    )
    dtype, mixer = DTYPES[config.precision.dtype], loaded.shape.mixer
    mixing = choose_kernels(model, mixer, config=config.model, dtype=dtype, plan=plan, world=world)
    if config.precision.fp8 != "none":
        from refocused.models.fp8 import compute_in_fp8

        compute_in_fp8(
            model, block_class=model.block_class, scaling=config.precision.fp8, world=world
        )
    compilation = compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(plan.micro_batch_size, plan.sequence_length),
        dtype=config.precision.resolved,
        choice=config.model.compile,
        world=world,
        is_partitioned=stage == 3,
    )
    if not counts_padding:
        model.network.get_output_embeddings().vocabulary = loaded.shape.vocabulary
    return model, mixing, compilation


def assemble_engine(
    loaded: LoadedRun, planned: Plan, world: World, model: CausalLM, meter: Meter | None = None
) -> Engine:
    """Partition a model over the ranks, and seed what each rank draws."""
    config = loaded.config
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=deepspeed_config(
            batch=planned.batch,
            optimizer=config.optimizer,
            precision=config.precision,
            zero=planned.choice.zero,
            parameters=counted_parameters(model),
            fragment=loaded.fragment,
            ranks_here=world.local_world_size,
        ),
        optimizer=config.optimizer,
        precision=config.precision,
        world=world,
        replay_every=config.run.replay_every,
        meter=meter,
    )
    torch.manual_seed(config.run.seed + world.rank)
    return engine


def memory_of_a_step(loaded: LoadedRun, planned: Plan, world: World) -> tuple[int, int, int]:
    """Make steps with the run's own engine on random tokens, and forget it; every rank must call.

    Returns:
        Bytes of tensors on the fullest GPU, in the second step: before its last pass, at most in
        that pass, and at most in the whole step. A single rank that runs out of memory needs more
        than any limit, unless its micro-batch is the smallest.

    Raises:
        TrainingError: On one of several ranks, or for the smallest micro-batch: a GPU lacks memory
            even for this. On any rank: the step fails.
    """
    torch.compiler.reset()  # of earlier micro-batches; the run itself may use this one's graphs
    plan, device = planned.batch, world.device
    tokens = torch.randint(loaded.shape.vocabulary, (plan.micro_batch_size, plan.sequence_length))
    micro_batches = min(2, plan.gradient_accumulation_steps)  # the second one adds to gradients
    engine: Engine | None = None
    try:
        with explaining_lack_of_memory(plan, world=world):
            engine = assemble_engine(
                loaded, planned, world, assemble_model(loaded, planned, world)[0]
            )
            for _ in range(2):  # the first one compiles and allocates what stays
                torch.cuda.reset_peak_memory_stats(device)
                engine.begin_step(micro_batches)
                for _ in range(micro_batches - 1):
                    engine.accumulate(tokens, tokens)
                earlier = torch.cuda.max_memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                engine.accumulate(tokens, tokens)
                in_pass = torch.cuda.max_memory_allocated(device)
                engine.update(0.0)
                peak = max(earlier, torch.cuda.max_memory_allocated(device))
        engine.close()
    except TrainingError as error:
        lacks_memory = isinstance(error.__cause__, torch.OutOfMemoryError)
        if not lacks_memory or world.world_size > 1 or plan.micro_batch_size == 1:
            raise  # others are inside a collective
        before, in_pass, peak = 0, sys.maxsize, sys.maxsize
    except RuntimeError as error:
        raise TrainingError(
            f"batch.micro_batch_size=auto makes a step to measure its memory, which failed: "
            f"{short_reason(error)}. Set batch.micro_batch_size to a number to see where."
        ) from error
    engine = None
    gc.collect()
    torch.cuda.empty_cache()
    # The least before the pass and the most in it: by more than either it grows on no rank.
    least, *most = world.largest([-before, in_pass, peak])
    return -int(least), int(most[0]), int(most[1])


def build_texts(
    config: RunConfig, manifest: Manifest, *, vocabulary: int, world: World
) -> tuple[Mapping[str, bytes], Ids | None, Sequence[EncodedTask], TextSampler | None]:
    """Read tokenizer and tasks on rank 0; all ranks call, and raise if one does not fit.

    Returns:
        The tokenizer's files, which checkpoints hold (none if none are named), the bytes of each id
        (None: unknown), the tasks, and what writes text samples (None without a prompt).
    """
    data, evaluation = config.data, config.evaluation
    context_tokens = config.model.sequence_length

    def read_tokenizer() -> tuple[bytes, int | None, Ids | None]:
        choice = TokenizerChoice.of_data(data)
        content = tokenizer_file(choice, vocabulary=vocabulary)
        ends = (data.document_id, data.separator_id, manifest.end_of_text_id)
        tokenizer = as_transformers(
            content,
            end_of_text_id=next((number for number in ends if number is not None), None),
            max_length=context_tokens,
            file=settings_file(choice),
        )
        sizes = byte_lengths(tokenizer, vocabulary=vocabulary, ends=ends)
        if sizes is None:
            logger.info(
                "  tokens   bits per byte unknown: ids of %s are no pieces of text", choice.name
            )
        if choice.name not in VOCABULARIES:  # of which each has but one
            logger.info("  tokens   texts end with %s", tokenizer.eos_token)
        return content, tokenizer.eos_token_id, sizes

    if not data.tokenizer_is_readable:
        return {}, None, (), None
    content, end, sizes = world.on_rank_0(read_tokenizer)
    tokenizer = as_transformers(content, end_of_text_id=end, max_length=context_tokens)
    files = saved_files(content, tokenizer.eos_token)

    def read_tasks() -> list[EncodedTask]:
        try:
            encoder = Encoder(tokenizer, context_tokens=context_tokens, vocabulary=vocabulary)
            return [
                encode_task(task, encoder, limit=evaluation.task_items)
                for task in find_tasks(evaluation.tasks, data=None)
            ]
        except (ConfigError, EvaluationError) as error:
            raise ConfigError(f"evaluation.tasks: {error}") from None

    tasks = world.on_rank_0(read_tasks) if evaluation.tasks else ()
    if not (prompts := evaluation.sample_prompts):
        return files, sizes, tasks, None
    for prompt in prompts:
        with tokenizer_errors(TOKENIZER_FILE):
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            text = f"evaluation.sample_prompt {prompt!r} has no token of data.tokenizer. Write a "
            raise ConfigError(f"{text}prompt of its words.")
    tokens, temperature = evaluation.sample_tokens, evaluation.sample_temperature
    sampler = TextSampler(tokenizer, prompts, tokens, context_tokens, config.run.seed, temperature)
    return files, sizes, tasks, sampler


def assemble_trainer(
    loaded: LoadedRun,
    planned: Plan,
    request: Request,
    stop: StopRequest,
    data: DataParts,
    engine: Engine,
    *,
    selected: Selection,
    start: Start,
    parameters: int,
    session: Session,
) -> Trainer:
    """Bring together what the loop uses; `parameters` are the whole model's, with padding."""
    config, shape, plan, world = loaded.config, loaded.shape, planned.batch, stop.world
    folder = Path(config.run.directory) / config.run.name
    checkpoint, stage, branch = config.checkpoint, planned.choice.zero.stage, selected.branch
    if config.run.on_spike == "skip" and not engine.can_skip:
        raise ConfigError(
            "run.on_spike=skip cannot judge an update before it is made in fp16, with "
            "zero.offload_optimizer, or in 16 bits without ZeRO. Set warn or rewind."
        ).agreed()
    tokenizer, sizes, tasks, sampler = build_texts(
        config, data.manifest, vocabulary=shape.vocabulary, world=world
    )
    rates = RatePlan(config.optimizer, config.run.total_steps, config.schedule)
    cadence, meter = Cadence.of(config), session.meter
    meter.forecast = forecast(
        plan,
        validation_sequences=sum(len(source.validation.sequences) for source in data.sources),
        task_tokens=sum(len(text.ids) for task in tasks for text in task.continuations),
        sample_tokens=len(sampler.prompts) * sampler.tokens if sampler else 0,
        exports=checkpoint.export_final,
    )
    trainer = Trainer(
        config=config,
        shape=shape,
        plan=plan,
        world=world,
        folder=folder,
        catalog=functools.partial(catalog_of, config, request),
        stop=stop,
        engine=engine,
        data=data,
        rates=rates,
        cadence=cadence,
        meter=meter,
        byte_lengths=None if sizes is None else torch.from_numpy(sizes).to(world.device),
        tasks=tasks,
        sampler=sampler,
    )
    gpu = gpu_spec(world.device_name) if world.device_kind == "cuda" else None
    lease = stop.lease
    reporter = trainer.reporter = Reporter(
        trainer,
        mfu=functools.partial(
            mfu_fraction,
            flops_per_token=flops_per_token(shape, sequence_length=plan.sequence_length),
            gpus=world.world_size,
            peak_flops=gpu.bf16_flops if gpu else None,
        ),
        possible_mfu=possible_mfu(loaded),
        dry_run=request.dry_run,
        command_began_seconds=session.began_seconds,
        more_of_state=lambda: {
            **data.cache.progress(),
            "lease": lease and lease.known,  # the last start whose head is known here
        },
    )
    trainer.spikes = SpikeWatch(config, data.order, report=reporter.event)

    # Checkpoints, and their mirror.
    metadata = RunMetadata(
        run=config.run.name,
        total_steps=config.run.total_steps,
        zero_stage=stage,
        dtype=config.precision.resolved,
        versions=banner.package_versions(),
        data_fingerprint=data.manifest.fingerprint,
        data_order=data.order_text,
        data_mixture=describe_mixture(data.order),
        parameters=parameters,
        run_yaml=render_run(config),
        model_json=json.dumps(dict(shape.settings), indent=1),
        origin=start.origin,
        tokenizer=tokenizer or start.tokenizer,
    )
    least_bytes = checkpoint_bytes(shape, config, stage=stage)
    if world.storage_ranks > 1:  # each rank writes its share of the states; at stage 0 rank 0 all
        states = checkpoint_bytes(shape, config, stage=3)
        least_bytes = states * world.local_world_size // world.world_size if stage else 0
    mirror = None
    if checkpoint.mirror is not None and world.is_storage_rank:
        mirror = CheckpointMirror(
            MirrorSettings(
                run=folder,
                bucket=checkpoint.mirror,
                prefix=prefix_of(config.run.name),
                branch=branch,
                training=identify(os.getpid()),
                lease=None if lease is None else lease.token,
                credentials=request.credentials,
                # Somebody waits for `on_end`, so the mirror goes on until it is complete.
                drain_seconds=1e7 if config.run.on_end else checkpoint.drain_minutes * 60,
                keep_remote=None if checkpoint.keep_remote == "all" else checkpoint.keep_remote,
                node=world.storage_rank,
                nodes=world.storage_ranks,
            )
        )
    trainer.saver = Saver(
        trainer,
        Checkpointer(
            folder / "checkpoints",
            world=world,
            metadata=metadata,
            branch=branch,
            history=folder / METRICS_FILE,
            least_bytes=least_bytes,
        ),
        mirror=Mirroring(mirror, report=reporter.event, world=world),
        compare=functools.partial(
            changes_since,
            metadata=metadata,
            world_size=world.world_size,
            allowed=request.allowed_changes,
        ),
    )

    if request.profile_steps and not request.dry_run and world.is_rank_0:
        trainer.profiler = StepProfiler(
            folder / "profile",
            steps=request.profile_steps,
            on_gpu=world.device_kind == "cuda",
            report=lambda text: reporter.event("profile", f"profile {text}"),
        )

    def time_left(step: int) -> str:
        seconds = meter.seconds_left(cadence.ahead(step, config.run.total_steps, plan))
        return "" if seconds is None else f"left {duration(seconds)}"

    if world.is_rank_0 and not request.dry_run and erasure(sys.stdout):  # a terminal
        trainer.bar = ProgressBar(sys.stdout, config.run.total_steps, time_left)
    return trainer
