"""What a run needs to read and write text: its tokenizer, its tasks, its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from refocused.config.data import DataConfig
from refocused.config.outputs import EvaluationConfig
from refocused.evaluate.multiple_choice import Examination
from refocused.system.errors import ConfigError
from refocused.system.world import World
from refocused.tokenizers.encoders import TokenizerChoice, tokenizer_faults
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE, as_transformers, tokenizer_file
from refocused.train.step.evaluation import Sampler, prepare_tasks


@dataclasses.dataclass(frozen=True, slots=True)
class TextParts:
    """The same on every rank.

    Attributes:
        tokenizer_json: What travels in the checkpoints; None where the run names no files of it.
        tasks: Questions that are put to the model.
        sampler: Lets the model write; None: it is not asked to.
    """

    tokenizer_json: bytes | None
    tasks: Sequence[Examination]
    sampler: Sampler | None


def build_texts(
    data: DataConfig,
    evaluation: EvaluationConfig,
    *,
    vocabulary: int,
    context_tokens: int,
    seed: int,
    world: World,
) -> TextParts:
    """Read the tokenizer and the tasks on rank 0; every rank must call.

    Args:
        data: Names the tokenizer.
        evaluation: Names the tasks and the prompt.
        vocabulary: Ids that the model knows.
        context_tokens: Longest context that it is trained on.
        seed: Of the samples.
        world: The ranks.

    Raises:
        RefocusedError: On every rank: the tokenizer or a task does not fit the model.
    """
    content = world.on_rank_0(lambda: _read_tokenizer(data, vocabulary))
    if content is None or not (evaluation.tasks or evaluation.sample_prompt):
        return TextParts(content, (), None)
    ends = (data.document_id, data.separator_id)
    tokenizer = as_transformers(
        content,
        end_of_text_id=next((number for number in ends if number is not None), None),
        max_length=context_tokens,
    )
    tasks = prepare_tasks(
        evaluation,
        tokenizer=tokenizer,
        context_tokens=context_tokens,
        vocabulary=vocabulary,
        world=world,
    )
    return TextParts(content, tasks, _sampler(evaluation, tokenizer, context_tokens, seed))


def _read_tokenizer(data: DataConfig, vocabulary: int) -> bytes | None:
    """Read the tokenizer that travels in the checkpoints; None where the run names no files."""
    if not data.tokenizer_is_readable:
        return None
    return tokenizer_file(TokenizerChoice.of_data(data), vocabulary=vocabulary)


def _sampler(
    evaluation: EvaluationConfig, tokenizer: Any, context_tokens: int, seed: int
) -> Sampler | None:
    if evaluation.sample_prompt is None:
        return None
    with tokenizer_faults(TOKENIZER_FILE):
        ids = tokenizer(evaluation.sample_prompt)["input_ids"]
    if not ids:
        raise ConfigError(
            f"evaluation.sample_prompt {evaluation.sample_prompt!r} has no token of "
            "data.tokenizer. Write a prompt of its words."
        )
    return Sampler(
        tokenizer,
        prompt=evaluation.sample_prompt,
        tokens=evaluation.sample_tokens,
        context_tokens=context_tokens,
        seed=seed,
    )
