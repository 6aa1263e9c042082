"""Build the model, compile its blocks and partition it over the ranks."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable

import torch

from refocused.config.deepspeed import deepspeed_config
from refocused.engine.build_engine import build_engine, load_deepspeed, set_product_precision
from refocused.engine.compiled import DTYPES, Compilation, compile_blocks
from refocused.engine.engine import Engine
from refocused.engine.shard_files import seed_everything
from refocused.estimate.memory_plan import plan_host
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import register_families, shared_weights
from refocused.models.kernels import choose_kernels
from refocused.models.sequence_parallel import join_sequence_group
from refocused.monitor.sampler.machine_readings import memory_now
from refocused.train.lifecycle.job import Job, build_network
from refocused.train.step.garbage_collection import keep_freed_memory, quick_imports


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The model, partitioned over the ranks."""

    engine: Engine
    parameters: int  # elements of the whole model, padding included
    mixing: str  # the implementation of the sequence mixer
    compilation: Compilation  # how the blocks are computed
    freed_memory: str  # how freed memory on the host is handled; empty: a step frees nothing large


def importing_model_code() -> threading.Thread:
    """Import what `assemble_engine` needs beside other work; join the thread before that call.

    On rank 0 the checkpoint is verified and the data listed meanwhile, which wait for disks and the
    network; the other ranks wait for rank 0.
    """
    thread = threading.Thread(target=_import_model_code, daemon=True)
    thread.start()
    return thread


def _import_model_code() -> None:
    with quick_imports():
        register_families()
        load_deepspeed()


def assemble_engine(
    job: Job,
    *,
    counts_padding: bool = True,
    replaces_weights: bool = False,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> Built:
    """Build the model, alike on every rank, compile its blocks and partition it.

    `counts_padding`: the loss's softmax has the vocabulary's padding rows, too.
    `replaces_weights`: others are loaded before a step, so that under ZeRO-3 no rank needs to hold
    the whole model. `end_phase` is called when the phases `model` and `engine` have ended.
    """
    config, world = job.loaded.config, job.world
    _import_model_code()
    set_product_precision(config.precision)
    if config.run.deterministic or config.run.replay_every:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    seed_everything(config.run.seed, rank=0)
    shares_weights = replaces_weights and job.planned.choice.zero.stage == 3
    model, mixing, compilation = _build_model(job, shares_weights=shares_weights)
    if not counts_padding:
        model.network.get_output_embeddings().vocabulary = job.loaded.shape.vocabulary
    parameters = counted_parameters(model)
    end_phase("model")
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=deepspeed_config(
            batch=job.plan,
            optimizer=config.optimizer,
            precision=config.precision,
            zero=job.planned.choice.zero,
            parameters=parameters,
            fragment=job.loaded.fragment,
            ranks=world.world_size,
            ranks_here=world.local_world_size,
        ),
        optimizer=config.optimizer,
        precision=config.precision,
        world=world,
        replay_every=config.run.replay_every,
    )
    seed_everything(config.run.seed, rank=world.rank)
    host = plan_host(
        job.loaded,
        job.planned.choice,
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
    return Built(engine, parameters, mixing, compilation, freed_memory)


def _build_model(job: Job, *, shares_weights: bool) -> tuple[CausalLM, str, Compilation]:
    config, world = job.loaded.config, job.world
    masked = config.data.mask_documents
    with shared_weights() if shares_weights else contextlib.nullcontext():
        model = build_network(job.loaded, document_id=config.data.document_id if masked else None)
    model.sequence = join_sequence_group(
        world.rank, world.world_size, ranks=config.model.sequence_parallel
    )
    mixing = choose_kernels(
        model,
        job.loaded.shape.mixer,
        config=config.model,
        dtype=DTYPES[config.precision.dtype],
        plan=job.plan,
        world=world,
    )
    if config.precision.fp8 != "none":
        from refocused.models.fp8 import compute_in_fp8

        compute_in_fp8(
            model, block_class=model.block_class, scaling=config.precision.fp8, world=world
        )
    compilation = compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(job.plan.micro, job.plan.sequence_length),
        dtype=config.precision.resolved,
        choice=config.model.compile,
        world=world,
        is_partitioned=job.planned.choice.zero.stage == 3,
    )
    return model, mixing, compilation
