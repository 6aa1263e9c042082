"""Hours, dollars and storage of a whole run before it begins."""

from __future__ import annotations

import dataclasses

from refocused.config.outputs import CheckpointConfig, EvaluationConfig
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.system.world import World

# Not known before a machine is rented; assumed, and said so wherever they enter.
DISK_BYTES_PER_SECOND = 2e9  # one NVMe drive, written by all ranks together
HOST_COPY_BYTES_PER_SECOND = 10e9  # of one GPU's state into the host's memory
START_UP_SECONDS = 180.0  # imports, the first shards, the compiled blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a run is to be done with, and how fast that computes it (`estimate/step_time.py`).

    Attributes:
        gpus: Number of them.
        tokens_per_second: Of all together, in steps.
        forward_tokens_per_second: Of all together, in passes without a gradient.
        per_hour_usd: Price of all an hour; None: unknown.
    """

    gpus: int
    tokens_per_second: float
    forward_tokens_per_second: float
    per_hour_usd: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class SampleWork:
    """What a sample of the model's writing takes: a forward pass on every rank for each token.

    Attributes:
        tokens: Written at most.
        context_tokens: That such a pass goes over, in the middle of the sample.
        host_seconds: That the host needs for such a pass, however fast the GPU is.
    """

    tokens: int
    context_tokens: int
    host_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunWork:
    """What a run consists of.

    Attributes:
        steps: Optimizer steps.
        step_tokens: Tokens of one.
        flops_per_token: Of a forward and a backward pass.
        validation_interval: Steps between validations; 0: only at the end.
        validation_tokens: Tokens of one.
        task_interval: Steps between tasks; 0: only at the end.
        task_tokens: Tokens of putting all of them once; 0: there are none, or none is known.
        sample_interval: Steps between samples; 0: only at the end.
        sample: One of them; None: none is written.
        save_interval: Steps between saves; 0: only at the end.
        save_bytes: Of one checkpoint.
        saves_in_background: Training waits for a copy in the host's memory alone.
    """

    steps: int
    step_tokens: int
    flops_per_token: float
    validation_interval: int
    validation_tokens: int
    task_interval: int
    task_tokens: int
    sample_interval: int
    sample: SampleWork | None
    save_interval: int
    save_bytes: int
    saves_in_background: bool

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.steps * self.step_tokens

    @property
    def validations(self) -> int:
        """Validations, that at the end included."""
        return times_left(0, self.steps, self.validation_interval)

    @property
    def task_rounds(self) -> int:
        """Times that all tasks are put, that at the end included."""
        return times_left(0, self.steps, self.task_interval) if self.task_tokens else 0

    @property
    def samples(self) -> int:
        """Samples, that of the summary included."""
        return 0 if self.sample is None else times_left(0, self.steps, self.sample_interval)

    @property
    def saves(self) -> int:
        """Saves, that at the end included."""
        return times_left(0, self.steps, self.save_interval)


@dataclasses.dataclass(frozen=True, slots=True)
class RunCost:
    """What a run takes.

    Attributes:
        tokens_per_second: In steps, of all GPUs together.
        step_seconds: Of one.
        training_seconds: Of all steps.
        validation_seconds: Of all validations.
        task_seconds: Of all tasks, whenever they are put.
        sample_seconds: Of all samples.
        save_seconds: In which training stands still for saves.
        start_up_seconds: Assumed.
        cost_usd: None when the price is unknown.
        usd_per_million_tokens: None when the price is unknown.
    """

    tokens_per_second: float
    step_seconds: float
    training_seconds: float
    validation_seconds: float
    task_seconds: float
    sample_seconds: float
    save_seconds: float
    start_up_seconds: float
    cost_usd: float | None
    usd_per_million_tokens: float | None

    @property
    def hours(self) -> float:
        """Of the whole machine."""
        parts = (self.training_seconds, self.evaluation_seconds, self.save_seconds)
        return (sum(parts) + self.start_up_seconds) / 3600

    @property
    def evaluation_seconds(self) -> float:
        """Of validations, tasks and samples."""
        return self.validation_seconds + self.task_seconds + self.sample_seconds

    def as_record(self) -> dict[str, float | None]:
        """Return the fields under their own names, and the hours."""
        return {**dataclasses.asdict(self), "hours": self.hours}


def work_of(
    *,
    steps: int,
    step_tokens: int,
    sequence_length: int,
    flops_per_token: float,
    evaluation: EvaluationConfig,
    checkpoint: CheckpointConfig,
    save_bytes: int,
    task_tokens: int = 0,
    sample: SampleWork | None = None,
) -> RunWork:
    """Return the work of a run as its sections ask for it.

    Args:
        steps: Optimizer steps.
        step_tokens: Tokens of one.
        sequence_length: Tokens of a window.
        flops_per_token: Of a forward and a backward pass.
        evaluation: When and how much is validated, when tasks are put and samples written.
        checkpoint: When is saved, and how.
        save_bytes: Of one checkpoint.
        task_tokens: Tokens of putting all tasks once.
        sample: One sample; None: none is written.
    """
    return RunWork(
        steps=steps,
        step_tokens=step_tokens,
        flops_per_token=flops_per_token,
        validation_interval=evaluation.interval,
        validation_tokens=evaluation.windows * sequence_length,
        task_interval=evaluation.task_interval,
        task_tokens=task_tokens,
        sample_interval=evaluation.sample_interval,
        sample=sample,
        save_interval=checkpoint.interval,
        save_bytes=save_bytes,
        saves_in_background=checkpoint.in_background,
    )


def run_cost(work: RunWork, machine: Machine) -> RunCost:
    """Return the time and the money of a run.

    Validations and tasks have the forward pass alone. A sample is written by each GPU for itself.
    """
    speed, forward = machine.tokens_per_second, machine.forward_tokens_per_second
    rate = DISK_BYTES_PER_SECOND
    if work.saves_in_background:
        rate = HOST_COPY_BYTES_PER_SECOND * machine.gpus
    cost = RunCost(
        tokens_per_second=speed,
        step_seconds=work.step_tokens / speed,
        training_seconds=work.tokens / speed,
        validation_seconds=work.validations * work.validation_tokens / forward,
        task_seconds=work.task_rounds * work.task_tokens / forward,
        sample_seconds=work.samples * _sample_seconds(work.sample, forward / machine.gpus),
        save_seconds=work.saves * work.save_bytes / rate,
        start_up_seconds=START_UP_SECONDS,
        cost_usd=None,
        usd_per_million_tokens=None,
    )
    dollars = cost_usd(cost.hours * 3600, machine.per_hour_usd)
    return dataclasses.replace(
        cost, cost_usd=dollars, usd_per_million_tokens=usd_per_million_tokens(dollars, work.tokens)
    )


def _sample_seconds(sample: SampleWork | None, tokens_per_second: float) -> float:
    """Return the time of a sample; the speed is that of one GPU's passes without a gradient."""
    if sample is None:
        return 0.0
    computing = sample.context_tokens / tokens_per_second
    return sample.tokens * max(sample.host_seconds, computing)


def affordable_steps(work: RunWork, machine: Machine, *, budget_usd: float) -> int:
    """Return how many of a run's steps a budget pays for, with their validations and saves.

    Args:
        work: The whole run; no more than its steps are returned.
        machine: With a price.
        budget_usd: For all of it.
    """
    low, high = 0, work.steps
    while low < high:
        middle = (low + high + 1) // 2
        cost = run_cost(dataclasses.replace(work, steps=middle), machine).cost_usd
        assert cost is not None  # the machine has a price
        low, high = (middle, high) if cost <= budget_usd else (low, middle - 1)
    return low


def times_left(step: int, total_steps: int, interval: int) -> int:
    """Count how often something is due after a step; the last step always has it.

    Args:
        step: Steps made.
        total_steps: Of the run.
        interval: Steps between; 0: only after the last.
    """
    if step >= total_steps:
        return 0
    between = (total_steps - 1) // interval - step // interval if interval else 0
    return max(0, between) + 1


MASTER_BYTES = 12  # a parameter's float32 master and Adam's two moments
KEPT_BESIDE = 2  # the best step and the last one of an interruption
BEING_WRITTEN = 1
LARGEST_UINT16_VOCABULARY = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class RunStorage:
    """What a run keeps and moves; bytes.

    Attributes:
        checkpoint: Of one step directory.
        disk: Most that step directories take on the disk at once, one being written included.
        mirror: That the bucket holds at the end; 0 without one.
        upload: That goes to the bucket in all.
        upload_per_second: So that a mirror keeps up with the saves.
        data: Tokens that are read; with more than one epoch fewer are fetched.
        data_per_second: Of them, while training.
    """

    checkpoint: int
    disk: int
    mirror: int
    upload: int
    upload_per_second: float
    data: int
    data_per_second: float


def checkpoint_bytes(parameters: int, *, stage: int, dtype: str) -> int:
    """Return the bytes of a step directory, but for its small files.

    Args:
        parameters: With the padding.
        stage: Below ZeRO-3 the weights of the passes are saved besides.
        dtype: What the passes compute in.
    """
    weights = (4 if dtype == "fp32" else 2) if stage < 3 else 0
    return (MASTER_BYTES + weights) * parameters


def least_save_bytes(parameters: int, stage: int, *, optimizer: str, world: World) -> int:
    """Return the bytes that a save takes of this machine's disk at least; 0: unknown.

    Args:
        parameters: With the padding.
        stage: Of ZeRO; at 0 rank 0 writes all, above it each rank its share.
        optimizer: Muon has one moment where AdamW has two.
        world: The ranks, and which of them share a disk.
    """
    size = (MASTER_BYTES - 4 * (optimizer == "muon")) * parameters
    if world.storage_ranks == 1:
        return size
    return size * world.local_world_size // world.world_size if stage else 0


def run_storage(
    work: RunWork, cost: RunCost, *, checkpoint: CheckpointConfig, vocabulary: int
) -> RunStorage:
    """Return what a run keeps and moves.

    Args:
        work: The run.
        cost: Its speed.
        checkpoint: What is kept and mirrored.
        vocabulary: Of the tokens: above 65,536 one takes 4 bytes.
    """
    size, saves = work.save_bytes, work.saves
    remote = saves if checkpoint.keep_remote == "all" else checkpoint.keep_remote + KEPT_BESIDE
    mirrored = checkpoint.mirror is not None
    seconds_between = cost.hours * 3600 / saves if saves else 0.0
    token_bytes = 2 if vocabulary <= LARGEST_UINT16_VOCABULARY else 4
    return RunStorage(
        checkpoint=size,
        disk=min(saves, checkpoint.keep + KEPT_BESIDE + BEING_WRITTEN) * size,
        mirror=min(saves, remote) * size if mirrored else 0,
        upload=saves * size if mirrored else 0,
        upload_per_second=size / seconds_between if mirrored and seconds_between else 0.0,
        data=work.tokens * token_bytes,
        data_per_second=cost.tokens_per_second * token_bytes,
    )
