"""A run's hours, dollars, memory, disk and bandwidth before it begins, from its settings (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from refocused.commands.evaluation_work import TasksWork, sample_work, tasks_work
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun
from refocused.config.prices import MachinePrice, Prices
from refocused.estimate.flops import ParameterCount, count_parameters, flops_per_token
from refocused.estimate.memory_plan import Choice, choose
from refocused.estimate.precision import with_dtype
from refocused.estimate.run_cost import (
    Machine,
    RunCost,
    RunStorage,
    RunWork,
    affordable_steps,
    checkpoint_bytes,
    run_cost,
    run_storage,
    work_of,
)
from refocused.estimate.step_time import StepTime, step_of_run
from refocused.system.errors import ConfigError
from refocused.system.hardware import GpuFacts, gpu_facts, named_gpu

PACES = (0.75, 1.0, 1.25)  # of the expected speed, which rests on assumptions; 1 is likely


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A run at a pace.

    Attributes:
        mfu_fraction: The share of the peak that this pace is.
        cost: What the run takes.
        affordable_steps: Steps that the budget pays for; None without a budget or a price.
    """

    mfu_fraction: float
    cost: RunCost
    affordable_steps: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class OnGpus:
    """A run on a number of GPUs.

    Attributes:
        gpus: How many.
        per_hour_usd: Of all of them; None: unknown.
        plan: The batch of a step; None: the run cannot be made on so many.
        choice: ZeRO stage, offload, micro-batch and memory; None as `plan`.
        fits: Whether a step fits into a GPU's memory, as far as is known.
        work: What the run consists of; None as `plan`.
        step: The time of a step, as expected; None as `plan`.
        scenarios: At the paces, in their order.
        refused: Why the run cannot be made on so many.
    """

    gpus: int
    per_hour_usd: float | None
    plan: BatchPlan | None
    choice: Choice | None
    fits: bool
    work: RunWork | None
    step: StepTime | None
    scenarios: tuple[Scenario, ...]
    refused: str | None = None

    @property
    def likely(self) -> Scenario | None:
        """The scenario for where one figure must do."""
        return self.scenarios[PACES.index(1.0)] if self.scenarios else None


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A run on machines of a provider, at the likely pace.

    Attributes:
        price: The machine.
        per_hour_usd: Of as many as are needed.
        cost_usd: Of the run.
    """

    price: MachinePrice
    per_hour_usd: float
    cost_usd: float


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a run takes.

    Attributes:
        loaded: The run file and the model's shape.
        gpu: What it is to be trained on.
        parameters: Of the model.
        main: On the GPUs that were asked for.
        storage: Disk, bucket and network, at the likely pace.
        bucket_month_usd: Of the mirror at the run's end, a month.
        data_out_usd: Of the data leaving the bucket once for another provider's machines.
        sweep: On other numbers of GPUs.
        offers: Of providers with this GPU, the cheapest first.
        tasks: What its tasks take; those whose files are not here count as nothing.
        budget_usd: What the run may cost; None: not given.
        prices: The list that the offers are from.
    """

    loaded: LoadedRun
    gpu: GpuFacts
    parameters: ParameterCount
    main: OnGpus
    storage: RunStorage
    bucket_month_usd: float
    data_out_usd: float
    sweep: tuple[OnGpus, ...]
    offers: tuple[Offer, ...]
    tasks: TasksWork
    budget_usd: float | None
    prices: Prices

    @property
    def work(self) -> RunWork:
        """What the run consists of, on the GPUs that were asked for."""
        assert self.main.work is not None  # `estimate` refuses a run that cannot be made on them
        return self.main.work

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "run": self.loaded.config.run.name,
            "gpu": dataclasses.asdict(self.gpu),
            "parameters": {
                **dataclasses.asdict(self.parameters),
                "total": self.parameters.total,
                "without_embeddings": self.parameters.without_embeddings,
            },
            "tokens": self.work.tokens,
            "total_flops": self.work.tokens * self.work.flops_per_token,
            **_record_of(self.main),
            "tasks": dataclasses.asdict(self.tasks),
            "storage_bytes": dataclasses.asdict(self.storage),
            "bucket_month_usd": self.bucket_month_usd,
            "data_out_usd": self.data_out_usd,
            "budget_usd": self.budget_usd,
            "prices": {"to_be_checked": True, "bucket": self.prices.bucket.model_dump(mode="json")},
            "sweep": [_record_of(one) for one in self.sweep],
            "offers": [
                {
                    **offer.price.model_dump(mode="json"),
                    "all_per_hour_usd": offer.per_hour_usd,
                    "cost_usd": offer.cost_usd,
                }
                for offer in self.offers
            ],
        }


def estimate(
    loaded: LoadedRun,
    *,
    gpus: int,
    gpu: str,
    per_hour_usd: float | None,
    budget_usd: float | None,
    sweep: Sequence[int],
    prices: Prices,
) -> Estimate:
    """Estimate a run.

    Args:
        loaded: The run file and the model's shape.
        gpus: To train on.
        gpu: Their name.
        per_hour_usd: Price of all of them; in the sweep each GPU costs the same.
        budget_usd: What the run may cost.
        sweep: Other numbers of GPUs.
        prices: Of machines and buckets.

    Raises:
        ConfigError: The GPU is not known, or the run cannot be made on so many.
    """
    facts = named_gpu(gpu)
    if loaded.config.precision.dtype == "auto":
        loaded = with_dtype(loaded, "bf16")  # which every GPU of the list computes in
    each_usd = None if per_hour_usd is None else per_hour_usd / gpus
    tasks = tasks_work(loaded.config)
    asked = _Asked(loaded, facts, tasks.tokens, each_usd=each_usd, budget_usd=budget_usd)
    main = _on_gpus(asked, gpus)
    others = tuple(_tried_on_gpus(asked, number) for number in sweep)
    assert main.work is not None and main.likely is not None  # it was not refused
    config = loaded.config
    storage = run_storage(
        main.work,
        main.likely.cost,
        checkpoint=config.checkpoint,
        vocabulary=loaded.shape.vocabulary,
    )
    offers = (
        Offer(price, price.for_gpus(gpus), price.for_gpus(gpus) * main.likely.cost.hours)
        for price in prices.machines
        if gpu_facts(price.gpu) == facts
    )
    return Estimate(
        loaded=loaded,
        gpu=facts,
        parameters=count_parameters(
            loaded.shape, vocabulary_multiple=config.model.vocabulary_multiple
        ),
        main=main,
        storage=storage,
        bucket_month_usd=storage.mirror / 1e9 * prices.bucket.gb_month_usd,
        data_out_usd=storage.data / 1e9 * prices.bucket.gb_out_usd,
        sweep=others,
        offers=tuple(sorted(offers, key=lambda offer: offer.cost_usd)),
        tasks=tasks,
        budget_usd=budget_usd,
        prices=prices,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked, on any number of GPUs.

    Attributes:
        loaded: The run file and the model's shape.
        gpu: To train on.
        task_tokens: Of putting all tasks once.
        each_usd: Price of a GPU an hour; None: unknown.
        budget_usd: What the run may cost; None: not given.
    """

    loaded: LoadedRun
    gpu: GpuFacts
    task_tokens: int
    each_usd: float | None
    budget_usd: float | None

    def price(self, gpus: int) -> float | None:
        """Return the price of so many an hour; None: unknown."""
        return None if self.each_usd is None else self.each_usd * gpus


def _tried_on_gpus(asked: _Asked, gpus: int) -> OnGpus:
    """Return a run on a number of GPUs, or why it cannot be made on so many."""
    try:
        return _on_gpus(asked, gpus)
    except ConfigError as error:
        price = asked.price(gpus)
        return OnGpus(gpus, price, None, None, False, None, None, (), refused=str(error))


def _on_gpus(asked: _Asked, gpus: int) -> OnGpus:
    config, shape, gpu = asked.loaded.config, asked.loaded.shape, asked.gpu
    memory_bytes = gpu.memory_gib * 2**30
    choice = choose(
        shape,
        model=config.model,
        batch=config.batch,
        zero=config.zero,
        dtype=config.precision.resolved,
        ranks=gpus,
        memory_bytes=memory_bytes,
        masked=config.data.mask_documents,
    )
    plan, step = step_of_run(asked.loaded, choice, ranks=gpus, gpu=gpu)
    length = config.model.sequence_length
    count = count_parameters(shape, vocabulary_multiple=config.model.vocabulary_multiple)
    work = work_of(
        steps=config.run.steps,
        step_tokens=plan.tokens,
        sequence_length=length,
        flops_per_token=flops_per_token(shape, sequence_length=length),
        evaluation=config.evaluation,
        task_tokens=asked.task_tokens,
        sample=sample_work(config, layers=shape.layers, stage=choice.zero.stage),
        checkpoint=config.checkpoint,
        save_bytes=checkpoint_bytes(
            count.allocated, stage=choice.zero.stage, dtype=config.precision.resolved
        ),
    )
    price = asked.price(gpus)
    scenarios = (_scenario(work, step, pace, gpus, price, asked.budget_usd) for pace in PACES)
    fits = choice.memory.fits(memory_bytes)
    return OnGpus(gpus, price, plan, choice, fits, work, step, tuple(scenarios))


def _scenario(
    work: RunWork,
    step: StepTime,
    pace: float,
    gpus: int,
    per_hour_usd: float | None,
    budget_usd: float | None,
) -> Scenario:
    machine = Machine(
        gpus,
        pace * work.step_tokens / step.seconds,
        pace * step.forward_tokens_per_second,
        per_hour_usd,
    )
    reach = None
    if budget_usd is not None and machine.per_hour_usd is not None:
        reach = affordable_steps(work, machine, budget_usd=budget_usd)
    return Scenario(pace * step.mfu_fraction, run_cost(work, machine), reach)


def _record_of(on: OnGpus) -> dict[str, Any]:
    if on.plan is None or on.choice is None or on.work is None or on.step is None:
        return {"gpus": on.gpus, "refused": on.refused}
    return {
        "gpus": on.gpus,
        "per_hour_usd": on.per_hour_usd,
        "batch": {**dataclasses.asdict(on.plan), "tokens": on.plan.tokens},
        "zero_stage": on.choice.zero.stage,
        "memory_bytes": dataclasses.asdict(on.choice.memory),
        "fits": on.fits,
        "step_seconds": on.step.parts,
        "work": {
            **dataclasses.asdict(on.work),
            "validations": on.work.validations,
            "task_rounds": on.work.task_rounds,
            "samples": on.work.samples,
            "saves": on.work.saves,
        },
        "scenarios": [
            {
                "mfu_fraction": one.mfu_fraction,
                **one.cost.as_record(),
                "affordable_steps": one.affordable_steps,
            }
            for one in on.scenarios
        ],
    }
