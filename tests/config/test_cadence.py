"""What is due at which steps, against the steps of a run counted one by one."""

import itertools

import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Cadence, times_left
from refocused.config.load_run import load_run

SETTINGS = [
    *("log.interval=3", "evaluation.interval=40", "checkpoint.interval=50"),
    *("evaluation.task_interval=60", "evaluation.sample_interval=70", "data.tokenizer=bytes"),
    *("tracking.tensorboard=true", "tracking.histogram_interval=80", "checkpoint.keep_epochs=true"),
]


def test_the_intervals_are_those_of_a_run_file():
    tasks = ["evaluation.tasks=[quiz.jsonl]"]
    cadence = Cadence.of(load_run("demo", [*SETTINGS, *tasks]).config)
    assert cadence == Cadence(3, 40, 50, True, True, tasks=60, sample=70, histograms=80)
    none = ["evaluation.sample_prompt=null", "checkpoint.save_best=false"]
    cadence = Cadence.of(load_run("demo", [*SETTINGS, *none]).config)
    assert (cadence.tasks, cadence.sample, cadence.save_best) == (0, 0, False)


def test_what_is_due_after_a_step():
    cadence = Cadence(log=1, validation=4, checkpoint=0, tasks=6, sample=0)
    assert [step for step in range(1, 13) if cadence.due("validation", step)] == [4, 8, 12]
    assert not any(cadence.due("checkpoint", step) for step in range(13))
    assert [step for step in range(1, 13) if cadence.evaluation_due(step)] == [4, 6, 8, 12]
    samples = Cadence(log=1, validation=0, checkpoint=0, sample=5)
    assert [step for step in range(1, 11) if samples.evaluation_due(step)] == [5, 10]


@pytest.mark.parametrize("interval", [0, 1, 3, 7, 50])
def test_times_left_counts_the_steps_that_are_due_and_the_last(interval):
    for step, total in itertools.product(range(0, 24), range(1, 23)):
        steps = range(step + 1, total + 1)
        due = [one for one in steps if one == total or (interval and one % interval == 0)]
        assert times_left(step, total, interval) == len(due), (step, total)


def test_a_save_after_each_validation_counts_once_where_both_are_due():
    plan = BatchPlan(2, 1, 1, 8)
    for validation, checkpoint, best in itertools.product((0, 4, 6), (0, 3, 4), (False, True)):
        cadence = Cadence(1, validation, checkpoint, save_best=best)
        for step, total in ((0, 12), (5, 12), (6, 25), (12, 12)):
            steps = range(step + 1, total + 1)
            validated = {
                one for one in steps if one == total or (validation and one % validation == 0)
            }
            saved = {one for one in steps if one == total or (checkpoint and one % checkpoint == 0)}
            saved |= validated if best and validation else set()
            left = cadence.left(step, total)
            assert (left["validation"], left["save"]) == (len(validated), len(saved))
            if step < total:  # what the log line of the next step has ahead
                ahead = cadence.ahead(step + 1, total, plan)
                assert ahead == {"step": total - step - 1, **left, "ending": 1}


@pytest.mark.parametrize(
    ("tokens", "made", "steps"),
    [
        *((1, 0, 1), (20, 0, 1), (21, 0, 2), (100, 0, 4), (140, 0, 4), (141, 0, 5), (221, 0, 6)),
        *((80, 4, 5), (81, 4, 6), (40, 2, 3), (41, 2, 4), (0, 4, 4), (-20, 4, 4)),
    ],
)
def test_the_steps_of_tokens_are_rounded_up_and_count_a_growing_batch(
    tokens: int, made: int, steps: int
) -> None:
    # Steps of 1, 1, 2, 3, then 4 micro-batches of 20 tokens: 140 in the first four.
    plan = BatchPlan(2, 4, 1, 10, warmup_steps=4)
    assert plan.steps_for(tokens, made=made) == steps
