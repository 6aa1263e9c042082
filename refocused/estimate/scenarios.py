"""A run's hours, dollars, memory, disk and bandwidth before it begins, on any number of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun
from refocused.config.prices import MachinePrice, Prices
from refocused.config.run_config import RunConfig
from refocused.estimate.flops import ParameterCount, count_parameters, flops_per_token
from refocused.estimate.memory_plan import Choice, choose
from refocused.estimate.precision import with_dtype
from refocused.estimate.run_cost import (
    Machine,
    RunCost,
    RunStorage,
    RunWork,
    SampleWork,
    affordable_steps,
    checkpoint_bytes,
    run_cost,
    run_storage,
    work_of,
)
from refocused.estimate.step_time import HOST_SECONDS_A_LAYER, StepTime, step_of_run
from refocused.system.errors import ConfigError
from refocused.system.hardware import GpuFacts, gpu_facts, named_gpu

PACES = (0.75, 1.0, 1.25)  # of the expected speed, which rests on assumptions; 1 is likely


@dataclasses.dataclass(frozen=True, slots=True)
class TasksWork:
    """What the tasks of a run take: name, items and tokens of each, and the files not found."""

    counted: tuple[tuple[str, int, int], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of all endings with their contexts: what passes through the model each time."""
        return sum(tokens for _, _, tokens in self.counted)


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A run at a pace; `affordable_steps` is None without a budget or a price."""

    mfu_fraction: float
    cost: RunCost
    affordable_steps: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class OnGpus:
    """A run on a number of GPUs, or why it cannot be made on so many."""

    gpus: int
    per_hour_usd: float | None  # of all of them
    refused: str | None = None
    plan: BatchPlan | None = None
    choice: Choice | None = None
    fits: bool = False  # whether a step fits into a GPU's memory, as far as is known
    work: RunWork | None = None
    step: StepTime | None = None
    scenarios: tuple[Scenario, ...] = ()  # at `PACES`

    @property
    def likely(self) -> Scenario | None:
        """The scenario for where one figure must do."""
        return self.scenarios[PACES.index(1.0)] if self.scenarios else None

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        if self.plan is None or self.choice is None or self.work is None or self.step is None:
            return {"gpus": self.gpus, "refused": self.refused}
        counts = ("validations", "task_rounds", "samples", "saves")
        return {
            "gpus": self.gpus,
            "per_hour_usd": self.per_hour_usd,
            "batch": {**dataclasses.asdict(self.plan), "tokens": self.plan.tokens},
            "zero_stage": self.choice.zero.stage,
            "memory_bytes": dataclasses.asdict(self.choice.memory),
            "fits": self.fits,
            "step_seconds": self.step.parts,
            "work": dataclasses.asdict(self.work) | {n: getattr(self.work, n) for n in counts},
            "scenarios": [
                {
                    "mfu_fraction": one.mfu_fraction,
                    **dataclasses.asdict(one.cost),
                    "hours": one.cost.hours,
                    "affordable_steps": one.affordable_steps,
                }
                for one in self.scenarios
            ],
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A run at the likely pace on as many machines of a provider as are needed."""

    price: MachinePrice
    per_hour_usd: float
    cost_usd: float


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a run takes."""

    loaded: LoadedRun
    gpu: GpuFacts
    parameters: ParameterCount
    main: OnGpus  # on the GPUs that were asked for
    storage: RunStorage  # at the likely pace
    bucket_month_usd: float  # of the mirror at the run's end
    data_out_usd: float  # of the data leaving the bucket once for another provider's machines
    sweep: tuple[OnGpus, ...]
    offers: tuple[Offer, ...]  # of this GPU, the cheapest first
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
        count, names = self.parameters, ("name", "items", "tokens")
        parameters = {"total": count.total, "without_embeddings": count.without_embeddings}
        return {
            "run": self.loaded.config.run.name,
            "gpu": dataclasses.asdict(self.gpu),
            "parameters": dataclasses.asdict(count) | parameters,
            "tokens": self.work.tokens,
            "total_flops": self.work.tokens * self.work.flops_per_token,
            **self.main.as_record(),
            "tasks": {
                "counted": [dict(zip(names, task, strict=True)) for task in self.tasks.counted],
                "missing": self.tasks.missing,
            },
            "storage_bytes": dataclasses.asdict(self.storage),
            "bucket_month_usd": self.bucket_month_usd,
            "data_out_usd": self.data_out_usd,
            "budget_usd": self.budget_usd,
            "prices": {"to_be_checked": True, "bucket": self.prices.bucket.model_dump(mode="json")},
            "sweep": [one.as_record() for one in self.sweep],
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
    tasks: TasksWork,
    prompt_tokens: int = 0,
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
        tasks: What the run's tasks take.
        prompt_tokens: Of the text that samples begin with.

    Raises:
        ConfigError: The GPU is not known, or the run cannot be made on so many.
    """
    facts = named_gpu(gpu)
    if loaded.config.precision.dtype == "auto":
        loaded = with_dtype(loaded, "bf16")  # which every GPU of the list computes in
    config = loaded.config
    each_usd = None if per_hour_usd is None else per_hour_usd / gpus

    def on(number: int) -> OnGpus:
        return _on_gpus(
            loaded,
            number,
            facts,
            task_tokens=tasks.tokens,
            prompt_tokens=prompt_tokens,
            per_hour_usd=None if each_usd is None else number * each_usd,
            budget_usd=budget_usd,
        )

    def tried_on(number: int) -> OnGpus:
        try:
            return on(number)
        except ConfigError as error:
            price = None if each_usd is None else number * each_usd
            return OnGpus(number, price, refused=str(error))

    main = on(gpus)
    assert main.work is not None and main.likely is not None  # it was not refused
    hours = main.likely.cost.hours
    vocabulary = loaded.shape.vocabulary
    storage = run_storage(
        main.work, main.likely.cost, checkpoint=config.checkpoint, vocabulary=vocabulary
    )
    offers = (
        Offer(price, price.for_gpus(gpus), price.for_gpus(gpus) * hours)
        for price in prices.machines
        if gpu_facts(price.gpu) == facts
    )
    multiple = config.model.vocabulary_multiple
    return Estimate(
        loaded=loaded,
        gpu=facts,
        parameters=count_parameters(loaded.shape, vocabulary_multiple=multiple),
        main=main,
        storage=storage,
        bucket_month_usd=storage.mirror / 1e9 * prices.bucket.gb_month_usd,
        data_out_usd=storage.data / 1e9 * prices.bucket.gb_out_usd,
        sweep=tuple(map(tried_on, sweep)),
        offers=tuple(sorted(offers, key=lambda offer: offer.cost_usd)),
        tasks=tasks,
        budget_usd=budget_usd,
        prices=prices,
    )


def _on_gpus(
    loaded: LoadedRun,
    gpus: int,
    gpu: GpuFacts,
    *,
    task_tokens: int,
    prompt_tokens: int,
    per_hour_usd: float | None,
    budget_usd: float | None,
) -> OnGpus:
    config, shape, dtype = loaded.config, loaded.shape, loaded.config.precision.resolved
    memory_bytes = gpu.memory_gib * 2**30
    choice = choose(
        shape,
        model=config.model,
        batch=config.batch,
        zero=config.zero,
        dtype=dtype,
        ranks=gpus,
        memory_bytes=memory_bytes,
        masked=config.data.mask_documents,
    )
    plan, step = step_of_run(loaded, choice, ranks=gpus, gpu=gpu)
    length = config.model.sequence_length
    count = count_parameters(shape, vocabulary_multiple=config.model.vocabulary_multiple)
    stage = choice.zero.stage
    work = work_of(
        steps=config.run.steps,
        step_tokens=plan.tokens,
        sequence_length=length,
        flops_per_token=flops_per_token(shape, sequence_length=length),
        evaluation=config.evaluation,
        task_tokens=task_tokens,
        sample=_sample_work(config, prompt_tokens, layers=shape.layers, stage=stage),
        checkpoint=config.checkpoint,
        save_bytes=checkpoint_bytes(count.allocated, stage=stage, dtype=dtype),
    )
    scenarios = []
    for pace in PACES:
        speed = pace * work.step_tokens / step.seconds
        machine = Machine(gpus, speed, pace * step.forward_tokens_per_second, per_hour_usd)
        reach = None
        if budget_usd is not None and per_hour_usd is not None:
            reach = affordable_steps(work, machine, budget_usd=budget_usd)
        scenarios.append(Scenario(pace * step.mfu_fraction, run_cost(work, machine), reach))
    return OnGpus(
        gpus,
        per_hour_usd,
        plan=plan,
        choice=choice,
        fits=choice.memory.fits(memory_bytes),
        work=work,
        step=step,
        scenarios=tuple(scenarios),
    )


def _sample_work(
    config: RunConfig, prompt_tokens: int, *, layers: int, stage: int
) -> SampleWork | None:
    """Return what a sample takes; the host's time is that of a training pass, rather too much."""
    evaluation = config.evaluation
    if evaluation.sample_prompt is None:
        return None
    middle = prompt_tokens + evaluation.sample_tokens // 2
    return SampleWork(
        tokens=evaluation.sample_tokens,
        context_tokens=min(config.model.sequence_length, middle),
        host_seconds=layers * HOST_SECONDS_A_LAYER[stage],
    )
