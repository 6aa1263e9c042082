"""What tasks and samples take of a run, counted before it begins and without a tokenizer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from refocused.config.run_config import RunConfig
from refocused.estimate.run_cost import SampleWork
from refocused.estimate.step_time import HOST_SECONDS_A_LAYER
from refocused.evaluate.tasks import TaskFile, find_tasks, read_questions

# Assumed of any tokenizer but `bytes`; GPT-2's takes 4.5 of HellaSwag's into a token.
BYTES_A_TOKEN = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TaskWork:
    """What one task takes of the model.

    Attributes:
        name: Of the task.
        items: Questions that are put.
        tokens: Of all their endings with their contexts: what passes through the model each time.
    """

    name: str
    items: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class TasksWork:
    """What the tasks of a run take of the model.

    Attributes:
        counted: Those whose files are here.
        missing: Those whose files are not, as the run file names them: nothing is known of them.
    """

    counted: tuple[TaskWork, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of putting all that were counted once."""
        return sum(task.tokens for task in self.counted)


def tasks_work(config: RunConfig) -> TasksWork:
    """Count what the tasks of a run take.

    Raises:
        ConfigError: Two tasks have the same name.
        EvaluationError: A file is broken.
    """
    requests = config.evaluation.tasks
    missing = [one for one in requests if not Path(one.rpartition("=")[2]).expanduser().is_file()]
    here = find_tasks([one for one in requests if one not in missing], data=None)
    return TasksWork(tuple(_counted(task, config) for task in here), tuple(missing))


def sample_work(config: RunConfig, *, layers: int, stage: int) -> SampleWork | None:
    """Return what a sample of a run takes; None: it writes none.

    The host's time is what it needs for a pass of training, and so rather too much.

    Args:
        config: The run.
        layers: Of the model.
        stage: Of ZeRO.
    """
    evaluation = config.evaluation
    if evaluation.sample_prompt is None:
        return None
    middle = _tokens(evaluation.sample_prompt, config) + evaluation.sample_tokens // 2
    return SampleWork(
        tokens=evaluation.sample_tokens,
        context_tokens=min(config.model.sequence_length, middle),
        host_seconds=layers * HOST_SECONDS_A_LAYER[stage],
    )


def _counted(task: TaskFile, config: RunConfig) -> TaskWork:
    """Count a task; contexts that are too long for the model lose their beginning."""
    questions = read_questions(task, limit=config.evaluation.task_items)
    texts = [f"{one.context} {ending}" for one in questions for ending in one.endings]
    longest = config.model.sequence_length
    tokens = sum(min(longest, _tokens(text, config)) for text in texts)
    return TaskWork(task.name, len(questions), tokens)


def _tokens(text: str, config: RunConfig) -> int:
    """Return about how many tokens a text is."""
    each = 1 if config.data.tokenizer == "bytes" else BYTES_A_TOKEN
    return math.ceil(len(text.encode()) / each)
