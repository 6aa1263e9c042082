from __future__ import annotations

import dataclasses

import pytest

from refocused.config.outputs import CheckpointConfig
from refocused.estimate.run_cost import (
    DISK_BYTES_PER_SECOND,
    HOST_COPY_BYTES_PER_SECOND,
    START_UP_SECONDS,
    Machine,
    RunWork,
    SampleWork,
    affordable_steps,
    checkpoint_bytes,
    run_cost,
    run_storage,
    times_left,
)

# A million tokens a second: a step a second.
WORK = RunWork(
    steps=3600,
    step_tokens=1_000_000,
    flops_per_token=3.2e9,
    validation_interval=1000,
    validation_tokens=30_000_000,
    task_interval=0,
    task_tokens=0,
    sample_interval=0,
    sample=None,
    save_interval=500,
    save_bytes=10_000_000_000,
    saves_in_background=False,
)
MACHINE = Machine(8, 1e6, 3e6, per_hour_usd=36.0)  # 1 cent a second


def test_hours_and_dollars_by_hand() -> None:
    cost = run_cost(WORK, MACHINE)
    assert (cost.tokens_per_second, cost.step_seconds) == (1e6, 1.0)
    assert cost.training_seconds == 3600.0
    assert cost.validation_seconds == 4 * 10.0  # 1,000, 2,000, 3,000 and the end; forward alone
    assert cost.save_seconds == 8 * 1e10 / DISK_BYTES_PER_SECOND  # 500 to 3,500 and the end
    seconds = 3600 + 40 + 8 * 1e10 / DISK_BYTES_PER_SECOND + START_UP_SECONDS
    assert cost.hours == pytest.approx(seconds / 3600)
    assert cost.cost_usd == pytest.approx(seconds / 100)
    assert cost.usd_per_million_tokens == pytest.approx(seconds / 100 / 3600)


def test_tasks_are_forward_passes_of_all_gpus_and_samples_of_each() -> None:
    sample = SampleWork(tokens=200, context_tokens=750, host_seconds=1e-3)
    asked = {"task_interval": 1200, "task_tokens": 6_000_000, "sample_interval": 900}
    work = dataclasses.replace(WORK, **asked, sample=sample)
    assert (work.task_rounds, work.samples) == (3, 4)
    cost = run_cost(work, MACHINE)
    assert cost.task_seconds == pytest.approx(3 * 2.0)
    # One GPU takes 375,000 tokens a second forward: 2 ms for 750, more than the host needs.
    assert cost.sample_seconds == pytest.approx(4 * 200 * 2e-3)
    assert cost.hours * 3600 == pytest.approx(run_cost(WORK, MACHINE).hours * 3600 + 6 + 1.6)
    slow = dataclasses.replace(work, sample=dataclasses.replace(sample, host_seconds=0.04))
    assert run_cost(slow, MACHINE).sample_seconds == pytest.approx(4 * 200 * 0.04)


def test_tasks_and_samples_shorten_what_a_budget_pays_for() -> None:
    work = dataclasses.replace(WORK, task_interval=10, task_tokens=30_000_000)
    reach = affordable_steps(work, MACHINE, budget_usd=20.0)
    assert 0 < reach < affordable_steps(WORK, MACHINE, budget_usd=20.0)


def test_without_a_price_there_are_hours_and_no_dollars() -> None:
    cost = run_cost(WORK, dataclasses.replace(MACHINE, per_hour_usd=None))
    assert cost.hours > 1.0
    assert (cost.cost_usd, cost.usd_per_million_tokens) == (None, None)


def test_saves_in_the_background_cost_their_copy_alone() -> None:
    cost = run_cost(dataclasses.replace(WORK, saves_in_background=True), MACHINE)
    assert cost.save_seconds == pytest.approx(8 * 1e10 / (8 * HOST_COPY_BYTES_PER_SECOND))


def test_steps_and_validations_have_speeds_of_their_own() -> None:
    half = run_cost(WORK, dataclasses.replace(MACHINE, tokens_per_second=5e5))
    assert half.training_seconds == 7200.0
    assert half.save_seconds == run_cost(WORK, MACHINE).save_seconds
    assert half.validation_seconds == run_cost(WORK, MACHINE).validation_seconds


def test_a_budget_pays_for_the_steps_that_cost_no_more() -> None:
    # 1,200 steps: 1,200 s, validations after 1,000 and at the end, saves after 500, 1,000 and 1,200
    seconds = 1200 + 2 * 10 + 3 * 5 + START_UP_SECONDS
    assert affordable_steps(WORK, MACHINE, budget_usd=seconds / 100 + 1e-6) == 1200
    assert affordable_steps(WORK, MACHINE, budget_usd=seconds / 100 - 1e-6) == 1199
    assert affordable_steps(WORK, MACHINE, budget_usd=1e6) == 3600
    assert affordable_steps(WORK, MACHINE, budget_usd=0.01) == 0


@pytest.mark.parametrize(
    ("step", "interval", "left"),
    [(0, 0, 1), (0, 30, 4), (30, 30, 3), (31, 30, 3), (99, 30, 1), (100, 30, 0), (0, 50, 2)],
)
def test_the_last_step_always_counts(step: int, interval: int, left: int) -> None:
    assert times_left(step, 100, interval) == left


def test_disk_mirror_and_bandwidth_by_hand() -> None:
    cost = run_cost(WORK, MACHINE)
    checkpoint = CheckpointConfig(keep=2, mirror="gs://bucket/runs")
    storage = run_storage(WORK, cost, checkpoint=checkpoint, vocabulary=50_304)
    assert storage.disk == 5 * 10**10  # two kept, the best, an interruption's, one being written
    assert storage.mirror == storage.upload == 8 * 10**10
    assert storage.upload_per_second == pytest.approx(8e10 / (cost.hours * 3600))
    assert (storage.data, storage.data_per_second) == (7_200_000_000, 2e6)
    few = checkpoint.model_copy(update={"keep_remote": 3})
    assert run_storage(WORK, cost, checkpoint=few, vocabulary=70_000).mirror == 5 * 10**10
    assert run_storage(WORK, cost, checkpoint=few, vocabulary=70_000).data == 14_400_000_000
    alone = run_storage(WORK, cost, checkpoint=CheckpointConfig(), vocabulary=256)
    assert (alone.mirror, alone.upload, alone.upload_per_second) == (0, 0, 0.0)


def test_a_checkpoint_holds_masters_moments_and_below_zero_3_the_weights() -> None:
    assert checkpoint_bytes(1000, stage=3, dtype="bf16") == 12_000
    assert checkpoint_bytes(1000, stage=1, dtype="bf16") == 14_000
    assert checkpoint_bytes(1000, stage=0, dtype="fp32") == 16_000
