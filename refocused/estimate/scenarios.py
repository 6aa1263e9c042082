"""Estimate hours, dollars, memory, disk and bandwidth of a run on any number of GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun
from refocused.config.prices import MachinePrice, Prices
from refocused.estimate.flops import ParameterCount, count_of_run, flops_per_token
from refocused.estimate.memory import checkpoint_bytes
from refocused.estimate.memory_plan import NO_OFFLOAD, Choice, choose
from refocused.estimate.precision import with_dtype
from refocused.estimate.run_cost import (
    RunCost,
    RunStorage,
    RunWork,
    SampleWork,
    run_cost,
    run_storage,
    work_of,
)
from refocused.estimate.step_time import HOST_SECONDS_A_LAYER, StepTime, step_of_run
from refocused.estimate.traffic import GPUS_A_MACHINE, LINK_SHARE
from refocused.system.errors import ConfigError
from refocused.system.hardware import GpuSpec, gpu_spec, named_gpu

PACES = (0.75, 1.0, 1.25)  # times the expected speed, which rests on assumptions
# Stage 0 is never chosen; see `choose`.
SWEPT_ZERO = ((1, "world"), (2, "world"), (3, "world"), (3, "node"))


@dataclasses.dataclass(frozen=True, slots=True)
class TasksWork:
    """The tasks of a run: name, items and tokens of each, and the missing files."""

    counted: tuple[tuple[str, int, int], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all endings with their contexts."""
        return sum(tokens for _, _, tokens in self.counted)


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
        of_3 = [one for one in self.by_zero if one.choice.zero.stage == 3]
        by = {one.choice.zero.partition: one.step.traffic for one in of_3}
        world, node = by.get("world"), by.get("node")
        if world is None or node is None:
            return None
        spared = world.between_bytes - node.between_bytes
        return spared / (LINK_SHARE * node.copies_seconds) if node.copies_seconds else 0.0

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        traffic = self.step.traffic
        counts = ("validations", "task_rounds", "samples", "saves")
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
            "work": dataclasses.asdict(self.work) | {n: getattr(self.work, n) for n in counts},
            "scenarios": [dataclasses.asdict(c) | {"hours": c.hours} for c in self.scenarios],
            "by_zero": [one.as_record() for one in self.by_zero],
            "hpz_pays_below_bytes_per_second": self.hpz_pays_below,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The cost of a run on the machines of a provider, at the expected speed."""

    price: MachinePrice
    per_hour_usd: float
    cost_usd: float


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
    offers: tuple[Offer, ...]  # of this GPU, the cheapest first
    tasks: TasksWork
    budget_usd: float | None
    prices: Prices

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
                "counted": [dict(zip(names, task, strict=True)) for task in self.tasks.counted],
                "missing": self.tasks.missing,
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
                offer.price.model_dump(mode="json")
                | {"all_per_hour_usd": offer.per_hour_usd, "cost_usd": offer.cost_usd}
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
    """Estimate a run on `gpus` GPUs of a kind, and on the numbers of GPUs in `sweep`.

    `per_hour_usd` is the price of `gpus` GPUs; in the sweep each GPU costs the same. The prompt of
    text samples has `prompt_tokens`.

    Raises:
        ConfigError: The GPU is unknown, or the run is not possible on `gpus` GPUs.
    """
    facts = named_gpu(gpu)
    if loaded.config.precision.dtype == "auto":
        loaded = with_dtype(loaded, "bf16")  # every GPU of the list has it
    each_usd = None if per_hour_usd is None else per_hour_usd / gpus

    def on(loaded: LoadedRun, gpus: int) -> OnGpus:
        config, memory_bytes = loaded.config, facts.memory_gib * 2**30
        here = min(gpus, GPUS_A_MACHINE)
        choice = choose(loaded, ranks=gpus, memory_bytes=memory_bytes, ranks_here=here)
        plan, step = step_of_run(loaded, choice, ranks=gpus, gpu=facts)
        stage, length = choice.zero.stage, plan.sequence_length
        sample: SampleWork | None = None
        if config.evaluation.sample_prompt is not None:
            tokens = config.evaluation.sample_tokens
            # An upper bound: the time of the host for a pass in training.
            host_seconds = loaded.shape.layers * HOST_SECONDS_A_LAYER[stage]
            sample = SampleWork(tokens, min(length, prompt_tokens + tokens // 2), host_seconds)
        work = work_of(
            config,
            plan,
            flops_per_token=flops_per_token(loaded.shape, sequence_length=length),
            task_tokens=tasks.tokens,
            sample=sample,
            save_bytes=checkpoint_bytes(loaded.shape, config, stage=stage),
        )
        price = None if each_usd is None else gpus * each_usd
        costs = [
            run_cost(work, step, gpus=gpus, per_hour_usd=price, budget_usd=budget_usd, pace=pace)
            for pace in PACES
        ]
        fits = choice.memory.fits(memory_bytes)
        return OnGpus(gpus, price, plan, choice, fits, work, step, tuple(costs))

    def tried_on(number: int) -> OnGpus | str:
        try:
            found = on(loaded, number)
        except ConfigError as error:
            return str(error)
        by_zero = []
        for stage, partition in SWEPT_ZERO[: 4 if number > GPUS_A_MACHINE else 3]:
            changes = {"stage": stage, "partition": partition, **NO_OFFLOAD}
            zero = loaded.config.zero.model_copy(update=changes)
            config = loaded.config.model_copy(update={"zero": zero})
            with contextlib.suppress(ConfigError):  # too little memory
                by_zero.append(on(dataclasses.replace(loaded, config=config), number))
        return dataclasses.replace(found, by_zero=tuple(by_zero))

    main = on(loaded, gpus)
    checkpoint, vocabulary = loaded.config.checkpoint, loaded.shape.vocabulary
    storage = run_storage(main.work, main.likely, checkpoint=checkpoint, vocabulary=vocabulary)
    offers = (
        Offer(price, price.for_gpus(gpus), price.for_gpus(gpus) * main.likely.hours)
        for price in prices.machines
        if gpu_spec(price.gpu) == facts
    )
    return Estimate(
        loaded=loaded,
        gpu=facts,
        parameters=count_of_run(loaded),
        main=main,
        storage=storage,
        bucket_month_usd=storage.mirror / 1e9 * prices.bucket.gb_month_usd,
        data_out_usd=storage.data / 1e9 * prices.bucket.gb_out_usd,
        sweep={number: tried_on(number) for number in sweep},
        offers=tuple(sorted(offers, key=lambda offer: offer.cost_usd)),
        tasks=tasks,
        budget_usd=budget_usd,
        prices=prices,
    )
