"""Estimate hours, dollars and storage of a whole run."""

import dataclasses

from refocused.config.batch_plan import BatchPlan, times_left
from refocused.config.outputs import CheckpointConfig
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.config.run_config import RunConfig
from refocused.estimate.step_time import StepTime

# Unknown before a machine is rented: assumed, and reported as assumed.
DISK_BYTES_PER_SECOND = 2e9  # one NVMe drive, written by all ranks together
HOST_COPY_BYTES_PER_SECOND = 10e9  # of one GPU's state into the host's memory
START_UP_SECONDS = 180.0  # imports, the first shards, the compiled blocks
KEPT_BESIDE = 2  # the best step and the last one of an interruption
BEING_WRITTEN = 1
LARGEST_UINT16_VOCABULARY = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class SampleWork:
    """A text sample: a forward pass on every rank for each token."""

    tokens: int
    context_tokens: int  # of a pass in the middle of the sample
    host_seconds: float  # of the host for such a pass


@dataclasses.dataclass(frozen=True, slots=True)
class RunWork:
    """The work of a run; an interval of 0 steps means only at the end."""

    steps: int
    step_tokens: int
    flops_per_token: float  # of a forward and a backward pass
    validation_interval: int
    validation_tokens: int  # of one validation
    task_interval: int
    task_tokens: int  # of all tasks once; 0: none or unknown
    sample_interval: int
    sample: SampleWork | None
    save_interval: int
    save_bytes: int  # of one checkpoint
    saves_in_background: bool  # training waits only for a copy in host memory
    spared_tokens: int = 0  # that the batch's warm-up leaves out

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return max(0, self.steps * self.step_tokens - self.spared_tokens)

    @property
    def validations(self) -> int:
        """Number of validations, with the one at the end."""
        return times_left(0, self.steps, self.validation_interval)

    @property
    def task_rounds(self) -> int:
        """Number of times that all tasks are scored, with the one at the end."""
        return times_left(0, self.steps, self.task_interval) if self.task_tokens else 0

    @property
    def samples(self) -> int:
        """Samples, with those before the first step and after the last."""
        return 0 if self.sample is None else 1 + times_left(0, self.steps, self.sample_interval)

    @property
    def saves(self) -> int:
        """Number of saves, with the one at the end."""
        return times_left(0, self.steps, self.save_interval)


def work_of(
    config: RunConfig,
    plan: BatchPlan,
    *,
    flops_per_token: float,
    save_bytes: int,
    task_tokens: int = 0,
    sample: SampleWork | None = None,
) -> RunWork:
    """Return the work of a run from its sections."""
    evaluation, checkpoint, steps = config.evaluation, config.checkpoint, config.run.steps
    spared = steps * plan.global_batch_size - plan.sequences_between(0, steps)
    return RunWork(
        steps=steps,
        step_tokens=plan.tokens,
        flops_per_token=flops_per_token,
        validation_interval=evaluation.interval,
        validation_tokens=evaluation.sequences * plan.sequence_length,
        task_interval=evaluation.task_interval,
        task_tokens=task_tokens,
        sample_interval=evaluation.sample_interval,
        sample=sample,
        save_interval=checkpoint.interval,
        save_bytes=save_bytes,
        saves_in_background=checkpoint.in_background,
        spared_tokens=spared * plan.sequence_length,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RunCost:
    """The time of a run by part, and its price; None: unknown."""

    mfu_fraction: float
    tokens_per_second: float  # in steps, of all GPUs together
    step_seconds: float
    training_seconds: float
    validation_seconds: float
    task_seconds: float
    sample_seconds: float
    save_seconds: float  # during which training waits
    start_up_seconds: float = START_UP_SECONDS
    cost_usd: float | None = None
    usd_per_million_tokens: float | None = None
    affordable_steps: int | None = None  # that a budget pays for; None without one or a price

    @property
    def hours(self) -> float:
        """Hours of the whole machine."""
        parts = (self.training_seconds, self.evaluation_seconds, self.save_seconds)
        return (sum(parts) + self.start_up_seconds) / 3600

    @property
    def evaluation_seconds(self) -> float:
        """Seconds of validations, tasks and samples."""
        return self.validation_seconds + self.task_seconds + self.sample_seconds


def run_cost(
    work: RunWork,
    step: StepTime,
    *,
    gpus: int,
    per_hour_usd: float | None,
    budget_usd: float | None = None,
    pace: float = 1.0,
) -> RunCost:
    """Return the time and the cost of a run at `pace` times the expected speed.

    Validations and tasks only need forward passes. Each GPU generates the whole sample.
    """
    speed = pace * work.step_tokens / step.seconds
    forward = pace * step.forward_tokens_per_second
    rate = HOST_COPY_BYTES_PER_SECOND * gpus if work.saves_in_background else DISK_BYTES_PER_SECOND
    a_sample = 0.0
    if (sample := work.sample) is not None:
        computing = sample.context_tokens / (forward / gpus)
        a_sample = sample.tokens * max(sample.host_seconds, computing)
    cost = RunCost(
        mfu_fraction=pace * step.mfu_fraction,
        tokens_per_second=speed,
        step_seconds=work.step_tokens / speed,
        training_seconds=work.tokens / speed,
        validation_seconds=work.validations * work.validation_tokens / forward,
        task_seconds=work.task_rounds * work.task_tokens / forward,
        sample_seconds=work.samples * a_sample,
        save_seconds=work.saves * work.save_bytes / rate,
    )
    dollars = cost_usd(cost.hours * 3600, per_hour_usd)
    reach: int | None = None
    if budget_usd is not None and per_hour_usd is not None:
        reach, high = 0, work.steps
        while reach < high:  # bisect: validations and saves do not come every step
            middle = (reach + high + 1) // 2
            shorter = dataclasses.replace(work, steps=middle)
            usd = run_cost(shorter, step, gpus=gpus, per_hour_usd=per_hour_usd, pace=pace).cost_usd
            assert usd is not None  # the machine has a price
            reach, high = (middle, high) if usd <= budget_usd else (reach, middle - 1)
    return dataclasses.replace(
        cost,
        cost_usd=dollars,
        usd_per_million_tokens=usd_per_million_tokens(dollars, work.tokens),
        affordable_steps=reach,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RunStorage:
    """Storage and traffic of a run, in bytes."""

    checkpoint: int  # of one checkpoint
    disk: int  # of all local checkpoints, with one being written
    mirror: int  # of the mirror at the end; 0 without one
    upload: int  # to the mirror in all
    upload_per_second: float  # so that a mirror keeps up with the saves
    data: int  # tokens read; with more than one epoch, fewer are downloaded
    data_per_second: float


def checkpoints_on_disk(saves: int, checkpoint: CheckpointConfig) -> int:
    """Return how many checkpoints of a run of so many saves the disk holds, the last one begun."""
    return min(saves, checkpoint.keep + KEPT_BESIDE + BEING_WRITTEN)


def run_storage(
    work: RunWork, cost: RunCost, *, checkpoint: CheckpointConfig, vocabulary: int
) -> RunStorage:
    """Return storage and traffic; tokens of a vocabulary above 65,536 take 4 bytes."""
    size, saves = work.save_bytes, work.saves
    remote = saves if checkpoint.keep_remote == "all" else checkpoint.keep_remote + KEPT_BESIDE
    mirrored = checkpoint.mirror is not None
    token_bytes = 2 if vocabulary <= LARGEST_UINT16_VOCABULARY else 4
    return RunStorage(
        checkpoint=size,
        disk=checkpoints_on_disk(saves, checkpoint) * size,
        mirror=min(saves, remote) * size if mirrored else 0,
        upload=saves * size if mirrored else 0,
        upload_per_second=saves * size / (cost.hours * 3600) if mirrored else 0.0,
        data=work.tokens * token_bytes,
        data_per_second=cost.tokens_per_second * token_bytes,
    )
