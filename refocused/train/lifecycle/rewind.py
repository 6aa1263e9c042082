"""Watch for spikes, and go back to before one: on a new branch, without its sequences."""

import dataclasses
import textwrap

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import (
    Selection,
    decide_together,
    list_checkpoints,
    newest,
    present_branch,
)
from refocused.checkpoints.step.checkpoint_directory import Branch, read_checkpoint, recorded_branch
from refocused.data.loader.open_data import DataParts
from refocused.metrics.jsonl import read_json
from refocused.metrics.throughput import StartUp, StartUpClock
from refocused.metrics.trackers import TrackedRun, start_tracking
from refocused.system.errors import (
    CheckpointError,
    CheckpointUnavailableError,
    ConfigError,
    ExitCode,
    TrainingError,
)
from refocused.train.lifecycle.job import Job
from refocused.train.lifecycle.model_and_engine import Built
from refocused.train.step.loop import Outcome, Parts, train
from refocused.train.step.reporter import TRACKERS_END_S, Reporter
from refocused.train.step.spikes import SHORT, SpikeError, SpikeWatch
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest


def watch_spikes(job: Job, data: DataParts, built: Built, reporter: Reporter) -> SpikeWatch:
    """Prepare what judges steps; raises ConfigError on every rank if the engine cannot skip."""
    config = job.loaded.config
    if config.run.on_spike == "skip" and not built.engine.can_skip:
        raise ConfigError(
            "run.on_spike=skip cannot judge an update before it is made in fp16, with "
            "zero.offload_optimizer, or in 16 bits without ZeRO. Set warn or rewind."
        ).agreed()
    warmup = config.schedule.warmup_steps
    return SpikeWatch(config.run.on_spike, data.order, warmup_steps=warmup, report=reporter.event)


def train_and_go_back(
    job: Job,
    parts: Parts,
    state: TrainState,
    stop: StopRequest,
    tracked: TrackedRun,
    start_up: StartUpClock,
) -> Outcome:
    """Track and train from a state on, and again from an earlier one after each rewind."""
    reporter = parts.reporter
    phases: StartUp | None = start_up.spent
    while True:
        wandb_id = start_tracking(tracked, job.world, track=reporter.track, report=reporter.event)
        state = dataclasses.replace(state, wandb_id=wandb_id)
        start_up.end("ready")
        reporter.start(state, phases)
        reporter.write_state(reporter.booked(state), "training")
        try:
            return train(parts, state, stop)
        except SpikeError as spike:
            state, phases = go_back(job, parts, state, spike), None
        tracked = dataclasses.replace(tracked, step=state.step, is_automatic=False)


def select_before(catalog: Catalog, step: int) -> Selection:
    """Select the newest usable checkpoint up to a step, and a new branch; raise without one."""
    entries = list_checkpoints(catalog, "latest")
    present = present_branch(catalog, entries)
    earlier = [entry for entry in entries if entry.step <= step]
    found = newest(catalog, earlier, [], must_exist=True)
    assert found is not None
    number = max([present.number, *(entry.branch for entry in entries)]) + 1
    return Selection(found, present.fork(found.step, number=number))


def go_back(job: Job, parts: Parts, state: TrainState, spike: SpikeError) -> TrainState:
    """Load the newest checkpoint before a spike's sequences in place; all ranks raise alike.

    `state` is one since the last rewind. Raises TrainingError if the run has gone back
    `run.max_rewinds` times, or if there is no such checkpoint.
    """
    first, stop, most = (
        spike.sequences.start,
        spike.sequences.stop,
        job.loaded.config.run.max_rewinds,
    )
    if len(state.left_out) >= most:
        raise TrainingError(
            f"{spike}. The run has gone back run.max_rewinds={most} times, and stops. The last "
            "checkpoint is good: resume with a lower optimizer.lr, or with more run.max_rewinds."
        ).agreed()
    try:
        chosen = decide_together(
            job.world, job.catalog, lambda catalog: select_before(catalog, spike.good_step)
        )
    except CheckpointUnavailableError:
        raise
    except CheckpointError as error:
        raise TrainingError(
            f"{spike}. No usable checkpoint of step {spike.good_step:,} or before is left to go "
            f"back to. Start again with 'data.skip=[\"stream[{first}:{stop}]\"]', and a shorter "
            "checkpoint.interval."
        ).agreed() from error
    assert chosen.step is not None  # or an error
    path, branch, saver = chosen.step.path, chosen.branch, parts.saver
    left_out = (*state.left_out, (first, stop))
    parts.reporter.event(
        "rewind_warning",
        f"{spike}. Going back to step {chosen.step.step:,}, on branch {branch.number} (rewind "
        f"{len(left_out)} of {most}). Leaving out stream[{first}:{stop}]: "
        f"{textwrap.shorten(spike.names, **SHORT)}",
        step=spike.step,
        to_step=chosen.step.step,
        branch=branch.number,
        sequences=[first, stop],
        names=spike.names,
    )
    parts.reporter.end_tracking(ExitCode.OK, limit_seconds=TRACKERS_END_S)
    parts.throughput.lap("step", continued=True)
    parts.reporter.go_back(dataclasses.replace(state, step=spike.step), branch)
    loaded = saver.load(job.world.on_all_ranks(lambda: read_checkpoint(path)))
    saver.checkpointer.branch = branch
    saver.mirror.start(branch)
    if job.lease is not None and job.world.is_rank_0:
        job.lease.lead(saver.head)
    parts.loader.leave_out(left_out)
    return dataclasses.replace(loaded, left_out=left_out, wandb_id=state.wandb_id)


def leave_out_again(job: Job, parts: Parts, state: TrainState, branch: Branch) -> TrainState:
    """Leave out what earlier rewinds of a branch did; return the state with these sequences.

    `state.json` knows them, even if the branch has no checkpoint of its own yet.
    """

    def recorded() -> TrainState:
        record = read_json(job.folder / "state.json") or {}
        if recorded_branch(job.folder) != branch or "left_out" not in record:
            return state
        return TrainState.from_record({**state.as_record(), "left_out": record["left_out"]})

    state = job.world.on_rank_0(recorded)
    parts.loader.leave_out(state.left_out)
    for first, stop in state.left_out:
        text = f"  skip     stream[{first}:{stop}], which a rewind left out"
        parts.reporter.event("left_out", text)
    return state
