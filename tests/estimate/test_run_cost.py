"""The time, the money and the storage of a run, by hand."""

import dataclasses
from typing import Any

import pytest

from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.cadence import times_left
from refocused.config.load_run import load_run
from refocused.estimate.run_cost import (
    DISK_BYTES_PER_SECOND,
    HOST_COPY_BYTES_PER_SECOND,
    START_UP_SECONDS,
    RunCost,
    RunWork,
    run_cost,
    run_storage,
)
from refocused.estimate.step_time import StepTime


def work_of(**sections: Any) -> RunWork:
    """Return 3,600 steps of a million tokens, with changes to sections of the run file."""
    changes: dict[str, dict[str, Any]] = {
        "evaluation": {"interval": 1000, "sequences": 30_000, "sample_prompt": None},
        "checkpoint": {"interval": 500, "in_background": False, "mirror": None, "save_best": False},
    }
    config = load_run("demo").config
    for name, section in changes.items():
        values = section | sections.get(name, {})
        config = config.model_copy(update={name: getattr(config, name).model_copy(update=values)})
    return RunWork(config, BatchPlan(125, 1, 8, 1000), 3600, 3.2e9, save_bytes=10_000_000_000)


WORK = work_of()
STEP = StepTime(1.0, 0, 0, 0, 0, 0, forward_tokens_per_second=3e6, mfu_fraction=0.4)


def cost_of(work: RunWork = WORK, step: StepTime = STEP, **options: Any) -> RunCost:
    """Return the cost on eight GPUs, at 1 cent a second unless another price is given."""
    return run_cost(work, step, **{"gpus": 8, "per_hour_usd": 36.0, **options})


def reach_of(budget_usd: float, work: RunWork = WORK) -> int:
    reach = cost_of(work, budget_usd=budget_usd).affordable_steps
    assert reach is not None
    return reach


def test_the_warm_up_of_the_batch_spares_tokens_and_time() -> None:
    config = load_run("demo", ["batch.micro_batch_size=4", "batch.warmup_steps=100"]).config
    plan = plan_batch(config.batch, world_size=1, sequence_length=64)
    work = RunWork(config, plan, config.run.steps, flops_per_token=1.0, save_bytes=1)
    assert (
        work.tokens == plan.sequences_between(0, config.run.steps) * 64 < work.steps * plan.tokens
    )
    assert cost_of(work).training_seconds == pytest.approx(work.tokens / plan.tokens)


def test_hours_and_dollars_by_hand() -> None:
    cost = cost_of()
    assert (cost.tokens_per_second, cost.step_seconds) == (1e6, 1.0)
    assert cost.training_seconds == 3600.0
    assert cost.validation_seconds == 4 * 10.0  # 1,000, 2,000, 3,000 and the end; forward alone
    assert cost.save_seconds == 8 * 1e10 / DISK_BYTES_PER_SECOND  # 500 to 3,500 and the end
    seconds = 3600 + 40 + 8 * 1e10 / DISK_BYTES_PER_SECOND + START_UP_SECONDS
    assert cost.hours == pytest.approx(seconds / 3600)
    assert cost.cost_usd == pytest.approx(seconds / 100)
    assert cost.usd_per_million_tokens == pytest.approx(seconds / 100 / 3600)
    free = cost_of(per_hour_usd=None, budget_usd=20.0)
    assert free.hours == cost.hours
    assert free.cost_usd is free.usd_per_million_tokens is free.affordable_steps is None
    half = cost_of(pace=0.5)
    assert (half.training_seconds, half.validation_seconds) == (7200.0, 80.0)
    assert (half.save_seconds, half.mfu_fraction) == (cost.save_seconds, 0.2)


def test_saves_of_best_validations_count_once_each() -> None:
    both = work_of(evaluation={"interval": 300}, checkpoint={"save_best": True})
    assert WORK.count("save") == 8  # each 500 steps, and the last
    assert (
        both.count("save") == 8 + 12 - 3
    )  # of 12 validations 3 are at a step that is saved anyway


def test_a_baseline_is_one_more_of_each_evaluation() -> None:
    base, more = work_of(), work_of(evaluation={"at_start": True})
    assert more.count("validation") == base.count("validation") + 1
    assert (more.count("save"), more.count("tasks")) == (base.count("save"), 0)  # no tasks named
    asked = [dataclasses.replace(work, task_tokens=1) for work in (base, more)]
    assert [work.count("tasks") for work in asked] == [1, 2]


def test_tasks_are_forward_passes_of_all_gpus_and_samples_of_each() -> None:
    evaluation = {
        "tasks": ("a.jsonl",),
        "task_interval": 1200,
        "sample_interval": 900,
        "sample_tokens": 200,
    }
    work = work_of(evaluation={**evaluation, "sample_prompt": "Once"})
    work = dataclasses.replace(work, task_tokens=6_000_000, prompt_tokens=650, host_seconds=1e-3)
    assert (work.count("tasks"), work.count("sample")) == (3, 5)
    cost = cost_of(work)
    assert cost.task_seconds == pytest.approx(3 * 2.0)
    # One GPU takes 375,000 tokens a second forward: 2 ms for 750, more than the host needs.
    assert cost.sample_seconds == pytest.approx(5 * 200 * 2e-3)
    assert cost.hours * 3600 == pytest.approx(cost_of().hours * 3600 + 6 + 2.0)
    slow = dataclasses.replace(work, host_seconds=0.04)
    assert cost_of(slow).sample_seconds == pytest.approx(5 * 200 * 0.04)


def test_saves_in_the_background_cost_their_copy_alone() -> None:
    cost = cost_of(work_of(checkpoint={"in_background": True}))
    assert cost.save_seconds == pytest.approx(8 * 1e10 / (8 * HOST_COPY_BYTES_PER_SECOND))


def test_a_budget_pays_for_the_steps_that_cost_no_more() -> None:
    # 1,200 steps: 1,200 s, validations after 1,000 and at the end, saves after 500, 1,000 and 1,200
    seconds = 1200 + 2 * 10 + 3 * 5 + START_UP_SECONDS
    assert reach_of(seconds / 100 + 1e-6) == 1200
    assert reach_of(seconds / 100 - 1e-6) == 1199
    assert reach_of(1e6) == 3600
    assert reach_of(0.01) == 0
    tasks = work_of(evaluation={"tasks": ("a.jsonl",), "task_interval": 10})
    tasks = dataclasses.replace(tasks, task_tokens=30_000_000)
    assert 0 < reach_of(20.0, tasks) < reach_of(20.0)


@pytest.mark.parametrize(
    ("step", "interval", "left"),
    [(0, 0, 1), (0, 30, 4), (30, 30, 3), (31, 30, 3), (99, 30, 1), (100, 30, 0), (0, 50, 2)],
)
def test_the_last_step_always_counts(step: int, interval: int, left: int) -> None:
    assert times_left(step, 100, interval) == left


def test_disk_mirror_and_bandwidth_by_hand() -> None:
    mirrored = {"keep": 2, "mirror": "gs://bucket/runs"}
    cost, work = cost_of(), work_of(checkpoint=mirrored)
    storage = run_storage(work, cost, vocabulary=50_304)
    assert storage.disk == 5 * 10**10  # two kept, the best, an interruption's, one being written
    assert storage.mirror == storage.upload == 8 * 10**10
    assert storage.upload_per_second == pytest.approx(8e10 / (cost.hours * 3600))
    assert (storage.data, storage.data_per_second) == (7_200_000_000, 2e6)
    wide = run_storage(work_of(checkpoint={**mirrored, "keep_remote": 3}), cost, vocabulary=70_000)
    assert (wide.mirror, wide.data) == (5 * 10**10, 14_400_000_000)
    alone = run_storage(WORK, cost, vocabulary=256)
    assert (alone.mirror, alone.upload, alone.upload_per_second) == (0, 0, 0.0)
