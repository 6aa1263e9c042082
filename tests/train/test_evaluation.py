from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import pytest
from evaluate.harness import bytes_model
from run_fakes import FakeEngine, FakeStop, Log, parts_of
from thread_ranks import on_two_ranks, results

from refocused.config.data import DataConfig
from refocused.config.outputs import EvaluationConfig
from refocused.evaluate.continuations import Continuation
from refocused.evaluate.multiple_choice import Examination, measures_of
from refocused.evaluate.tasks import Question
from refocused.system.errors import ConfigError, RefocusedError
from refocused.system.world import World
from refocused.train.lifecycle.tokenizer_and_tasks import build_texts
from refocused.train.step.evaluation import TextSampler, evaluate, make_up_evaluation, take_tasks
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence
from refocused.train.step.stopping import StopRequest

BYTES = DataConfig(source="tokens", tokenizer="bytes")


def questions(answers: list[int]) -> Examination:
    """Questions whose first ending is the likelier one for the fake engine."""
    asked = [Question("c", ("yes", "no!"), answer) for answer in answers]
    given = [
        Continuation((first, 9, 9), 1, group=number)
        for number in range(len(asked))
        for first in (1, 2)
    ]
    return Examination("quiz", len(asked), given, functools.partial(measures_of, asked))


class FakeSampler:
    def write(self, engine: Any, *, stopping: Any) -> str | None:
        engine.log.append("write")
        return None if stopping() else "text"


def at_step(step: int, stop_when: str | None = None, **cadence: int) -> tuple[Log, TrainState]:
    log: Log = []
    parts = parts_of(
        log,
        cadence=Cadence(log=0, checkpoint=0, **{"validation": 0} | cadence),
        tasks=[questions([0, 0, 1])],
        sampler=cast("TextSampler", FakeSampler()),
    )
    state = dataclasses.replace(TrainState(), step=step)
    return log, evaluate(parts, state, cast("StopRequest", FakeStop(log, stop_when)))


def test_each_is_measured_when_it_is_due() -> None:
    assert at_step(2, tasks=2)[0] == ["rate 2"] * 3 + ["tell quiz 0.67 after 2"]
    assert at_step(2, sample=2)[0] == ["write", "tell 'text' after 2"]
    assert at_step(2, validation=2)[0] == ["validate", "tell 2.0"]
    assert at_step(2, validation=3, tasks=3, sample=3)[0] == []


def test_after_the_last_step_all_is_measured_but_the_sample_of_the_summary() -> None:
    log, state = at_step(6, sample=2)
    assert log == ["validate", "tell 2.0", *["rate 2"] * 3, "tell quiz 0.67 after 6"]
    assert (state.best_loss, state.best_step) == (2.0, 6)


def test_tasks_leave_the_best_step_alone() -> None:
    state = at_step(2, tasks=2, sample=2)[1]
    assert state == dataclasses.replace(TrainState(), step=2, tasks_step=2)


def resumed(state: TrainState, *, stop_when: str | None = None, **cadence: int) -> tuple[Log, Any]:
    log: Log = []
    every = Cadence(log=0, checkpoint=0, **{"validation": 0} | cadence)
    parts = parts_of(log, cadence=every, tasks=[questions([0, 0, 1])])
    return log, make_up_evaluation(parts, state, cast("StopRequest", FakeStop(log, stop_when)))


@pytest.mark.parametrize("step", [2, 6])
def test_tasks_that_a_stop_cut_short_are_made_up(step: int) -> None:
    _, stopped = at_step(step, stop_when="rate 2", validation=2, tasks=2)
    assert (stopped.validation_step, stopped.tasks_step) == (step, None)
    log, state = resumed(stopped, validation=2, tasks=2)
    assert log == ["rate 2"] * 3 + [f"tell quiz 0.67 after {step}"]
    assert resumed(state, validation=2, tasks=2)[0] == []


def test_nothing_is_made_up_that_was_not_due_or_for_which_there_is_no_time() -> None:
    step = dataclasses.replace(TrainState(), step=2)
    assert resumed(step, validation=3, tasks=3) == ([], step)
    log, state = resumed(step, validation=2, tasks=2, stop_when="tell 2.0")
    assert (log, state.validation_step, state.tasks_step) == (["validate", "tell 2.0"], 2, None)


@pytest.mark.parametrize("when", ["validate", "rate 2", "write"])
def test_a_stop_cuts_short_what_it_meets(when: str) -> None:
    log, _ = at_step(2, stop_when=when, validation=2, tasks=2, sample=2)
    assert log[-1] == when
    assert log.count(when) == 1


def test_ranks_share_a_batch_of_trainings_tokens_each() -> None:
    def action(world: World) -> tuple[float, list[str]]:
        log: Log = []
        parts = parts_of(log, world=world, tasks=[questions([0, 0, 0, 1, 0])])
        (result,) = take_tasks(parts, cast("StopRequest", FakeStop(log))) or []
        return result.measures["acc"].value, log

    for accuracy, log in results(on_two_ranks(action)):
        assert accuracy == 0.8
        assert len(log) == 3  # ten endings of two tokens: two a batch of four, and two ranks


def test_a_real_model_is_rated_without_its_padding() -> None:
    network, _ = bytes_model()

    class Rating(FakeEngine):
        def label_scores(self, input_ids: Any, labels: Any, *, vocabulary: int) -> Any:
            from refocused.models.head_loss import label_scores

            assert vocabulary == 257
            hidden = network.base_model(input_ids).last_hidden_state
            return label_scores(network.lm_head, hidden, labels, vocabulary=vocabulary)

    parts = parts_of([], engine=Rating([]), vocabulary=257, tasks=[questions([0])])
    (result,) = take_tasks(parts, cast("StopRequest", FakeStop([]))) or []
    assert result.items == 1


def built(tmp_path: Path, **settings: Any) -> Any:
    return build_texts(
        BYTES,
        EvaluationConfig(**settings),
        vocabulary=300,
        context_tokens=32,
        seed=1,
        world=World(),
    )


def test_tasks_are_read_before_training_and_only_their_first_items(tmp_path: Path) -> None:
    file = tmp_path / "quiz.jsonl"
    rows = [{"ctx": f"{n}", "endings": ["yes", "no"], "label": 0} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = built(tmp_path, tasks=[str(file)], task_items=3)
    (examination,) = texts.tasks
    assert (examination.task, examination.items) == ("quiz", 3)
    assert examination.continuations[0].ids == (*b"0 yes",)
    assert texts.sampler is None
    assert texts.tokenizer_json is not None


def test_a_broken_task_stops_the_run_with_one_message(tmp_path: Path) -> None:
    file = tmp_path / "quiz.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: .*quiz\.jsonl:1: it has no"):
        built(tmp_path, tasks=[str(file)])
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: .*none\.jsonl: there is no such"):
        built(tmp_path, tasks=["hellaswag=none.jsonl"])


def test_a_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    assert built(tmp_path, sample_prompt="def ").sampler.prompt == "def "
    with pytest.raises(ValueError, match="at least 1 character"):
        EvaluationConfig(sample_prompt="")
    words = tmp_path / "words.json"
    from data.text_samples import word_file

    data = DataConfig(source="tokens", tokenizer=str(word_file(words)))
    with pytest.raises(RefocusedError, match="has no token of data"):
        build_texts(
            data,
            EvaluationConfig(sample_prompt=" "),
            vocabulary=300,
            context_tokens=32,
            seed=1,
            world=World(),
        )


@pytest.mark.parametrize("task", ["hellaswag", "quiz.txt", "a=b=c.jsonl"])
def test_a_task_without_a_file_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match=r"a task is NAME=FILE\.jsonl"):
        EvaluationConfig(tasks=(task,))
