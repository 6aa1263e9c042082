"""Evaluation between steps: validation loss, tasks and text samples, each when it is due."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from refocused.data.loader.batch import IGNORED_LABEL
from refocused.data.loader.loader import ReadAhead
from refocused.evaluate.continuations import Continuation, score_all, tensors_of
from refocused.train.step.guards import fetch_together

if TYPE_CHECKING:
    from refocused.data.loader.batch import Batch
    from refocused.engine.engine import Engine
    from refocused.system.world import World
    from refocused.train.step.loop import Parts
    from refocused.train.step.state import TrainState
    from refocused.train.step.stopping import StopRequest

TOP_K = 40
BATCHES_READY = 2


def evaluate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure what is due after a step, and everything after the last; a stop cuts it short.

    Tasks and samples do not decide which step is the best.
    """
    last = state.step == parts.total_steps
    with parts.world.progress.doing("validation"):
        if last or parts.cadence.due("validation", state.step):
            state = _validate(parts, state, stop)
        state = _evaluate_tasks(parts, state, stop)
        if not last and parts.cadence.due("sample", state.step):  # the last one comes at the end
            _write_sample(parts, state, stop)
    return state


def evaluate_at_start(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Write a sample with untrained weights, or measure what a stop left out after a saved step.

    A validation is also made if the checkpoint's was of another set, so that there is a best one of
    the present set. The marker of the checkpoint gets the loss, which may be the best.
    """
    with parts.world.progress.doing("validation"):
        if not state.step:
            _write_sample(parts, state, stop)
            return state
        due = state.step == parts.total_steps or parts.cadence.due("validation", state.step)
        sets = {state.validation_set or parts.validation_set, parts.validation_set}
        has_changed = bool(parts.cadence.validation and parts.validation_set and len(sets) > 1)
        if has_changed:
            parts.reporter.event(
                "validation_set",
                "  best     the validation set has changed: losses are not compared with the best "
                f"so far, {state.best_loss} at step {state.best_step}",
            )
        if has_changed or (due and state.validation_step != state.step):
            state = _validate(parts, state, stop)
            parts.saver.record_validation(state)
        return state if state.tasks_step == state.step else _evaluate_tasks(parts, state, stop)


def _write_sample(parts: Parts, state: TrainState, stop: StopRequest) -> None:
    if parts.sampler is not None and not stop.agreed():
        text = parts.sampler.write(parts.engine, stopping=stop.agreed)
        seconds = parts.throughput.lap("sample")
        if text is not None:
            parts.reporter.sample(state, text, seconds)


def _validate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    loss = validation_loss(parts, stop)
    seconds = parts.throughput.lap("validation")
    if loss is None:
        return state
    state = state.after_validation(loss.mean, of=parts.validation_set)
    parts.reporter.validation(state, seconds, loss.by_source)
    return state


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Mean losses, nats a token: over all sequences of all ranks, and of each source."""

    mean: float
    by_source: dict[str, float]


class LossSums:
    """Sums the losses of this rank's batches, by source."""

    def __init__(self) -> None:
        self._sums: dict[str | None, list[float]] = {}  # total loss, tokens

    def add(self, batch: Batch, loss: Tensor) -> None:
        """Add a batch with the mean loss over its tokens."""
        on_device = loss.double(), (batch.labels != IGNORED_LABEL).sum()
        mean, counted = torch.stack(on_device).tolist()  # read together: the host waits once
        own = self._sums.setdefault(batch.source, [0.0, 0.0])
        own[0] += mean * counted
        own[1] += counted

    def mean(self, world: World) -> ValidationLoss | None:
        """Return the mean losses over all ranks, None without data; every rank must call."""
        # Every rank has batches of the same sources, in the same order.
        flat = world.total([number for own in self._sums.values() for number in own])
        losses, tokens = flat[0::2], flat[1::2]
        if not sum(tokens):
            return None
        return ValidationLoss(
            mean=sum(losses) / sum(tokens),
            by_source={
                name: total / counted
                for name, total, counted in zip(self._sums, losses, tokens, strict=True)
                if name is not None and counted
            },
        )


def validation_loss(parts: Parts, stop: StopRequest) -> ValidationLoss | None:
    """Return the losses over all ranks; None without data or when asked to stop."""

    def one_by_one() -> Iterator[list[Batch]]:
        yield from ([batch] for batch in parts.validation_batches())
        yield []

    losses = LossSums()
    with contextlib.closing(ReadAhead(one_by_one(), ready=BATCHES_READY)) as ahead:
        while batches := fetch_together(parts.world, ahead.take, stop):
            (batch,) = batches
            losses.add(batch, parts.engine.validation_loss(batch.input_ids, batch.labels))
            if stop.agreed():
                return None
    return None if batches is None else losses.mean(parts.world)


def _evaluate_tasks(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    due = state.step == parts.total_steps or parts.cadence.due("tasks", state.step)
    if not (parts.tasks and due) or stop.agreed():
        return state

    def score(batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        return parts.engine.label_scores(*tensors_of(batch), vocabulary=parts.vocabulary)

    results = []
    for task in parts.tasks:
        scored = score_all(
            task.continuations,
            score,
            rows=len(task.continuations),
            tokens=parts.plan.micro_batch_size
            * parts.plan.sequence_length,  # at most a training batch's
            world=parts.world,
            stopping=lambda: bool(stop.agreed()),
        )
        if scored is None:
            parts.throughput.lap("tasks")
            return state
        results.append(task.result(scored))
    state = dataclasses.replace(state, tasks_step=state.step)
    parts.reporter.tasks(state, results, parts.throughput.lap("tasks"))
    return state


@dataclasses.dataclass(frozen=True, slots=True)
class TextSampler:
    """Continues a prompt by up to `tokens` tokens, always from the same seed."""

    tokenizer: Any  # a transformers tokenizer
    prompt: str  # text to continue; not empty
    tokens: int
    context_tokens: int  # longest context that the model is trained on
    seed: int
    temperature: float

    def write(
        self, engine: Engine, *, stopping: Callable[[], object] = lambda: False
    ) -> str | None:
        """Return the prompt and its continuation, up to the end of a text; every rank must call.

        Only ids that the tokenizer knows are drawn, not the vocabulary's padding. `stopping` is
        called before each token, alike on all ranks; once it is true, None is returned.
        """
        generator = torch.Generator().manual_seed(self.seed)
        known = torch.tensor(sorted(self.tokenizer.get_vocab().values()))
        ids = list(self.tokenizer(self.prompt)["input_ids"])
        begins, end = len(ids), self.tokenizer.eos_token_id
        with engine.weights_gathered():
            # All tokens on all ranks: their numbers may differ in the last digits.
            for _ in range(self.tokens):
                if stopping():
                    return None
                context = torch.tensor([ids[-self.context_tokens :]])
                logits = engine.next_token_logits(context)[0].cpu()[known]
                best = torch.topk(logits / self.temperature, k=min(TOP_K, len(known)))
                drawn = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
                ids.append(int(known[best.indices[drawn]]))
        ends = ids.index(end, begins) if end in ids[begins:] else len(ids)
        text: str = self.tokenizer.decode(ids[:ends])
        return text
