"""Evaluate one model: its scores on tasks, or its loss on the validation set of its run."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refocused.bucket.bucket import Bucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import read_run
from refocused.config.run_config import RunConfig
from refocused.data.loader.open_data import DataParts, build_data
from refocused.evaluate.continuations import LossSums
from refocused.evaluate.export_copy import FOLDER
from refocused.evaluate.load_model import LoadedModel, load_model, untrained
from refocused.evaluate.model_weights import Dtype
from refocused.evaluate.multiple_choice import Measure, TaskResult
from refocused.evaluate.score_model import Evaluation
from refocused.evaluate.tasks import TaskFile
from refocused.metrics.history import perplexity
from refocused.models.causal_lm import CausalLM
from refocused.system.errors import ConfigError
from refocused.system.logs import print_message
from refocused.system.world import World
from refocused.tokenizers.encoders import Ids, TokenizerChoice
from refocused.tokenizers.tokenizer_json import (
    TOKENIZER_FILE,
    as_transformers,
    byte_lengths,
    check_vocabulary,
)

NAME_TASKS = "Name at least one task: --tasks hellaswag=FILE.jsonl or --tasks FILE.txt."


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Facts about a model and its measurement, for JSON, and the results of each task."""

    head: Mapping[str, Any]
    results: Sequence[TaskResult]

    def records(self) -> dict[str, Any]:
        """Return the results by task, for JSON."""
        return {result.task: result.as_record() for result in self.results}


def evaluate_model(
    source: Path,
    tasks: Sequence[TaskFile],
    world: World,
    *,
    dtype: Dtype,
    tokenizer: TokenizerChoice | None = None,
    is_untrained: bool = False,
    limit: int | None = None,
    batch: int = 16,
    context: int | None = None,
    stride: int | None = None,
    open_source: Callable[[str], Bucket],
    progress: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> Evaluated:
    """Score the model in a folder, then free its memory; every rank must call.

    Without tasks, measure the loss on the validation set of its run, whose data `open_source`
    opens. `is_untrained` gives it random weights. The others are those of `Evaluation`. Errors are
    raised on every rank.
    """
    model = world.on_all_ranks(
        lambda: load_model(
            source,
            dtype=dtype,
            device=str(world.device),
            tokenizer=tokenizer,
            without_tokenizer=not tasks,
        )
    )
    model = untrained(model) if is_untrained else model
    if tasks:
        evaluation = world.on_all_ranks(
            lambda: Evaluation(model, limit=limit, batch=batch, context=context, stride=stride)
        )
        context = evaluation.context_tokens
        warning = model.beyond_training(context)
        if warning is not None and world.is_rank_0:
            print_message("warning", warning)
        results = evaluation.run(tasks, world=world, progress=progress)
    else:
        validation = measure_validation(
            model, world, limit=limit, batch=batch, open_source=open_source
        )
        results = [validation]
        context = model.trained_length or model.network.config.max_position_embeddings
    head = {
        "model": str(model.source),
        **{name: model.facts[name] for name in ("run", "step", "tokens") if name in model.facts},
        "trained": model.is_trained,
        "parameters": model.network.num_parameters(),
        "context_tokens": context,
        "trained_sequence_length": model.trained_length,
        "dtype": dtype,
        "device": world.device_name,
        "ranks": world.world_size,
    }
    return Evaluated(head, results)


def measure_validation(
    model: LoadedModel,
    world: World,
    *,
    limit: int | None,
    batch: int,
    open_source: Callable[[str], Bucket],
) -> TaskResult:
    """Measure a model on the validation sequences of its run, as training does; all ranks call.

    Raises:
        RefocusedError: On every rank: the model is not from a run, the run has no validation set,
            or the data cannot be read.
    """

    def run_file() -> Path:
        folder = model.source.parent if model.source.name == FOLDER else model.source
        if not (folder / "run.yaml").is_file():
            raise ConfigError(
                f"{model.source} is not from a local run, so it has no validation set. {NAME_TASKS}"
            )
        return folder / "run.yaml"

    config = world.on_all_ranks(lambda: read_run(run_file()))
    rows, sequences = config.batch.micro_batch_size, config.evaluation.sequences
    data = build_data(
        config.data.model_copy(update={"disk_limit_gb": None}),  # trains nothing
        plan=BatchPlan(
            micro_batch_size=batch if rows == "auto" else min(rows, batch),
            gradient_accumulation_steps=1,
            world_size=world.world_size,
            sequence_length=config.model.sequence_length,
        ),
        world=world,
        vocabulary=model.network.config.vocab_size,
        seed=config.run.seed,
        steps=0,
        evaluation_sequences=min(sequences, limit or sequences),
        open_source=open_source,
    )
    network = CausalLM(
        model.network,
        chunk_tokens=config.model.head_chunk_tokens,
        document_id=config.data.document_id if config.data.mask_documents else None,
    )

    def sum_losses() -> LossSums:
        sizes = _byte_lengths(model, config, data)
        losses = LossSums(None if sizes is None else torch.from_numpy(sizes).to(world.device))
        with torch.inference_mode():
            for each in data.validation_batches():
                inputs, labels = each.input_ids.to(world.device), each.labels.to(world.device)
                losses.add(each.source, network(inputs, labels, of_each=True), labels)
        return losses

    began = time.monotonic()
    try:
        losses = world.on_all_ranks(sum_losses)
    finally:
        data.cache.close()
    loss = losses.mean(world)
    if loss is None:
        raise ConfigError(f"{model.source}: its run has no validation set. {NAME_TASKS}")
    measures: dict[str, float | None] = {
        "loss": loss.mean,
        "perplexity": perplexity(loss.mean),
        "bits_per_byte": loss.bits_per_byte,
    }
    for source, part in loss.by_source.items():
        measures |= {f"{source} loss": part.mean, f"{source} bits_per_byte": part.bits_per_byte}
    count = sum(len(source.validation.sequences) for source in data.sources)
    named = {name: Measure(value, None) for name, value in measures.items() if value is not None}
    return TaskResult("validation", count, 0, named, seconds=time.monotonic() - began)


def _byte_lengths(model: LoadedModel, config: RunConfig, data: DataParts) -> Ids | None:
    """Return how many bytes each id stands for, by the tokenizer that is saved with the model.

    None: it is unknown, as in training. One that came with the first weights may not be the data's.
    """
    file, vocabulary = model.source / TOKENIZER_FILE, int(model.network.config.vocab_size)
    if not (config.data.tokenizer_is_readable and file.is_file()):
        return None
    content = file.read_bytes()
    check_vocabulary(content, vocabulary=vocabulary, where=str(file))
    ends = config.data.document_id, config.data.separator_id, data.manifest.end_of_text_id
    end = next((number for number in ends if number is not None), None)
    tokenizer = as_transformers(content, end_of_text_id=end, max_length=1, file=file)
    return byte_lengths(tokenizer, vocabulary=vocabulary, ends=ends)
