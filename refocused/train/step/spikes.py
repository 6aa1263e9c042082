"""Find spikes of the loss and the gradient norm, and do what `run.on_spike` says."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from refocused.data.order.sequences import Position
from refocused.engine.finite_updates import Limits
from refocused.system.errors import TrainingError

if TYPE_CHECKING:
    from refocused.config.run_config import RunConfig
    from refocused.data.order.mixture_order import Mixture
    from refocused.data.order.sequence_order import Order
    from refocused.train.step.guards import StepTaken

# docs/decisions/engine.md gives the false alarms with these values on real and simulated curves.
WINDOW = 128  # steps that a step is compared with
LEAST_STEPS = 64  # with fewer, no step is judged
LAG = 2  # steps; the host reads a step's figures while the next one is computed
DEVIATIONS = 8.0  # above the median, in standard deviations
NORMAL = 1.4826  # standard deviation of normal values, in median absolute deviations
LEAST_RISE = 0.1  # nats above the median loss
LEAST_FACTOR = 2.0  # times the median norm
MOST_SKIPPED = 5  # updates in a row; the shuffle scatters bad sequences
SHORT: Any = {"width": 400, "placeholder": " ... (all in logs/events.jsonl)"}  # names in the log


class SpikeError(TrainingError):
    """The run should go back to `good_step` or before, without `sequences`; on every rank."""

    on_every_rank = True
    step = good_step = 0  # of the spike; the last one that may be kept
    sequences = range(0)  # to leave out, in numbers of the stream
    names = ""  # their shards, and places there


class JudgedStep(NamedTuple):
    """What is kept of a step; saved in `trainer.json`."""

    step: int
    first_sequence: int  # number of its first sequence in the stream
    loss: float  # mean over all ranks, in nats a token
    norm: float | None  # of the whole gradient before clipping; None: unknown
    spiked: bool


def limits_after(steps: Sequence[JudgedStep]) -> Limits:
    """Return the limits for a step from the ones before it; infinite with too few."""
    losses = [step.loss for step in steps]
    norms = [math.log(step.norm) for step in steps if step.norm]
    norm = math.exp(_limit(norms, least=math.log(LEAST_FACTOR)))
    return Limits(_limit(losses, least=LEAST_RISE), norm)


def _limit(values: Sequence[float], *, least: float) -> float:
    """Return the limit above noise; spikes among the values, up to half of them, do not count."""
    if len(values) < LEAST_STEPS:
        return math.inf
    median = statistics.median(values)
    deviation = NORMAL * statistics.median(abs(value - median) for value in values)
    return median + max(DEVIATIONS * deviation, least)


class SpikeWatch:
    """Judges every step by those before it; all ranks call alike, and decide alike.

    The limits of step N come from the steps up to N - `LAG`, even if the host has read later ones.
    So they are the same in an interrupted run, and on another number of ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        order: Order | Mixture,
        *,
        report: Callable[..., None],  # takes the kind of an event, its text and its facts
    ) -> None:
        self._action, self._report = config.run.on_spike, report
        self._warmup_steps = config.schedule.warmup_steps  # of the learning rate; not judged
        self._order, self._number_of = order, order.stream_from(Position()).number_of
        self.steps = collections.deque[JudgedStep](maxlen=WINDOW + LAG)

    def limits(self, step: int) -> Limits:
        """Return the limits for a step, from 1."""
        if step <= self._warmup_steps:
            return Limits()
        limits = limits_after([s for s in self.steps if step - WINDOW < s.step + LAG <= step])
        return limits._replace(skips=self._action == "skip")

    def settle(self, taken: StepTaken) -> None:
        """Take a step whose update was finite, and act on a spike.

        Raises:
            SpikeError: The run should go back.
            TrainingError: Too many updates in a row were skipped.
        """
        figures = taken.outcome.figures()
        if figures is None:
            return
        spiked = bool(figures.loss_spiked or figures.norm_spiked)
        sequences = range(self._number_of(taken.before), self._number_of(taken.after))
        norm = None if math.isnan(figures.norm) else figures.norm
        self.steps.append(JudgedStep(taken.step, sequences.start, figures.loss, norm, spiked))
        if not spiked:
            return
        limits = self.limits(taken.step)
        text = (
            f"Spike at step {taken.step:,}: loss {figures.loss:.4f} (limit {limits.loss:.4f}), "
            f"gradient norm {figures.norm:.4g} (limit {limits.norm:.4g})"
        )
        judged = list(self.steps)
        if self._action == "rewind" and figures.loss_spiked:
            error = SpikeError(text)
            # The update of the step before made the weights that have this loss.
            last = [step for step in judged if step.step >= taken.step - 1]
            error.step, error.good_step = taken.step, last[0].step - 1
            error.sequences = range(last[0].first_sequence, sequences.stop)
            error.names = self._names(error.sequences, taken)
            raise error
        skips = self._action == "skip"
        if skips and all(step.spiked for step in judged[-MOST_SKIPPED:]):
            raise TrainingError(
                f"{text}. {MOST_SKIPPED} updates in a row were skipped: the data has become harder "
                "for good, or the weights have diverged. The last checkpoint is good. Resume with "
                "run.on_spike=warn, or with a lower optimizer.lr."
            ).agreed()
        if not skips and judged[-2].spiked:
            return  # the first of a row was reported
        names = self._names(sequences, taken)
        self._report(
            "spike_warning",
            f"{text}. Its update was {'skipped' if skips else 'made'}. Sequences "
            f"stream[{sequences.start}:{sequences.stop}]: {textwrap.shorten(names, **SHORT)}",
            **{"step": taken.step, "action": self._action, "names": names},
            sequences=[sequences.start, sequences.stop],
            **figures._asdict(),
            limits=limits[:2],
        )

    def _names(self, sequences: range, taken: StepTaken) -> str:
        """Name the shards of sequences of the stream, and the sequences there."""
        located = self._order.stream_from(taken.before).locate(np.array(sequences))
        batch, shards = taken.micro_batches[0], located.shards
        return dataclasses.replace(batch, shards=shards, sequences=located.sequences).describe()

    def restore(self, steps: Iterable[JudgedStep]) -> None:
        """Continue after these steps."""
        self.steps = collections.deque(steps, maxlen=WINDOW + LAG)
