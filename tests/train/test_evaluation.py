"""Evaluation between steps: schedule, tasks and text samples."""

import contextlib
import dataclasses
import functools
import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from data.text_samples import word_file
from run_fakes import FakeEngine, Log, batch, config_of, trainer_of
from thread_ranks import on_two_ranks, results

from refocused.config.cadence import Cadence
from refocused.config.data import DataConfig
from refocused.config.outputs import EvaluationConfig
from refocused.data.manifest.shard_manifest import Manifest
from refocused.engine.engine import Engine
from refocused.evaluate.continuations import Continuation
from refocused.evaluate.multiple_choice import EncodedTask, measures_of
from refocused.evaluate.tasks import Question
from refocused.evaluate.text_samples import TOP_K, TextSampler
from refocused.system.errors import ConfigError, RefocusedError, ShardError, TrainingError
from refocused.system.world import World
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file
from refocused.train.lifecycle.resume import check_first_loss
from refocused.train.lifecycle.trainer import build_texts
from refocused.train.step.evaluation import (
    ValidationLoss,
    evaluate,
    evaluate_at_start,
    validation_loss,
)
from refocused.train.step.state import TrainState

RATED = ["rate 2"] * 3
AT_2 = TrainState(step=2)


def questions(answers):
    """Questions whose first ending the fake engine prefers."""
    asked = [Question("c", ("yes", "no!"), answer) for answer in answers]
    given = [Continuation((first, 9, 9), 1) for number in range(len(asked)) for first in (1, 2)]
    return EncodedTask("quiz", len(asked), given, functools.partial(measures_of, asked))


class FakeSampler:
    def write(self, engine, *, stopping):
        engine.log.append("write")
        return None if stopping() else "text"


def after(state, stop_when=None, measure=evaluate, **intervals):
    """Measure what is due after a state, of a run of 6 steps."""
    log: Log = []
    trainer = trainer_of(
        log,
        stop_when=stop_when,
        cadence=Cadence(log=0, checkpoint=0, **{"validation": 0} | intervals),
        tasks=[questions([0, 0, 1])],
        sampler=cast("TextSampler", FakeSampler()),
    )
    return log, measure(trainer, state)


@pytest.mark.parametrize(
    ("step", "intervals", "log"),
    [
        (2, {"tasks": 2}, [*RATED, "tell quiz 0.67 after 2"]),
        (2, {"sample": 2}, ["write", "tell 'text' after 2"]),
        (2, {"validation": 2}, ["validate", "tell 2.0"]),
        (2, {"validation": 3, "tasks": 3, "sample": 3}, []),
        # After the last step all is measured but the sample of the summary.
        (6, {"sample": 2}, ["validate", "tell 2.0", *RATED, "tell quiz 0.67 after 6"]),
    ],
)
def test_each_is_measured_when_it_is_due(step, intervals, log):
    said, state = after(TrainState(step=step), **intervals)
    assert said == log
    validated = "validate" in log  # tasks and samples do not affect the best step
    assert (state.best_loss, state.best_step) == ((2.0, step) if validated else (None, None))
    assert state.tasks_step == (step if "rate 2" in log else None)


@pytest.mark.parametrize("step", [2, 6])
def test_tasks_cut_short_by_a_stop_are_repeated(step):
    due = {"validation": 2, "tasks": 2}
    _, stopped = after(TrainState(step=step), stop_when="rate 2", **due)
    assert (stopped.validation_step, stopped.tasks_step) == (step, None)
    log, state = after(stopped, measure=evaluate_at_start, **due)
    assert log == [*RATED, f"tell quiz 0.67 after {step}"]
    assert after(state, measure=evaluate_at_start, **due)[0] == []


def test_only_due_tasks_are_repeated_if_there_is_time():
    assert after(AT_2, measure=evaluate_at_start, validation=3, tasks=3) == ([], AT_2)
    log, state = after(AT_2, "tell 2.0", evaluate_at_start, validation=2, tasks=2)
    assert log == ["validate", "tell 2.0", "record 2.0 of 2"], "the checkpoint gets the loss"
    assert (state.validation_step, state.tasks_step) == (2, None)


def test_a_new_run_writes_a_sample_with_untrained_weights():
    assert after(TrainState(), measure=evaluate_at_start, tasks=1)[0] == [
        "write",
        "tell 'text' after 0",
    ]
    assert after(TrainState(), "write", evaluate_at_start)[0] == ["write"]


@pytest.mark.parametrize("stop_when", [None, "tell 2.0", "rate 2"])
def test_a_baseline_is_measured_before_the_first_step_and_is_never_the_best(stop_when):
    log: Log = []
    trainer = trainer_of(
        log,
        stop_when=stop_when,
        config=config_of(run={"total_steps": 6}, evaluation=EvaluationConfig(at_start=True)),
        tasks=[questions([0, 0, 1])],
        sampler=cast("TextSampler", FakeSampler()),
    )
    state = evaluate_at_start(trainer, TrainState())
    told = [
        "validate",
        "tell 2.0",
        *RATED,
        "tell quiz 0.67 after 0",
        "write",
        "tell 'text' after 0",
    ]
    stops = len(told) if stop_when is None else told.index(stop_when) + 1
    assert log == told[:stops]
    assert (state.validation_step, state.validation_loss) == (0, 2.0)
    assert (state.best_step, state.best_loss) == (None, None)
    worse = dataclasses.replace(state, step=3).after_validation(2.5)
    assert (worse.best_step, worse.best_loss) == (3, 2.5), "of the steps it is the best"


@pytest.mark.parametrize("when", ["validate", "rate 2", "write"])
def test_a_stop_interrupts_evaluation(when):
    log, _ = after(AT_2, stop_when=when, validation=2, tasks=2, sample=2)
    assert log[-1] == when
    assert log.count(when) == 1


def built(data=None, manifest_end=None, **settings):
    config = SimpleNamespace(
        data=DataConfig(source="tokens", **{"tokenizer": "bytes"} | (data or {})),
        evaluation=EvaluationConfig(**settings),
        model=SimpleNamespace(sequence_length=32),
        run=SimpleNamespace(seed=1),
    )
    manifest = Manifest((), "unknown", end_of_text_id=manifest_end)
    return build_texts(cast("Any", config), manifest, vocabulary=300, world=World())


def test_unusable_tasks_and_prompts_are_rejected(tmp_path):
    file, words = tmp_path / "quiz.jsonl", word_file(tmp_path / "words.json")
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: .*quiz\.jsonl:1: it has no"):
        built(tasks=[str(file)])
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: .*none\.jsonl: there is no such"):
        built(tasks=["hellaswag=none.jsonl"])
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: none/core\.yaml: there is no such"):
        built(tasks=["core=none"])
    with pytest.raises(RefocusedError, match="has no token of data"):
        built({"tokenizer": str(words)}, sample_prompt=" ")
    with pytest.raises(RefocusedError, match="has no token of data"):
        built({"tokenizer": str(words)}, sample_prompt="one", further_prompts=[" "])
    *_, sampler = built(sample_prompt="def ", further_prompts=["class "])
    assert sampler is not None and sampler.prompts == ("def ", "class ")
    assert built(further_prompts=["class "])[-1] is None  # none without the first


def test_a_run_records_which_token_ends_a_text(tmp_path, caplog):
    from tokenizers import Tokenizer, models

    caplog.set_level("INFO")
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens(["</s>", "<eos>", "<pad>"])
    tokenizer.save(name := str(tmp_path / "tokenizer.json"))

    def recorded(**data):
        end = data.pop("manifest_end", None)
        files, *_ = built({"tokenizer": name, **data}, end)
        token = json.loads(files["tokenizer_config.json"])["eos_token"]
        assert caplog.messages[-1].endswith(f"texts end with {token}")
        return str(token)

    with pytest.raises(ShardError, match=r"several tokens may end a text .* data\.document_id"):
        recorded()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2]}')
    assert [recorded(), recorded(document_id=1), recorded(separator_id=3)] == [
        *("<eos>", "</s>", "<pad>")
    ]
    assert recorded(manifest_end=3) == "<pad>"  # as the data were made


END = 256


@dataclasses.dataclass
class ScriptedEngine:
    """Predicts the next byte, or evenly; notes the contexts that it was shown."""

    evenly: bool = False
    contexts: list[list[int]] = dataclasses.field(default_factory=list)
    held: int = 0

    @contextlib.contextmanager
    def weights_gathered(self):
        self.held += 1
        yield

    def next_token_logits(self, input_ids):
        self.contexts.append(input_ids[0].tolist())
        logits = torch.full((1, 512), -20.0)
        if self.evenly:  # finds the letters from `A` on ever less likely, by very little
            logits[0, 65 : 65 + 60] = -torch.arange(60) / 1000
        else:
            last = int(input_ids[0, -1])
            logits[0, END if last == ord("~") else last + 1] = 20.0
            logits[0, END + 1 :] = 50.0  # padding ids are the likeliest of all
        return logits


def sample(engine, *prompts, tokens, length=8, seed=0, temperature=0.8, stopping=lambda: False):
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=512)
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=64)
    sampler = TextSampler(tokenizer, prompts, tokens, length, seed, temperature)
    return sampler.write(cast("Engine", engine), stopping=stopping)


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ("ab", 5, "abcdefg"),  # and no padding
        ("{", 5, "{|}~"),  # the text ends there
        ("\x7f", 1, "\x7f\ufffd"),  # invalid UTF-8
    ],
)
def test_the_likely_bytes_follow_the_prompt(prompt, tokens, text):
    engine = ScriptedEngine()
    assert sample(engine, prompt, tokens=tokens) == text
    # By every rank, whichever of them sees the end; the weights are gathered once for all tokens.
    assert (engine.held, len(engine.contexts)) == (1, tokens)


def test_each_prompt_is_continued_as_if_it_were_alone():
    engine = ScriptedEngine(evenly=True)
    alone = [sample(ScriptedEngine(evenly=True), prompt, tokens=20) for prompt in ("A", "B")]
    assert sample(engine, "A", "B", tokens=20) == "\n---\n".join(map(str, alone))
    assert engine.held == 1


def test_the_context_is_no_longer_than_what_was_trained_on_and_a_stop_ends_it():
    engine = ScriptedEngine()
    text = sample(engine, "abc", tokens=9, length=4, stopping=lambda: len(engine.contexts) == 4)
    assert text is None
    assert [len(context) for context in engine.contexts] == [3, 4, 4, 4]
    assert engine.contexts[-1] == list(b"cdef")


def test_draws_repeat_with_their_seed_and_come_from_the_likeliest():
    text = sample(ScriptedEngine(evenly=True), "A", tokens=300)
    assert text == sample(ScriptedEngine(evenly=True), "A", tokens=300)
    assert text != sample(ScriptedEngine(evenly=True), "A", tokens=300, seed=1)
    assert {*str(text)} == {chr(65 + place) for place in range(TOP_K)}
    cold = sample(ScriptedEngine(evenly=True), "A", tokens=300, temperature=1e-5)
    assert cold == "A" * 301  # the likeliest


def by_first_token(inputs, labels):
    return float(inputs[0, 0])


def validated(batches, *, world=None, stop_when=None):
    log: Log = []
    engine = FakeEngine(log, validation=by_first_token)
    trainer = trainer_of(
        log,
        world=world,
        engine=engine,
        validation_batches=lambda: iter(batches),
        stop_when=stop_when,
    )
    return validation_loss(trainer), log


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            [batch(2), batch(4)],
            [batch(8, ignored=2), batch(0, ignored=4)],
            ValidationLoss((4 * 2 + 4 * 4 + 2 * 8) / 10),
        ),
        (
            [batch(2, source="web"), batch(5, source="web"), batch(8, source="code")],
            [  # too few sequences of one source for the second rank's last rows
                batch(3, source="web"),
                batch(0, ignored=4, source="web"),
                batch(0, ignored=4, source="code"),
            ],
            ValidationLoss(
                18 / 4, by_source={"web": ValidationLoss(10 / 3), "code": ValidationLoss(8.0)}
            ),
        ),
    ],
)
def test_losses_by_source_are_means_over_all_ranks(first, second, expected):
    for loss in results(
        on_two_ranks(lambda world: validated([first, second][world.rank], world=world)[0])
    ):
        assert loss == dataclasses.replace(expected, mean=pytest.approx(expected.mean))


def test_without_data_or_when_stopped_there_is_no_loss():
    assert validated([]) == (None, [])
    assert validated([batch(0)] * 5, stop_when="validate") == (None, ["validate"])


@pytest.mark.parametrize("off", [-0.31, 0.31, math.inf, math.nan])
def test_a_wrong_first_loss_is_rejected(off):
    engine = FakeEngine([], validation=lambda inputs, labels: math.log(512) + off)
    with pytest.raises(TrainingError, match=r"should be 6\.238 within 0\.3"):
        check_first_loss(trainer_of([], engine=engine))


def test_the_first_loss_is_the_mean_of_the_ranks():
    def action(world):
        off = [-0.25, 0.05][world.rank]
        engine = FakeEngine([], validation=lambda inputs, labels: math.log(512) + off)
        return check_first_loss(trainer_of([], world=world, engine=engine))

    assert results(on_two_ranks(action)) == [pytest.approx(math.log(512) - 0.1, abs=1e-6)] * 2
