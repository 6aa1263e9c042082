"""Measure a model on the validation set of its run, as training does."""

import argparse
import time
from pathlib import Path

import torch

from refocused.commands.arguments import place
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import read_run
from refocused.config.run_config import RunConfig
from refocused.data.loader.open_data import DataParts, build_data
from refocused.evaluate.export_copy import FOLDER
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.multiple_choice import Measure, TaskResult
from refocused.metrics.history import perplexity
from refocused.models.causal_lm import CausalLM
from refocused.system.errors import ConfigError
from refocused.system.world import World
from refocused.train.step.evaluation import LossSums

NAME_TASKS = "Name at least one task: --tasks hellaswag=FILE.jsonl or --tasks FILE.txt."


def measure_validation(
    model: LoadedModel, arguments: argparse.Namespace, world: World
) -> TaskResult:
    """Measure a model on the validation sequences of its run; every rank must call.

    Raises:
        RefocusedError: On every rank: the model is not from a run, the run has no validation set,
            the data cannot be read, or an option needs `--tasks`.
    """
    for option in ("context", "stride", "data"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option} needs --tasks. Name tasks, or leave it out.")
    config = world.on_all_ranks(lambda: _run_of(model.source))
    sequences = min(config.evaluation.sequences, arguments.limit or config.evaluation.sequences)
    micro_batch_size = config.batch.micro_batch_size
    data = build_data(
        config.data.model_copy(update={"disk_limit_gb": None}),  # trains nothing
        plan=BatchPlan(
            micro_batch_size=arguments.batch
            if micro_batch_size == "auto"
            else min(micro_batch_size, arguments.batch),
            gradient_accumulation_steps=1,
            world_size=world.world_size,
            sequence_length=config.model.sequence_length,
        ),
        world=world,
        vocabulary=model.network.config.vocab_size,
        seed=config.run.seed,
        steps=0,
        evaluation_sequences=sequences,
        open_source=lambda url: place(url, arguments),
    )
    began = time.monotonic()
    try:
        losses = world.on_all_ranks(lambda: _losses(model, data, config, world))
    finally:
        data.cache.close()
    loss = losses.mean(world)
    if loss is None:
        raise ConfigError(f"{model.source}: its run has no validation set. {NAME_TASKS}")
    measures = {"loss": loss.mean, "perplexity": perplexity(loss.mean)}
    measures |= {f"{source} loss": own for source, own in loss.by_source.items()}
    count = sum(len(source.validation.sequences) for source in data.sources)
    named = {name: Measure(value, None) for name, value in measures.items()}
    return TaskResult("validation", count, 0, named, seconds=time.monotonic() - began)


def _run_of(source: Path) -> RunConfig:
    file = (source.parent if source.name == FOLDER else source) / "run.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{source} is not from a local run, so it has no validation set. {NAME_TASKS}"
        )
    return read_run(file)


def _losses(model: LoadedModel, data: DataParts, config: RunConfig, world: World) -> LossSums:
    network = CausalLM(
        model.network,
        chunk_tokens=config.model.head_chunk_tokens,
        document_id=config.data.document_id if config.data.mask_documents else None,
    )
    losses = LossSums()
    with torch.inference_mode():
        for batch in data.validation_batches():
            inputs, labels = batch.input_ids.to(world.device), batch.labels.to(world.device)
            losses.add(batch, network(inputs, labels))
    return losses
