"""Estimate hours, dollars, memory, disk and bandwidth of a run on any number of GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Activity, Cadence
from refocused.config.load_run import LoadedRun
from refocused.config.prices import MachinePrice, Prices, cost_usd, usd_per_million_tokens
from refocused.config.run_config import RunConfig
from refocused.estimate.flops import ParameterCount, count_of_run, flops_per_token
from refocused.estimate.memory import KEPT_BESIDE, checkpoint_bytes, checkpoints_on_disk
from refocused.estimate.memory_plan import NO_OFFLOAD, Choice, choose, with_dtype
from refocused.estimate.step_time import (
    GPUS_A_MACHINE,
    HOST_SECONDS_A_LAYER,
    LINK_SHARE,
    StepTime,
    step_at,
    step_of_run,
)
from refocused.system.errors import ConfigError
from refocused.system.hardware import GpuSpec, gpu_spec, named_gpu

# Unknown before a machine is rented: assumed, and reported as assumed.
DISK_BYTES_PER_SECOND = 2e9  # one NVMe drive, written by all ranks together
HOST_COPY_BYTES_PER_SECOND = 10e9  # of one GPU's state into the host's memory
START_UP_SECONDS = 180.0  # imports, the first shards, the compiled blocks
LARGEST_UINT16_VOCABULARY = 65_536
TaskWork = tuple[str, int, int]  # name, items, and tokens of all endings with their contexts


@dataclasses.dataclass(frozen=True, slots=True)
class RunWork:
    """The work of a run, or of its first `steps` steps."""

    config: RunConfig
    plan: BatchPlan
    steps: int
    flops_per_token: float  # of a forward and a backward pass
    save_bytes: int  # of one checkpoint
    task_tokens: int = 0  # of all tasks once; 0: none or unknown
    prompt_tokens: int = 0  # of the longest prompt of text samples
    host_seconds: float = 0.0  # of the host for a forward pass of a sample

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.plan.sequences_between(0, self.steps) * self.plan.sequence_length

    @property
    def validation_tokens(self) -> int:
        """Tokens of one validation."""
        return self.config.evaluation.sequences * self.plan.sequence_length

    def count(self, activity: Activity) -> int:
        """Return how often the run validates, saves and so on, at its end too.

        A text sample is also drawn before the first step, and the others with
        `evaluation.at_start`.
        """
        if activity == "tasks" and not self.task_tokens:
            return 0
        evaluation = self.config.evaluation
        if activity == "sample" and not evaluation.sample_prompts:
            return 0
        begins = activity == "sample" or (activity != "save" and evaluation.at_start)
        return int(Cadence.of(self.config).left(0, self.steps)[activity]) + begins


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
    speed = pace * work.plan.tokens / step.seconds
    forward = pace * step.forward_tokens_per_second
    in_background = work.config.checkpoint.in_background  # training waits only for copies
    rate = HOST_COPY_BYTES_PER_SECOND * gpus if in_background else DISK_BYTES_PER_SECOND
    # A token of a sample is a forward pass of its context, on average, or the host's work for it.
    evaluation = work.config.evaluation
    context = min(work.plan.sequence_length, work.prompt_tokens + evaluation.sample_tokens // 2)
    sample_tokens = len(evaluation.sample_prompts) * evaluation.sample_tokens
    sample_seconds = sample_tokens * max(work.host_seconds, context / (forward / gpus))
    cost = RunCost(
        mfu_fraction=pace * step.mfu_fraction,
        tokens_per_second=speed,
        step_seconds=work.plan.tokens / speed,
        training_seconds=work.tokens / speed,
        validation_seconds=work.count("validation") * work.validation_tokens / forward,
        task_seconds=work.count("tasks") * work.task_tokens / forward,
        sample_seconds=work.count("sample") * sample_seconds,
        save_seconds=work.count("save") * work.save_bytes / rate,
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


def run_storage(work: RunWork, cost: RunCost, *, vocabulary: int) -> RunStorage:
    """Return storage and traffic; tokens of a vocabulary above 65,536 take 4 bytes."""
    size, saves, checkpoint = work.save_bytes, work.count("save"), work.config.checkpoint
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


PACES = (0.75, 1.0, 1.25)  # times the expected speed, which rests on assumptions
# Stage 0 is never chosen; see `choose`.
SWEPT_ZERO = ((1, "world"), (2, "world"), (3, "world"), (3, "node"))


@dataclasses.dataclass(frozen=True, slots=True)
class OnGpus:
    """A run on a number of GPUs."""

    gpus: int
    per_hour_usd: float | None  # of all GPUs
    plan: BatchPlan
    choice: Choice
    fits: bool  # a step fits into a GPU's memory, as planned
    work: RunWork
    step: StepTime
    scenarios: tuple[RunCost, ...]  # at `PACES`
    by_zero: tuple[OnGpus, ...] = ()  # in a sweep: with each ZeRO stage and partition, no offload

    @property
    def likely(self) -> RunCost:
        """The scenario at the expected speed."""
        return self.scenarios[PACES.index(1.0)]

    @property
    def hpz_pays_below(self) -> float | None:
        """Network rate of a GPU, in bytes a second, below which hpZ pays; None: one machine."""
        of_3 = [on for on in self.by_zero if on.choice.zero.stage == 3]
        by = {on.choice.zero.partition: on.step.traffic for on in of_3}
        world, node = by.get("world"), by.get("node")
        if world is None or node is None:
            return None
        spared = world.between_bytes - node.between_bytes
        return spared / (LINK_SHARE * node.copies_seconds) if node.copies_seconds else 0.0

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        traffic, work = self.step.traffic, self.work
        numbers = (
            "steps tokens flops_per_token validation_tokens task_tokens host_seconds save_bytes"
        )
        due: dict[str, Activity] = {"validations": "validation", "task_rounds": "tasks"}
        due |= {"samples": "sample", "saves": "save"}
        return {
            "gpus": self.gpus,
            "per_hour_usd": self.per_hour_usd,
            "batch": {**dataclasses.asdict(self.plan), "tokens": self.plan.tokens},
            "machines": -(-self.gpus // GPUS_A_MACHINE),
            "zero_stage": self.choice.zero.stage,
            "zero_partition": self.choice.zero.partition,
            "traffic": None if traffic is None else dataclasses.asdict(traffic),
            "memory_bytes": dataclasses.asdict(self.choice.memory),
            "fits": self.fits,
            "step_seconds": self.step.parts,
            "work": {name: getattr(work, name) for name in numbers.split()}
            | {name: work.count(activity) for name, activity in due.items()},
            "scenarios": [dataclasses.asdict(c) | {"hours": c.hours} for c in self.scenarios],
            "by_zero": [on.as_record() for on in self.by_zero],
            "hpz_pays_below_bytes_per_second": self.hpz_pays_below,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run."""

    loaded: LoadedRun
    gpu: GpuSpec
    parameters: ParameterCount
    main: OnGpus  # on the requested GPUs
    storage: RunStorage  # at the expected speed
    bucket_month_usd: float  # of the mirror at the run's end
    data_out_usd: float  # egress of the data to another provider, once
    sweep: Mapping[int, OnGpus | str]  # by number of GPUs; a text: why it is not possible on them
    offers: tuple[MachinePrice, ...]  # of this GPU, the cheapest first
    tasks: Sequence[TaskWork]
    missing_tasks: Sequence[str]  # files that do not exist
    budget_usd: float | None
    prices: Prices

    def offers_usd(self) -> list[tuple[MachinePrice, float]]:
        """Return the offers with the cost of the run on them, at the expected speed."""
        gpus, hours = self.main.gpus, self.main.likely.hours
        return [(price, price.for_gpus(gpus) * hours) for price in self.offers]

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        count, work, names = self.parameters, self.main.work, ("name", "items", "tokens")
        parameters = {"total": count.total, "without_embeddings": count.without_embeddings}
        return {
            "run": self.loaded.config.run.name,
            "gpu": dataclasses.asdict(self.gpu),
            "parameters": dataclasses.asdict(count) | parameters,
            "tokens": work.tokens,
            "total_flops": work.tokens * work.flops_per_token,
            **self.main.as_record(),
            "tasks": {
                "counted": [dict(zip(names, task, strict=True)) for task in self.tasks],
                "missing": self.missing_tasks,
            },
            "storage_bytes": dataclasses.asdict(self.storage),
            "bucket_month_usd": self.bucket_month_usd,
            "data_out_usd": self.data_out_usd,
            "budget_usd": self.budget_usd,
            "prices": {"to_be_checked": True, "bucket": self.prices.bucket.model_dump(mode="json")},
            "sweep": [
                on.as_record() if isinstance(on, OnGpus) else {"gpus": gpus, "refused": on}
                for gpus, on in self.sweep.items()
            ],
            "offers": [
                price.model_dump(mode="json")
                | {"all_per_hour_usd": price.for_gpus(self.main.gpus), "cost_usd": usd}
                for price, usd in self.offers_usd()
            ],
        }


def estimate_on(
    loaded: LoadedRun,
    choice: Choice,
    *,
    gpus: int,
    gpu: GpuSpec,
    per_hour_usd: float | None,
    budget_usd: float | None = None,
    task_tokens: int = 0,
    prompt_tokens: int = 0,
    mfu: float | None = None,
) -> OnGpus:
    """Return what a run with chosen settings takes on a number of GPUs of a kind.

    `per_hour_usd` is the price of all GPUs; `mfu` takes the place of the expected share of their
    peak. Raises ConfigError if the GPUs cannot divide the batch, or `mfu` is not credible.
    """
    config, stage = loaded.config, choice.zero.stage
    plan, step = step_of_run(loaded, choice, ranks=gpus, gpu=gpu)
    flops = flops_per_token(loaded.shape, sequence_length=plan.sequence_length)
    if mfu is not None:
        step = step_at(mfu, plan=plan, flops_per_token=flops, gpu=gpu)
    work = RunWork(
        config,
        plan,
        loaded.with_steps(plan).config.run.total_steps,
        flops_per_token=flops,
        save_bytes=checkpoint_bytes(loaded.shape, config, stage=stage),
        task_tokens=task_tokens,
        prompt_tokens=prompt_tokens,
        # An upper bound: the time of the host for a pass in training.
        host_seconds=loaded.shape.layers * HOST_SECONDS_A_LAYER[stage],
    )
    cost_at = functools.partial(run_cost, work, step, gpus=gpus, per_hour_usd=per_hour_usd)
    costs = tuple(cost_at(budget_usd=budget_usd, pace=pace) for pace in PACES)
    fits = choice.memory.fits(gpu.memory_gib * 2**30)
    return OnGpus(gpus, per_hour_usd, plan, choice, fits, work, step, costs)


def estimate(
    loaded: LoadedRun,
    *,
    gpus: int,
    gpu: str,
    prices: Prices,
    per_hour_usd: float | None = None,
    budget_usd: float | None = None,
    sweep: Sequence[int] = (),
    tasks: Sequence[TaskWork] = (),
    missing_tasks: Sequence[str] = (),
    prompt_tokens: int = 0,
) -> Estimate:
    """Estimate a run on `gpus` GPUs of a kind, and on the numbers of GPUs in `sweep`.

    `per_hour_usd` is the price of `gpus` GPUs; in the sweep each GPU costs the same. The prompt of
    text samples has `prompt_tokens`.

    Raises:
        ConfigError: The GPU is unknown, or the run is not possible on `gpus` GPUs.
    """
    spec = named_gpu(gpu)
    if loaded.config.precision.dtype == "auto":
        loaded = with_dtype(loaded, "bf16")  # every GPU of the list has it

    def on(loaded: LoadedRun, number: int) -> OnGpus:
        here = min(number, GPUS_A_MACHINE)
        memory_bytes = spec.memory_gib * 2**30
        return estimate_on(
            loaded,
            choose(loaded, ranks=number, memory_bytes=memory_bytes, ranks_here=here),
            gpus=number,
            gpu=spec,
            per_hour_usd=None if per_hour_usd is None else number * (per_hour_usd / gpus),
            budget_usd=budget_usd,
            task_tokens=sum(tokens for _, _, tokens in tasks),
            prompt_tokens=prompt_tokens,
        )

    def tried_on(number: int) -> OnGpus | str:
        try:
            as_set = on(loaded, number)
        except ConfigError as error:
            return str(error)
        by_zero = []
        for stage, partition in SWEPT_ZERO[: 4 if number > GPUS_A_MACHINE else 3]:
            changes = {"stage": stage, "partition": partition, **NO_OFFLOAD}
            zero = loaded.config.zero.model_copy(update=changes)
            config = loaded.config.model_copy(update={"zero": zero})
            with contextlib.suppress(ConfigError):  # too little memory
                by_zero.append(on(dataclasses.replace(loaded, config=config), number))
        return dataclasses.replace(as_set, by_zero=tuple(by_zero))

    main = on(loaded, gpus)
    storage = run_storage(main.work, main.likely, vocabulary=loaded.shape.vocabulary)
    offers = (price for price in prices.machines if gpu_spec(price.gpu) == spec)
    return Estimate(
        loaded=loaded,
        gpu=spec,
        parameters=count_of_run(loaded),
        main=main,
        storage=storage,
        bucket_month_usd=storage.mirror / 1e9 * prices.bucket.gb_month_usd,
        data_out_usd=storage.data / 1e9 * prices.bucket.gb_out_usd,
        sweep={number: tried_on(number) for number in sweep},
        offers=tuple(sorted(offers, key=lambda price: price.for_gpus(gpus))),
        tasks=tasks,
        missing_tasks=missing_tasks,
        budget_usd=budget_usd,
        prices=prices,
    )
