"""Scores are those of lm-evaluation-harness: of its figures on file, and of itself where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluate.harness import CONTEXT, MODELS, SCORES, ask

from refocused.evaluate import multiple_choice, perplexity
from refocused.evaluate.continuations import Encoder, score_all
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.score_model import Evaluation, NetworkScorer, Settings
from refocused.evaluate.tasks import TaskFile, read_questions
from refocused.system.world import World

ON_FILE: dict[str, Any] = json.loads(SCORES.read_text())


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    network, tokenizer = MODELS[request.param]()
    return request.param, LoadedModel(network, tokenizer, Path(), {})


def task_file(folder: Path, form: str) -> TaskFile:
    rows = ON_FILE["items"][form]
    if form == "perplexity":
        file = folder / "text.txt"
        file.write_text(rows[0]["text"], encoding="utf-8")
    else:
        file = folder / f"{form}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskFile(form, form, file)


def log_probabilities(task: TaskFile, model: LoadedModel, *, rows: int) -> list[float]:
    encoder = Encoder(
        model.tokenizer, context_tokens=CONTEXT, vocabulary=model.network.config.vocab_size
    )
    if task.form == "perplexity":
        passage = perplexity.prepare("text", perplexity.read_text(task.file), encoder)
        given = passage.continuations
    else:
        given = multiple_choice.prepare("task", read_questions(task), encoder).continuations
    scored = score_all(given, NetworkScorer(model.network), rows=rows, world=World())
    assert scored is not None
    found = [one.log_probability for one in scored]
    return [sum(found)] if task.form == "perplexity" else found


@pytest.mark.parametrize("form", list(ON_FILE["items"]))
@pytest.mark.parametrize("rows", [13])
def test_every_figure_is_the_harness_own(
    model: tuple[str, LoadedModel], tmp_path: Path, form: str, rows: int
) -> None:
    name, loaded = model
    task = task_file(tmp_path, form)
    wanted = dict(ON_FILE["scores"][name][form])
    exact = wanted.pop("log_probabilities")
    assert log_probabilities(task, loaded, rows=rows) == pytest.approx(exact, rel=1e-5, abs=1e-4)
    evaluation = Evaluation(loaded, Settings(batch=rows))
    assert evaluation.context_tokens == CONTEXT
    (timed,) = evaluation.run([task], world=World())
    measures = timed.result.measures
    for key, value in wanted.items():
        if key.endswith("_stderr"):
            found: float | None = measures[key.removesuffix("_stderr")].standard_error
        else:
            found = measures[key].value
        tolerance = 1e-5 if key.endswith(("perplexity", "byte")) else 1e-12
        assert found == pytest.approx(value, rel=tolerance), key


@pytest.mark.slow
def test_the_figures_on_file_are_what_the_harness_says(model: tuple[str, LoadedModel]) -> None:
    pytest.importorskip("lm_eval", reason="the optional extra `parity` is not installed")
    name, _ = model
    found = ask(name, ON_FILE["items"])
    for task, wanted in ON_FILE["scores"][name].items():
        for key, value in wanted.items():
            assert found[task][key] == pytest.approx(value, rel=1e-5), (task, key)
