"""Build the model, compile its blocks and partition it over the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from refocused.config.deepspeed import deepspeed_config
from refocused.engine.build_engine import build_engine, set_product_precision
from refocused.engine.compiled import DTYPES, Compilation, compile_blocks
from refocused.engine.deepspeed_patches import load_deepspeed
from refocused.engine.engine import Engine
from refocused.estimate.memory_plan import plan_host
from refocused.models.causal_lm import counted_parameters
from refocused.models.families import build_model, register_families, shared_weights
from refocused.models.kernels import choose_kernels
from refocused.models.sequence_parallel import join_sequence_group
from refocused.monitor.sampler.machine_readings import memory_now
from refocused.system.errors import TrainingError, short_reason
from refocused.train.step.garbage_collection import keep_freed_memory, quick_imports
from refocused.train.step.guards import explaining_lack_of_memory

if TYPE_CHECKING:
    from refocused.config.load_run import LoadedRun
    from refocused.system.world import World
    from refocused.train.lifecycle.job import Plan


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
    loaded: LoadedRun,
    planned: Plan,
    world: World,
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
    config, plan, choice = loaded.config, planned.batch, planned.choice
    _import_model_code()
    set_product_precision(config.precision)
    if config.run.deterministic or config.run.replay_every:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.run.seed)
    shares_weights = replaces_weights and choice.zero.stage == 3
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
        is_partitioned=choice.zero.stage == 3,
    )
    if not counts_padding:
        model.network.get_output_embeddings().vocabulary = loaded.shape.vocabulary
    parameters = counted_parameters(model)
    end_phase("model")
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=deepspeed_config(
            batch=plan,
            optimizer=config.optimizer,
            precision=config.precision,
            zero=choice.zero,
            parameters=parameters,
            fragment=loaded.fragment,
            ranks=world.world_size,
            ranks_here=world.local_world_size,
        ),
        optimizer=config.optimizer,
        precision=config.precision,
        world=world,
        replay_every=config.run.replay_every,
    )
    torch.manual_seed(config.run.seed + world.rank)
    host = plan_host(
        loaded,
        choice,
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
    micro_batches = min(
        2, plan.gradient_accumulation_steps
    )  # from the second one on there are gradients
    engine: Engine | None = None
    try:
        with explaining_lack_of_memory(plan, world=world):
            engine = assemble_engine(loaded, planned, world).engine
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
