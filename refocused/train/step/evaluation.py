"""Evaluation between steps: validation loss, tasks and text samples, each when it is due."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.config.outputs import EvaluationConfig
from refocused.data.loader.batch import Batch
from refocused.data.loader.prefetch import ReadAhead
from refocused.engine.engine import Engine
from refocused.evaluate.continuations import Continuation, Encoder, tensors_of
from refocused.evaluate.multiple_choice import Examination, TaskResult, prepare
from refocused.evaluate.tasks import find_tasks, read_questions
from refocused.system.errors import ConfigError, EvaluationError, TrainingError
from refocused.system.world import World
from refocused.train.step.guards import fetch_together
from refocused.train.step.loss_check import SavedLoss, measure_windows
from refocused.train.step.loss_sums import LossSums, ValidationLoss
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest

TEMPERATURE = 0.8
TOP_K = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Continues a prompt, always by the same draws.

    Attributes:
        tokenizer: transformers' own class.
        prompt: Text to continue; not empty.
        tokens: Tokens to write at most.
        context_tokens: Longest context that the model is trained on.
        seed: Of the draws.
    """

    tokenizer: Any
    prompt: str
    tokens: int
    context_tokens: int
    seed: int

    def write(
        self, engine: Engine, *, stopping: Callable[[], object] = lambda: False
    ) -> str | None:
        """Return the prompt and its continuation, up to the end of a text; every rank must call.

        Ids without a meaning, such as the vocabulary's padding, are never drawn.

        Args:
            engine: Of the model.
            stopping: Asked before each token, alike on all ranks; a true answer ends it.

        Returns:
            None when stopped.
        """
        generator = torch.Generator().manual_seed(self.seed)
        known = torch.tensor(sorted(self.tokenizer.get_vocab().values()))
        ids = list(self.tokenizer(self.prompt)["input_ids"])
        begins = len(ids)
        with engine.weights_held():
            for _ in range(self.tokens):
                if stopping():
                    return None
                context = torch.tensor([ids[-self.context_tokens :]])
                logits = engine.next_token_logits(context)[0].cpu()
                ids.append(_drawn(logits, known, generator))
        # Drawn to the end by all ranks, whose numbers may differ in their last digits.
        written = _until(ids[begins:], self.tokenizer.eos_token_id)
        text: str = self.tokenizer.decode([*ids[:begins], *written])
        return text


def _drawn(logits: Tensor, known: Tensor, generator: torch.Generator) -> int:
    """Draw an id out of the likeliest known ones."""
    best = torch.topk(logits[known] / TEMPERATURE, k=min(TOP_K, len(known)))
    drawn = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
    return int(known[best.indices[drawn]])


def _until(ids: Sequence[int], end: int | None) -> list[int]:
    return list(ids[: ids.index(end)] if end in ids else ids)


BATCHES_READY = 2
FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1 of the formula


def validate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure and report the validation loss; a state without one when a stop cuts it short."""
    loss = validation_loss(parts, stop)
    seconds = parts.throughput.lap("validation")
    if loss is None:
        return state
    state = state.after_validation(loss.mean)
    parts.reporter.validation(state, seconds, loss.by_source)
    return state


def validation_loss(parts: Parts, stop: StopRequest) -> ValidationLoss | None:
    """Return the losses over all ranks; None without data or when asked to stop."""
    losses = LossSums()
    with contextlib.closing(ReadAhead(_one_by_one(parts), ready=BATCHES_READY)) as ahead:
        while batches := fetch_together(parts.world, ahead.take, stop):
            (batch,) = batches
            losses.add(batch, parts.engine.validation_loss(batch.input_ids, batch.labels))
            if stop.agreed():
                return None
    return None if batches is None else losses.mean(parts.world)


def _one_by_one(parts: Parts) -> Iterator[list[Batch]]:
    """Yield each validation batch, and nothing in the end."""
    yield from ([batch] for batch in parts.validation_batches())
    yield []


def check_first_loss(parts: Parts) -> float:
    """Return the untrained model's loss on random tokens.

    Random, because in real text the next token is often the same again, which a tied head finds
    likely even before it has learned anything.

    Raises:
        TrainingError: It is far from `untrained_loss`: the weights are not initialised
            as they should be. Nothing trained from there could be trusted.
    """
    generator = torch.Generator().manual_seed(parts.world.rank)
    tokens = torch.randint(
        parts.vocabulary_rows, (1, parts.plan.sequence_length + 1), generator=generator
    )
    mine = parts.engine.validation_loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss = parts.world.total([float(mine)])[0] / parts.world.world_size
    if not abs(loss - parts.untrained_loss) <= FIRST_LOSS_TOLERANCE:
        raise TrainingError(
            f"The untrained model's loss on random tokens is {loss:.3f}; with ln(V) = "
            f"{math.log(parts.vocabulary_rows):.3f} it should be {parts.untrained_loss:.3f} within "
            f"{FIRST_LOSS_TOLERANCE}. The weights are not initialised as they should be; nothing "
            "was trained. Check initializer_range in the model's JSON."
        )
    return loss


def check_resumed_loss(parts: Parts, saved: SavedLoss | None, *, allowed: bool) -> None:
    """Compare the loss of the loaded model with the saved one; every rank must call.

    Args:
        parts: The run's parts.
        saved: What the checkpoint records.
        allowed: Whether the user has allowed a change of the model, the data or the precision.

    Raises:
        TrainingError: On every rank: a trained model was saved, and an untrained one was loaded.
    """
    if saved is None:
        return
    shape = parts.plan.micro, parts.plan.sequence_length
    measured = statistics.fmean(measure_windows(parts.engine, saved.windows, shape=shape))
    loss = parts.world.broadcast(measured)
    facts = {"loss": loss, "saved_loss": saved.mean, "tolerance": saved.tolerance}
    if abs(loss - saved.mean) <= saved.tolerance:
        text = f"  loss     {loss:.4f} on windows of the saved step, {saved.mean:.4f} at the save"
        parts.reporter.event("resumed_loss", text, **facts)
        return
    text = (
        f"The loaded model has a loss of {loss:.3f} on windows of the saved step; at the save it "
        f"was {saved.mean:.3f}, and +-{saved.tolerance:.3f} is usual."
    )
    least = parts.untrained_loss - FIRST_LOSS_TOLERANCE
    if not allowed and saved.mean < least and not loss < least:
        error = TrainingError(
            f"{text} An untrained model has about {parts.untrained_loss:.3f}: the trained weights "
            "were not loaded. Nothing was changed. Resume from another checkpoint (--resume STEP)."
        )
        error.on_every_rank = True
        raise error
    parts.reporter.event("resumed_loss_warning", text, **facts)


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
