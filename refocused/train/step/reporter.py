"""What a run reports: log lines, metrics, events, and the state file that others read."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from refocused.config.prices import cost_usd
from refocused.engine.engine import Engine
from refocused.engine.histograms import Histograms
from refocused.evaluate.multiple_choice import TaskResult
from refocused.metrics.jsonl import JsonLines, utc_now, write_state
from refocused.metrics.run_time import FINISHED, PERFORMANCE_FILE, RunTime, TimeSpent, read_run_time
from refocused.metrics.step_metrics import StepMetrics, duration, perplexity
from refocused.metrics.throughput import Throughput
from refocused.metrics.trackers import END, Record, Trackers
from refocused.system.processes import this_process
from refocused.system.world import World
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import RunFigures, StepFigures

logger = logging.getLogger(__name__)

TRACKERS_END_S = 5.0  # limit for closing the trackers of a run that failed


class Reporter:
    """Writes on rank 0; every rank calls it, because figures are gathered."""

    def __init__(
        self,
        folder: Path,
        *,
        figures: RunFigures,
        engine: Engine,
        throughput: Throughput,
        world: World,
        dry_run: bool = False,
    ) -> None:
        """Open the run's files on rank 0; a dry run writes none, and only logs."""
        self._figures = figures
        self._throughput = throughput
        self._steps = StepFigures(figures, engine=engine, throughput=throughput)
        self._world = world
        self._folder = folder
        self._reported_step = 0
        self._seconds_before = 0.0
        self._cost_before: float | None = None
        self._has_doubted_mfu = False
        self._latest: TrainState | None = None
        self._process = this_process()
        self._session_began = utc_now()
        self._more_of_state: Callable[[], Mapping[str, object]] = dict
        self._metrics = self._performance = self._events = None
        self._trackers: Trackers | None = None
        if world.is_rank_0 and not dry_run:
            self._metrics = JsonLines(folder / "logs" / "training_metrics.jsonl")
            self._performance = JsonLines(folder / PERFORMANCE_FILE)
            self._events = JsonLines(folder / "logs" / "events.jsonl")

    def add_to_state(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Add these facts to `state.json` whenever it is written."""
        self._more_of_state = facts

    def begin(self, state: TrainState) -> None:
        """Count this session's time and money on top of what the run took before it.

        A state knows the time until it was saved. The run's own file also knows of the time after
        that, which a rewind discards and which is paid for all the same.
        """
        before = self.run_time()
        self._seconds_before = max(state.seconds, before.seconds_trained or 0.0)
        known = [cost for cost in (state.cost_usd, before.cost_usd) if cost is not None]
        self._cost_before = max(known, default=None)

    def track(self, trackers: Trackers) -> None:
        """Send all further records to these trackers too; rank 0 alone calls this."""
        self._trackers = trackers

    def start(self, state: TrainState) -> None:
        """Note that training begins now; what came before was start-up."""
        self._throughput.lap("start_up")
        self._reported_step = state.step
        self._steps.start()
        self._record_time("session", self.booked(state), self._throughput.time_spent())

    def end(self, state: TrainState) -> TrainState:
        """Note that the run's last wait is over; return the state with all of its time booked.

        Trackers get this cost in place of the last step's.
        """
        self._throughput.lap("ending")
        state, spent = self.booked(state), self._throughput.time_spent()
        is_finished = state.step >= self._figures.total_steps
        self._record_time("time", state, spent, **({FINISHED: True} if is_finished else {}))
        self._track_end(state)
        return state

    def run_time(self) -> RunTime:
        """Return how the time of all sessions was spent, from the run's file."""
        return read_run_time(self._folder) if self._world.is_rank_0 else RunTime()

    def booked(self, state: TrainState) -> TrainState:
        """Return a state with this session's time and money added."""
        session = self._throughput.session_seconds
        cost, more = self._cost_before, cost_usd(session, self._figures.per_hour_usd)
        if more is not None:
            cost = (cost or 0.0) + more
        return dataclasses.replace(state, seconds=self._seconds_before + session, cost_usd=cost)

    def spent_usd(self) -> float:
        """Return the cost of all sessions so far."""
        return self.booked(TrainState()).cost_usd or 0.0

    def step(
        self, state: TrainState, losses: Sequence[torch.Tensor], waited_seconds: float
    ) -> TrainState:
        """Read the losses from the device, report the step, return the state with its loss.

        `losses` are those of each step since the last log line `[accumulation]`, on the device.
        `waited_seconds` for batches are counted since the session began.
        """
        read = torch.stack([losses[-1].mean(), torch.cat(list(losses)).mean()]).tolist()
        loss, loss_mean = (of_all / self._world.world_size for of_all in self._world.total(read))
        memory = self._world.largest([_gpu_memory_fraction(self._world)])[0]
        # The device was up to a step behind the host. It has caught up now.
        self._throughput.lap("step", continued=True)
        state = self.booked(dataclasses.replace(state, loss=loss))
        metrics = self._steps.of(
            state,
            loss=loss,
            loss_mean=loss_mean,
            waited_seconds=waited_seconds,
            memory=memory or None,
        )
        self._doubt_mfu(metrics)
        spent = self._throughput.time_spent(waited_seconds=waited_seconds)
        self._record_time("time", self.booked(state), spent)
        if self._metrics is not None:
            self._measured({"kind": "step", **metrics.as_record(), **self._source_progress(state)})
            logger.info("%s", metrics.as_line())
            self.write_state(
                state,
                "training",
                tokens_per_second=metrics.tokens_per_second,
                seconds_left=metrics.seconds_left,
            )
        return state

    def validation(self, state: TrainState, seconds: float, by_source: Mapping[str, float]) -> None:
        """Report a validation; `by_source` holds the loss of each source of a mixture."""
        loss = state.validation_loss
        assert loss is not None
        best = " (best)" if state.best_step == state.step else ""
        sources = "".join(f" | {name} {own:.4f}" for name, own in by_source.items())
        self._evaluated(
            state,
            seconds,
            f"eval {state.step:>7,} val {loss:.4f} ppl {perplexity(loss):.2f}{best}{sources}",
            kind="validation",
            validation_loss=loss,
            perplexity=perplexity(loss),
            **_by_source({name: {"validation_loss": own} for name, own in by_source.items()}),
        )

    def tasks(self, state: TrainState, results: Sequence[TaskResult], seconds: float) -> None:
        """Report the scores on the run's tasks."""
        scores = " | ".join(_scores(one) for one in results)
        self._evaluated(
            state,
            seconds,
            f"tasks{state.step:>7,} {scores}",
            kind="tasks",
            tasks={one.task: one.as_record() for one in results},
        )

    def sample(self, state: TrainState, text: str, seconds: float) -> None:
        """Report a text sample."""
        line = f"sample{state.step:>6,} {text!r} | {duration(seconds)}"
        self.event("sample", line, step=state.step, sample=text, seconds=seconds)
        self._track({"kind": "sample", "step": state.step, "sample": text})

    def histograms(self, step: int, histograms: Histograms) -> None:
        """Send the histograms of a step's weights and gradient to the trackers."""
        if self._trackers is not None:
            self._track({"kind": "histograms", "step": step, **dataclasses.asdict(histograms)})

    def performance(self, kind: str, step: int, **figures: object) -> None:
        """Record what something cost; the names of its figures begin with its kind."""
        if self._performance is not None:
            self._performance.write({"kind": kind, "step": step, **figures})

    def event(self, kind: str, text: str, **facts: object) -> None:
        """Record an event, and log its text unless that is empty."""
        if self._events is not None:
            self._events.write({"kind": kind, "text": text, **facts})
        if self._world.is_rank_0 and text:
            level = logging.WARNING if kind.endswith(("failed", "warning")) else logging.INFO
            logger.log(level, "%s", text)

    def write_state(self, state: TrainState, status: str, **facts: object) -> None:
        """Replace `state.json`, from which other programs read the run's progress."""
        self._latest = state
        if self._world.is_rank_0:
            record = {
                "run": self._figures.name,
                **self._figures.branch.as_record(),
                "status": status,
                "pid": self._process.pid,
                "pid_started": self._process.started,
                "host": socket.gethostname(),
                "session_began": self._session_began,
                "total_steps": self._figures.total_steps,
                **state.as_record(),
                **self._more_of_state(),
                **facts,
            }
            write_state(self._folder / "state.json", record)

    def write_failure(self, state: TrainState, error: BaseException, exit_code: int) -> None:
        """Record in `state.json` and in the events that the run failed.

        `state` is that of the session's start, in case nothing was reported since.
        """
        state = self.booked(self._latest or state)
        self._record_time("time", state, self._throughput.time_without_use())
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
        for file in (self._metrics, self._performance, self._events):
            if file is not None:
                file.close()

    def _evaluated(
        self, state: TrainState, seconds: float, line: str, *, kind: str, **figures: object
    ) -> None:
        if self._metrics is not None:
            logger.info("%s | %s", line, duration(seconds))
            place = {"step": state.step, "tokens": state.tokens}
            self._measured({"kind": kind, **place, "seconds": seconds, **figures})

    def _measured(self, record: Record) -> None:
        if self._metrics is not None:
            self._metrics.write(record)
        self._track(record)

    def _track(self, record: Record) -> None:
        if self._trackers is not None:
            self._trackers.record(record)

    def _track_end(self, state: TrainState) -> None:
        cost = {"seconds_trained": state.seconds, "cost_usd": state.cost_usd}
        self._track({"kind": END, "step": state.step, **cost})

    def _record_time(self, kind: str, state: TrainState, spent: TimeSpent, **more: object) -> None:
        first, self._reported_step = self._reported_step, state.step
        self.performance(
            kind,
            state.step,
            first_step=first,
            **{name: round(seconds, 4) for name, seconds in spent.as_record().items()},
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            **more,
        )

    def _source_progress(self, state: TrainState) -> dict[str, object]:
        """Return the tokens and epochs that were trained on of each source of a mixture."""
        length, consumed = self._figures.plan.sequence_length, state.position.sources or {}
        return _by_source(
            {
                name: {"tokens": consumed[name] * length, "epoch": consumed[name] / epoch}
                for name, epoch in self._figures.epoch_windows.items()
                if name in consumed
            }
        )

    def _doubt_mfu(self, metrics: StepMetrics) -> None:
        """Warn once about an MFU that is impossible."""
        if not metrics.mfu_refused or metrics.step_seconds is None or self._has_doubted_mfu:
            return
        self._has_doubted_mfu = True
        mfu = self._figures.mfu(self._figures.plan.tokens / metrics.step_seconds)
        self.event(
            "mfu_warning",
            f"MFU {mfu:.0%} is more than any training of a whole model reaches "
            f"({self._figures.credible_mfu:.0%}): the GPU is not the one that its name says, "
            "or steps were not waited for. It is shown as ?",
        )


def _scores(result: TaskResult) -> str:
    text = result.task
    for name, measure in result.measures.items():
        error = measure.standard_error
        text += f" {name} {measure.value:.4f}" + ("" if error is None else f" +- {error:.4f}")
    skipped = f", {result.skipped:,} skipped" if result.skipped else ""
    return f"{text} ({result.items:,} items{skipped})"


def _by_source(values: Mapping[str, object]) -> dict[str, object]:
    return {"sources": dict(values)} if values else {}


def _gpu_memory_fraction(world: World) -> float:
    if world.device_kind != "cuda":
        return 0.0
    total = torch.cuda.get_device_properties(world.device).total_memory
    return torch.cuda.max_memory_allocated(world.device) / total
