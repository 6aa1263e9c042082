"""Reports of a run: log lines, metrics, events, and `state.json`."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from refocused.checkpoints.step.checkpoint_directory import Branch
from refocused.config.prices import cost_usd
from refocused.engine.engine import Engine
from refocused.evaluate.multiple_choice import TaskResult
from refocused.metrics.history import EVENTS_FILE, METRICS_FILE, perplexity, unix_time
from refocused.metrics.jsonl import JsonLines, JsonLinesTail, utc_now, write_state
from refocused.metrics.rank_times import RankTimes
from refocused.metrics.run_time import FINISHED, PERFORMANCE_FILE, RunTime, RunTimeReader, TimeSpent
from refocused.metrics.throughput import StartUp, Throughput
from refocused.metrics.trackers import END, Histogram, Record, Trackers
from refocused.system.number_text import duration
from refocused.system.processes import session_record
from refocused.system.world import World
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import (
    RunFigures,
    Totals,
    gather_figures,
    scores_text,
    sources_record,
)

logger = logging.getLogger(__name__)

TRACKERS_END_S = 5.0  # limit for closing the trackers of a run that failed


SAMPLES_FILE, SAMPLES_BYTES = Path("logs") / "gpu_metrics.jsonl", 1 << 16  # its last lines


class Reporter:
    """Writes on rank 0; every rank must call, because figures are gathered."""

    def __init__(
        self,
        folder: Path,
        *,
        figures: RunFigures,
        engine: Engine,
        throughput: Throughput,
        world: World,
        dry_run: bool = False,
        command_began_seconds: float | None = None,
        more_of_state: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """Open the run's files on rank 0; a dry run writes none, and only logs.

        Whenever `state.json` is written, it gets `more_of_state` too. The command, which may have
        started other ranks before this one, began at a monotonic time.
        """
        self._figures = figures
        self._engine = engine
        self._throughput = throughput
        self._before = Totals()
        self._rank_times = RankTimes()
        self._world = world
        self._folder = folder
        self._times = RunTimeReader(folder)
        self._reported_step = 0
        self._command_began_seconds = command_began_seconds
        self._seconds_before = self._unrecorded_seconds = 0.0
        self._cost_before: float | None = None
        self._has_doubted_mfu = False
        self._start_up: StartUp | None = None  # until it is reported
        self._is_done = False  # by a session before this one, which thus takes no time
        self._latest: TrainState | None = None
        self._session_began = utc_now()
        self._more_of_state = more_of_state
        self._trackers: Trackers | None = None
        self._files = {
            name: JsonLines(folder / name)
            for name in (METRICS_FILE, PERFORMANCE_FILE, EVENTS_FILE)
            if world.is_rank_0 and not dry_run
        }

    def begin(self, state: TrainState) -> None:
        """Count this session's time and money on top of what the run took before it.

        A state knows the time until it was saved. The run's own file also knows of the time after
        that, which a rewind discards and which is paid for all the same. No file knows of the time
        from its last line to the end of a hang or to a crash, and from there to this session where
        the same command restarted the ranks: the machine was in use.
        """
        before, session = self.run_time(), self._throughput.session_seconds
        began, now = self._command_began_seconds, time.time()
        used = session if began is None else max(session, time.monotonic() - began)
        if before.ended is not None:
            samples = JsonLinesTail(self._folder / SAMPLES_FILE, last_bytes=SAMPLES_BYTES).records()
            times = [unix_time(sample.get("time")) or 0.0 for sample in samples]
            alive = max((at for at in times if at < now - used), default=0.0)  # the session before
            used = min(used, max(0.0, now - before.ended)) + max(0.0, alive - before.ended)
        self._unrecorded_seconds = max(0.0, used - session)
        self._seconds_before = max(state.seconds, before.seconds_trained or 0.0)
        known = [cost for cost in (state.cost_usd, before.cost_usd) if cost is not None]
        self._cost_before = max(known, default=None)
        total = self._figures.total_steps
        self._is_done = before.is_finished and state.step >= total
        if self._is_done:
            text = "time and cost stay as they are. Raise run.steps (or --max-steps) to train on."
            self.event("done_before", f"  finished all {total:,} steps were made before; {text}")

    def track(self, trackers: Trackers) -> None:
        """Also send all further records to these trackers; only rank 0 calls this."""
        self._trackers = trackers

    def start(self, state: TrainState, phases: StartUp | None = None) -> None:
        """Mark the end of start-up; its `phases` are reported after the first step."""
        self._throughput.lap("start_up")
        self._start_up, self._reported_step = phases, state.step
        self._before = Totals.of(self._throughput)
        spent = self._throughput.time_spent(waited_seconds=0.0)  # batches are waited for anew
        self._record_time("session", self.booked(state), spent)

    def go_back(self, state: TrainState, branch: Branch) -> None:
        """Report on a new branch from now on; `state` is given up for an earlier one."""
        self._record_time("time", self.booked(state), self._throughput.time_spent())
        self._figures = dataclasses.replace(self._figures, branch=branch)

    def end(self, state: TrainState) -> TrainState:
        """Mark the end of the run's last wait; return the state with all its time booked.

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
        return self._times.read() if self._world.is_rank_0 else RunTime()

    def booked(self, state: TrainState) -> TrainState:
        """Return a state with this session's time and money added."""
        session = self._throughput.session_seconds + self._unrecorded_seconds
        if self._is_done:
            session = 0.0
        cost, more = self._cost_before, cost_usd(session, self._figures.per_hour_usd)
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
        read = torch.stack([losses[-1].mean(), torch.cat(list(losses)).mean()]).tolist()
        # The device was up to a step behind the host. It has caught up now.
        meter, figures, before = self._throughput, self._figures, self._before
        meter.lap("step", continued=True)
        spent = meter.time_spent(waited_seconds=waited_seconds)
        rows = self._engine.phases.take(data_seconds=spent.data_wait_seconds / len(losses))
        metrics, rank_seconds = gather_figures(self._world, read, rows, self._rank_times)
        state = self.booked(dataclasses.replace(state, loss=metrics.loss))
        self._record_time("time", state, spent, **rank_seconds)
        now = self._before = Totals.of(meter, waited_seconds)
        steps, passed = now.steps - before.steps, now.session_seconds - before.session_seconds
        sequences = figures.plan.sequences_between(state.step - steps, state.step)
        tokens = sequences * figures.plan.sequence_length
        seconds = (now.step_seconds - before.step_seconds) / steps if steps else None
        ahead = figures.cadence.ahead(state.step, figures.total_steps, figures.plan)
        left = meter.seconds_left(ahead)
        mfu = figures.mfu(tokens / steps / seconds) if seconds else None
        refused = mfu is not None and mfu > figures.possible_mfu
        if refused and not self._has_doubted_mfu:
            self._has_doubted_mfu = True
            self.event(
                "mfu_warning",
                f"MFU {mfu:.0%} is more than the GPU's peak allows "
                f"({figures.possible_mfu:.0%}): the GPU is not the one that its name says, or "
                "steps were not waited for. It is shown as ?",
            )
        waited = (waited_seconds - before.waited_seconds) / passed if passed > 0 else 0.0
        metrics = dataclasses.replace(
            metrics,
            step=state.step,
            total_steps=figures.total_steps,
            tokens=state.tokens,
            epoch=state.position.epoch,
            best_loss=state.best_loss,
            learning_rate=figures.rates.at(state.step - 1),
            gradient_norm=self._engine.gradient_norm(),
            loss_scale=self._engine.loss_scale(),
            skipped_steps=self._engine.skipped_steps,
            step_seconds=seconds,
            tokens_per_second=tokens / passed if passed > 0 else None,
            mfu_fraction=None if refused else mfu,
            mfu_refused=refused,
            stream_sequences=figures.place(state.position),
            goodput_fraction=self.run_time().goodput_fraction,
            data_wait_fraction=min(1.0, waited),
            seconds_left=left,
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            cost_left_usd=cost_usd(left, figures.per_hour_usd),
        )
        phases, self._start_up = self._start_up, None
        if phases is not None:
            phases.first_batch_seconds, phases.first_step_seconds = meter.first_seconds
            first = state.step - meter.steps + 1
            self.performance("start", first, **phases.as_record())
            self.event("began", phases.as_line(first), step=first)
        if self._files:
            progress = figures.source_progress(state)
            self._measured({"kind": "step", **metrics.as_record(), **progress})
            logger.info("%s", metrics.as_line())
            self.write_state(state, "training")
        return state

    def validation(self, state: TrainState, seconds: float, by_source: Mapping[str, float]) -> None:
        """Report a validation; `by_source` holds the loss of each source of a mixture."""
        loss = state.validation_loss
        assert loss is not None
        best = " (best)" if state.best_step == state.step else ""
        sources = "".join(f" | {name} {nats:.4f}" for name, nats in by_source.items())
        self._evaluated(
            state,
            seconds,
            f"eval {state.step:>7,} val {loss:.4f} ppl {perplexity(loss):.2f}{best}{sources}",
            kind="validation",
            validation_loss=loss,  # mean over `evaluation.sequences`, nats a token
            perplexity=perplexity(loss),  # exp(validation_loss)
            validation_set=state.validation_set,  # fingerprint of what was validated on
            **sources_record({name: {"validation_loss": nats} for name, nats in by_source.items()}),
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
        self._latest = state
        if self._world.is_rank_0:
            record = {
                "run": self._figures.name,  # its name
                **self._figures.branch.as_record(),
                "status": status,  # starting, training, finished, stopped or failed
                **session_record(),
                "session_began": self._session_began,  # UTC
                "total_steps": self._figures.total_steps,  # of the whole run
                **state.as_record(),
                **self._more_of_state(),
                **facts,
            }
            write_state(self._folder / "state.json", record)

    def write_failure(self, state: TrainState, error: BaseException, exit_code: int) -> None:
        """Record that the run failed; `state` counts if none was reported since the start."""
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
        for file in self._files.values():
            file.close()

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
