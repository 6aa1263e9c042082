"""Build the text parts of a run: tokenizer, tasks, text samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from refocused.config.run_config import RunConfig
from refocused.evaluate.continuations import Encoder
from refocused.evaluate.multiple_choice import Examination, prepare
from refocused.evaluate.tasks import find_tasks, read_questions
from refocused.system.errors import ConfigError, EvaluationError
from refocused.system.world import World
from refocused.tokenizers.encoders import TokenizerChoice, tokenizer_errors
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE, as_transformers, tokenizer_file
from refocused.train.step.evaluation import TextSampler


@dataclasses.dataclass(frozen=True, slots=True)
class TextParts:
    """The same on every rank."""

    tokenizer_json: bytes | None  # stored in the checkpoints; None if the run names no files
    tasks: Sequence[Examination] = ()  # tasks to evaluate
    sampler: TextSampler | None = None  # writes text samples; None if the run has no prompt


def build_texts(config: RunConfig, *, vocabulary: int, world: World) -> TextParts:
    """Read tokenizer and tasks on rank 0; all ranks call, and raise if one does not fit."""
    data, evaluation = config.data, config.evaluation
    context_tokens = config.model.sequence_length

    def read_tokenizer() -> bytes | None:
        if not data.tokenizer_is_readable:
            return None
        return tokenizer_file(TokenizerChoice.of_data(data), vocabulary=vocabulary)

    content = world.on_rank_0(read_tokenizer)
    if content is None or not (evaluation.tasks or evaluation.sample_prompt):
        return TextParts(content)
    ends = (data.document_id, data.separator_id)
    tokenizer = as_transformers(
        content,
        end_of_text_id=next((number for number in ends if number is not None), None),
        max_length=context_tokens,
    )

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
    return TextParts(content, tasks, _sampler(config, tokenizer))


def _sampler(config: RunConfig, tokenizer: Any) -> TextSampler | None:
    evaluation, prompt = config.evaluation, config.evaluation.sample_prompt
    if prompt is None:
        return None
    with tokenizer_errors(TOKENIZER_FILE):
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ConfigError(
            f"evaluation.sample_prompt {prompt!r} has no token of data.tokenizer. Write a prompt "
            "of its words."
        )
    tokens, temperature = evaluation.sample_tokens, evaluation.sample_temperature
    length, seed = config.model.sequence_length, config.run.seed
    return TextSampler(tokenizer, prompt, tokens, length, seed, temperature)
