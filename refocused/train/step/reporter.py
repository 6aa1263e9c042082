"""Reports of a run: log lines, metrics, events, and `state.json`."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refocused.config.prices import cost_usd
from refocused.data.order.sequences import Position
from refocused.metrics.history import EVENTS_FILE, METRICS_FILE, StepMetrics, perplexity, unix_time
from refocused.metrics.jsonl import JsonLines, JsonLinesTail, utc_now, write_state
from refocused.metrics.rank_times import RankTimes, Row
from refocused.metrics.run_time import FINISHED, PERFORMANCE_FILE, RunTime, RunTimeReader, TimeSpent
from refocused.metrics.trackers import END, Histogram, Record, Trackers
from refocused.system.errors import counted
from refocused.system.number_text import duration, known
from refocused.system.processes import session_record

if TYPE_CHECKING:
    from refocused.evaluate.continuations import ValidationLoss
    from refocused.evaluate.multiple_choice import TaskResult
    from refocused.system.world import World
    from refocused.train.step.loop import Trainer
    from refocused.train.step.state import TrainState

logger = logging.getLogger(__name__)

TRACKERS_END_S = 5.0  # limit for closing the trackers of a run that failed
SAMPLES_FILE, SAMPLES_BYTES = Path("logs") / "gpu_metrics.jsonl", 1 << 16  # its last lines


class Reporter:
    """Writes on rank 0; every rank must call, because figures are gathered."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        mfu: Callable[[float], float | None],
        possible_mfu: float = 1.0,
        dry_run: bool = False,
        command_began_seconds: float | None = None,
        more_of_state: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """Open the run's files on rank 0; a dry run writes none, and only logs.

        `mfu` is that of tokens a second (None: the GPU is unknown); one beyond the possible is not
        reported. Whenever `state.json` is written, it gets `more_of_state` too. The command, which
        may have started other ranks before this one, began at a monotonic time.
        """
        self._trainer, self._meter, self._world = trainer, trainer.meter, trainer.world
        self._mfu, self._possible_mfu = mfu, possible_mfu
        self._number_of = trainer.data.order.stream_from(Position()).number_of
        self._before = self._totals(0.0)
        self._rank_times = RankTimes()
        self._times = RunTimeReader(trainer.folder)
        self._reported_step = 0
        self._command_began_seconds = command_began_seconds
        self._seconds_before = self._unrecorded_seconds = 0.0
        self._cost_before: float | None = None
        self._has_doubted_mfu = self._start_is_due = False
        self._is_done = False  # by a session before this one, which thus takes no time
        self._latest: TrainState | None = None
        self._session_began = utc_now()
        self._more_of_state = more_of_state
        self._trackers: Trackers | None = None
        self._files = {
            name: JsonLines(trainer.folder / name)
            for name in (METRICS_FILE, PERFORMANCE_FILE, EVENTS_FILE)
            if trainer.world.is_rank_0 and not dry_run
        }

    def begin(self, state: TrainState) -> None:
        """Count this session's time and money on top of what the run took before it.

        A state knows the time until it was saved. The run's own file also knows of the time after
        that, which a rewind discards and which is paid for all the same. No file knows of the time
        from its last line to the end of a hang or to a crash, and from there to this session where
        the same command restarted the ranks: the machine was in use.
        """
        before, session = self.run_time(), self._meter.session_seconds
        began, now = self._command_began_seconds, time.time()
        used = session if began is None else max(session, time.monotonic() - began)
        if before.ended is not None:
            samples = JsonLinesTail(
                self._trainer.folder / SAMPLES_FILE, last_bytes=SAMPLES_BYTES
            ).records()
            times = [unix_time(sample.get("time")) or 0.0 for sample in samples]
            alive = max((at for at in times if at < now - used), default=0.0)  # the session before
            used = min(used, max(0.0, now - before.ended)) + max(0.0, alive - before.ended)
        self._unrecorded_seconds = max(0.0, used - session)
        self._seconds_before = max(state.seconds, before.seconds_trained or 0.0)
        known = [cost for cost in (state.cost_usd, before.cost_usd) if cost is not None]
        self._cost_before = max(known, default=None)
        total = self._trainer.total_steps
        self._is_done = before.is_finished and state.step >= total
        if self._is_done:
            length = self._trainer.config.run.length.partition(" ")[0]
            text = f"time and cost stay as they are. Raise {length} to train on."
            self.event("done_before", f"  finished all {total:,} steps were made before; {text}")

    def track(self, trackers: Trackers) -> None:
        """Also send all further records to these trackers; only rank 0 calls this."""
        self._trackers = trackers

    def start(self, state: TrainState) -> None:
        """Mark the end of start-up, whose phases are reported after the session's first step."""
        self._meter.lap("start_up")
        self._start_is_due, self._reported_step = not self._meter.steps, state.step
        self._before = self._totals(0.0)  # batches are waited for anew
        spent = self._meter.time_spent(waited_seconds=0.0)
        self._record_time("session", self.booked(state), spent)

    def go_back(self, state: TrainState) -> None:
        """Book the time until `state`, which is given up for an earlier one."""
        self._record_time("time", self.booked(state), self._meter.time_spent())

    def end(self, state: TrainState) -> TrainState:
        """Mark the end of the run's last wait; return the state with all its time booked.

        Trackers get this cost in place of the last step's.
        """
        self._meter.lap("ending")
        state, spent = self.booked(state), self._meter.time_spent()
        is_finished = state.step >= self._trainer.total_steps
        self._record_time("time", state, spent, **({FINISHED: True} if is_finished else {}))
        self._track_end(state)
        return state

    def run_time(self) -> RunTime:
        """Return how the time of all sessions was spent, from the run's file."""
        return self._times.read() if self._world.is_rank_0 else RunTime()

    def booked(self, state: TrainState) -> TrainState:
        """Return a state with this session's time and money added."""
        session = self._meter.session_seconds + self._unrecorded_seconds
        if self._is_done:
            session = 0.0
        cost, more = self._cost_before, cost_usd(session, self._trainer.config.cost.per_hour_usd)
        if more is not None:
            cost = (cost or 0.0) + more
        return dataclasses.replace(state, seconds=self._seconds_before + session, cost_usd=cost)

    def step(
        self, state: TrainState, losses: Sequence[torch.Tensor], waited_seconds: float
    ) -> TrainState:
        """Read the losses from the device, report the step, return the state with its loss.

        `losses` are those of each step since the last log line `[accumulation]`, on the device.
        `waited_seconds` for batches are counted since the session began.
        """
        trainer, meter = self._trainer, self._meter
        read = torch.stack([losses[-1].mean(), torch.cat(list(losses)).mean()]).tolist()
        # The device was up to a step behind the host. It has caught up now.
        meter.lap("step", continued=True)
        spent = meter.time_spent(waited_seconds=waited_seconds)
        rows = meter.step_phases(data_seconds=spent.data_wait_seconds / len(losses))
        metrics, rank_seconds = gather_figures(self._world, read, rows, self._rank_times)
        state = self.booked(dataclasses.replace(state, loss=metrics.loss))
        self._record_time("time", state, spent, **rank_seconds)
        before, self._before = self._before, self._totals(waited_seconds)
        steps, step_seconds, waited, passed = (
            now - earlier for now, earlier in zip(self._before, before, strict=True)
        )
        sequences = trainer.plan.sequences_between(state.step - int(steps), state.step)
        tokens = sequences * trainer.plan.sequence_length
        seconds = step_seconds / steps if steps else None
        left = meter.seconds_left(
            trainer.cadence.ahead(state.step, trainer.total_steps, trainer.plan)
        )
        mfu = self._mfu(tokens / steps / seconds) if seconds else None
        refused = mfu is not None and mfu > self._possible_mfu
        if refused and not self._has_doubted_mfu:
            self._has_doubted_mfu = True
            self.event(
                "mfu_warning",
                f"MFU {mfu:.0%} is more than the GPU's peak allows ({self._possible_mfu:.0%}): the "
                "GPU is not the one that its name says, or steps were not waited for. It is shown "
                "as ?",
            )
        metrics = dataclasses.replace(
            metrics,
            step=state.step,
            total_steps=trainer.total_steps,
            tokens=state.tokens,
            epoch=state.position.epoch,
            best_loss=state.best_loss,
            learning_rate=trainer.rates.at(state.step - 1),
            gradient_norm=trainer.engine.gradient_norm(),
            loss_scale=trainer.engine.loss_scale(),
            skipped_steps=trainer.engine.skipped_steps,
            step_seconds=seconds,
            tokens_per_second=tokens / passed if passed > 0 else None,
            mfu_fraction=None if refused else mfu,
            mfu_refused=refused,
            stream_sequences=self._number_of(state.position),
            goodput_fraction=self.run_time().goodput_fraction,
            data_wait_fraction=min(1.0, waited / passed) if passed > 0 else 0.0,
            seconds_left=left,
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            cost_left_usd=cost_usd(left, trainer.config.cost.per_hour_usd),
        )
        if self._start_is_due:
            self._start_is_due, first = False, state.step - meter.steps + 1
            self.performance("start", first, **meter.start_up.as_record())
            self.event("began", meter.start_up.as_line(first), step=first)
        if self._files:
            length, consumed = trainer.plan.sequence_length, state.position.sources or {}
            progress = {  # of a mixture's sources
                name: {"tokens": consumed[name] * length, "epoch": consumed[name] / epoch}
                for name, epoch in trainer.data.epoch_sequences.items()
                if name in consumed
            }
            self._measured({"kind": "step", **metrics.as_record(), **sources_record(progress)})
            logger.info("%s", metrics.as_line())
            self.write_state(state, "training")
        return state

    def validation(
        self, state: TrainState, seconds: float, by_source: Mapping[str, ValidationLoss]
    ) -> None:
        """Report a validation; `by_source` holds the loss of each source of a mixture."""
        loss, bits = state.validation_loss, state.bits_per_byte
        assert loss is not None
        best = " (best)" if state.best_step == state.step else ""
        sources = "".join(
            f" | {name} {part.mean:.4f}" + known(" bpb {:.4f}", part.bits_per_byte)
            for name, part in by_source.items()
        )
        figures = {
            name: {"validation_loss": part.mean, "bits_per_byte": part.bits_per_byte}
            for name, part in by_source.items()
        }
        self._evaluated(
            state,
            seconds,
            f"eval {state.step:>7,} val {loss:.4f} ppl {perplexity(loss):.2f}"
            f"{known(' bpb {:.4f}', bits)}{best}{sources}",
            kind="validation",
            validation_loss=loss,  # mean over `evaluation.sequences`, nats a token
            perplexity=perplexity(loss),  # exp(validation_loss)
            bits_per_byte=bits,  # of text; null: the tokens' lengths in bytes are unknown
            validation_set=state.validation_set,  # fingerprint of what was validated on
            **sources_record(figures),
        )

    def tasks(self, state: TrainState, results: Sequence[TaskResult], seconds: float) -> None:
        """Report the scores on the run's tasks."""
        scores = " | ".join(scores_text(result) for result in results)
        self._evaluated(
            state,
            seconds,
            f"tasks{state.step:>7,} {scores}",
            kind="tasks",
            tasks={each.task: each.as_record() for each in results},  # scores by task, with items
        )

    def sample(self, state: TrainState, text: str, seconds: float) -> None:
        """Report a text sample; that of step 0 is printed beside the last one."""
        line = f"sample{state.step:>6,} {text!r} | {duration(seconds)}" if state.step else ""
        self.event("sample", line, step=state.step, sample=text, seconds=seconds)
        self._track({"kind": "sample", "step": state.step, "sample": text})

    def histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
        """Send the histograms of a step's weights and gradient to the trackers."""
        self._track({"kind": "histograms", "step": step, "histograms": histograms})

    def performance(self, kind: str, step: int, **figures: object) -> None:
        """Record what something cost; the names of its figures begin with its kind."""
        self._write(PERFORMANCE_FILE, {"kind": kind, "step": step, **figures})  # made then

    def event(self, kind: str, text: str, **facts: object) -> None:
        """Record an event, and log its text unless that is empty."""
        self._write(EVENTS_FILE, {"kind": kind, "text": text, **facts})
        if self._world.is_rank_0 and text:
            level = logging.WARNING if kind.endswith(("failed", "warning")) else logging.INFO
            logger.log(level, "%s", text)

    def write_state(self, state: TrainState, status: str, **facts: object) -> None:
        """Replace `state.json`, from which other programs read the run's progress."""
        self._latest, trainer = state, self._trainer
        if self._world.is_rank_0:
            record = {
                "run": trainer.config.run.name,  # its name
                **trainer.saver.checkpointer.branch.as_record(),
                "status": status,  # starting, training, finished, stopped or failed
                **session_record(),
                "session_began": self._session_began,  # UTC
                "total_steps": trainer.total_steps,  # of the whole run
                **state.as_record(),
                **self._more_of_state(),
                **facts,
            }
            write_state(trainer.folder / "state.json", record)

    def write_failure(self, state: TrainState, error: BaseException, exit_code: int) -> None:
        """Record that the run failed; `state` counts if none was reported since the start."""
        state = self.booked(self._latest or state)
        self._record_time("time", state, self._meter.time_without_use())
        self._track_end(state)
        self.event("failed", "", error=str(error), step=state.step, exit_code=exit_code)
        self.write_state(state, "failed", exit_code=exit_code)
        self.end_tracking(exit_code, limit_seconds=TRACKERS_END_S)

    def end_tracking(self, exit_code: int, *, limit_seconds: float) -> None:
        """Close the trackers, which takes some seconds if the network is slow."""
        trackers, self._trackers = self._trackers, None
        if trackers is not None:
            trackers.close(exit_code, limit_seconds=limit_seconds)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _totals(self, waited_seconds: float) -> tuple[float, float, float, float]:
        """Return this session's steps, and seconds of steps, of waits for batches, and of all."""
        meter = self._meter
        return meter.steps, meter.laps["step"], waited_seconds, meter.session_seconds

    def _evaluated(
        self, state: TrainState, seconds: float, line: str, *, kind: str, **figures: object
    ) -> None:
        if self._files:
            logger.info("%s | %s", line, duration(seconds))
            where = {"step": state.step, "tokens": state.tokens}  # made, trained on
            self._measured({"kind": kind, **where, "seconds": seconds, **figures})  # that it took

    def _measured(self, record: Record) -> None:
        self._write(METRICS_FILE, record)
        self._track(record)

    def _write(self, file: Path, record: Record) -> None:
        if file in self._files:
            self._files[file].write(record)

    def _track(self, record: Record) -> None:
        if self._trackers is not None:
            self._trackers.record(record)

    def _track_end(self, state: TrainState) -> None:
        self._track({"kind": END, "step": state.step, **_cost(state)})

    def _record_time(self, kind: str, state: TrainState, spent: TimeSpent, **more: object) -> None:
        if self._is_done:
            return
        first, self._reported_step = self._reported_step, state.step
        seconds = {name: round(value, 4) for name, value in spent.as_record().items()}
        figures = {**seconds, **_cost(state), **more}
        self.performance(kind, state.step, first_step=first, **figures)  # step of the line before


def _cost(state: TrainState) -> dict[str, object]:
    return {"seconds_trained": state.seconds, "cost_usd": state.cost_usd}  # of all sessions so far


def gather_figures(
    world: World, losses: Sequence[float], rows: Sequence[Row], times: RankTimes
) -> tuple[StepMetrics, Mapping[str, list[float]]]:
    """Combine the figures of all ranks, which must all call; the only exchange of a log line.

    `losses` are this rank's of the last step and of all, `rows` the phases of its measured steps.

    Returns:
        The means over the ranks, the fullest GPU and the slowest rank; and the mean time of each
        phase of a step by rank.
    """
    place, peak = (socket.gethostname(), world.local_rank), 0.0  # share of the GPU's memory
    if world.device_kind == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        peak = torch.cuda.max_memory_allocated(world.device) / total
    gathered = world.gather((losses, peak, rows, place))
    all_losses, memory, all_rows, places = zip(*gathered, strict=True)
    loss, loss_mean = (sum(column) / world.world_size for column in zip(*all_losses, strict=True))
    slowest, seconds = times.add(all_rows, places)
    fullest = max(memory) or None
    return StepMetrics(
        0, loss=loss, loss_mean=loss_mean, gpu_memory_fraction=fullest, slowest=slowest
    ), seconds


def sources_record(values: Mapping[str, object]) -> dict[str, object]:
    """Return a mixture's figures by source as the part of a record; nothing without a mixture."""
    return {"sources": dict(values)} if values else {}  # of a mixture: these figures by source


def scores_text(result: TaskResult) -> str:
    """Return the scores on a task for a log line."""
    text = result.task
    for name, measure in result.in_line.items():
        error = measure.standard_error
        text += f" {name} {measure.value:.4f}" + ("" if error is None else f" +- {error:.4f}")
    skipped = f", {result.skipped:,} skipped" if result.skipped else ""
    return f"{text} ({counted(result.items, 'item')}{skipped})"
