"""What is measured between steps: the validation loss, tasks, a sample, each when it is due."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from refocused.config.outputs import EvaluationConfig
from refocused.engine.engine import Engine
from refocused.evaluate.continuations import Continuation, Encoder, tensors_of
from refocused.evaluate.multiple_choice import Examination, TaskResult, prepare
from refocused.evaluate.tasks import find_tasks, read_questions
from refocused.system.errors import ConfigError, EvaluationError
from refocused.system.world import World
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest
from refocused.train.step.validation import validate


@dataclasses.dataclass(frozen=True, slots=True)
class EngineScorer:
    """The model that is trained, as a scorer of tokens.

    Attributes:
        engine: Of the model.
        vocabulary: Ids that can be predicted, without the padding.
    """

    engine: Engine
    vocabulary: int

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities and counts of misses; every rank must call."""
        return self.engine.label_scores(*tensors_of(batch), vocabulary=self.vocabulary)


def evaluate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure what is due after a step, and everything after the last; a stop cuts it short.

    Tasks and samples do not change what is kept as the best step.
    """
    last = state.step == parts.total_steps
    if last or parts.cadence.validation_due(state.step):
        state = validate(parts, state, stop)
    state = _put_tasks(parts, state, stop)
    # The last step's sample belongs to the summary.
    sample_due = not last and parts.cadence.sample_due(state.step)
    if parts.sampler is not None and sample_due and not stop.agreed():
        text = parts.sampler.write(parts.engine, stopping=stop.agreed)
        seconds = parts.throughput.lap("sample")
        if text is not None:
            parts.reporter.sample(state, text, seconds)
    return state


def make_up_evaluation(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure what a run that was stopped after its last saved step had no time for.

    That is the validation and the tasks, where they were due. Results are reported; the saved step
    stays as it is, for step directories are never written again.
    """
    due = state.step == parts.total_steps or parts.cadence.validation_due(state.step)
    if due and state.validation_step != state.step:
        state = validate(parts, state, stop)
    return state if state.tasks_step == state.step else _put_tasks(parts, state, stop)


def _put_tasks(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Put and report the tasks where they are due."""
    due = state.step == parts.total_steps or parts.cadence.tasks_due(state.step)
    if not (parts.tasks and due) or stop.agreed():
        return state
    results = take_tasks(parts, stop)
    seconds = parts.throughput.lap("tasks")
    if results is None:
        return state
    state = dataclasses.replace(state, tasks_step=state.step)
    parts.reporter.tasks(state, results, seconds)
    return state


def take_tasks(parts: Parts, stop: StopRequest) -> list[TaskResult] | None:
    """Put all tasks to the model, shared by the ranks; None when stopped.

    A batch holds as many tokens as one of training at most.
    """
    scorer = EngineScorer(parts.engine, parts.vocabulary)
    results = []
    for examination in parts.tasks:
        result = examination.take(
            scorer,
            rows=len(examination.continuations),
            tokens=parts.plan.micro * parts.plan.sequence_length,
            world=parts.world,
            stopping=lambda: bool(stop.agreed()),
        )
        if result is None:
            return None
        results.append(result)
    return results


def prepare_tasks(
    settings: EvaluationConfig,
    *,
    tokenizer: Any,
    context_tokens: int,
    vocabulary: int,
    world: World,
) -> Sequence[Examination]:
    """Read and encode the tasks of a run; rank 0 reads, every rank must call.

    Args:
        settings: Which tasks, and how many items of each.
        tokenizer: transformers' own class; None where there are no tasks.
        context_tokens: Longest context that the model is trained on.
        vocabulary: Ids that the model knows.
        world: The ranks.

    Raises:
        ConfigError: On every rank: a task cannot be put; nothing has been trained then.
    """
    if not settings.tasks:
        return ()

    def read() -> list[Examination]:
        try:
            encoder = Encoder(tokenizer, context_tokens=context_tokens, vocabulary=vocabulary)
            return [
                prepare(task.name, read_questions(task, limit=settings.task_items), encoder)
                for task in find_tasks(settings.tasks, data=None)
            ]
        except (ConfigError, EvaluationError) as error:
            raise ConfigError(f"evaluation.tasks: {error}") from None

    return world.on_rank_0(read)
