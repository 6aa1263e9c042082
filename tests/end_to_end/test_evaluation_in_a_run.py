"""Scores and samples of a run equal those of its finished model."""

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate.core_bundle import write_bundle
from ranks import ForkedRanks, train
from tiny import log_lines, losses, same, tiny_run

from refocused.commands.main import run_command

pytestmark = pytest.mark.slow
SETTINGS = (
    "run.steps=6",
    "data.tokenizer=bytes",
    "zero.stage=3",
    "evaluation.interval=0",
    "evaluation.task_interval=3",
    "evaluation.task_items=7",
    "evaluation.sample_interval=2",
    "evaluation.sample_tokens=3",
    "evaluation.sample_prompt=def",
    "evaluation.tasks=[multiple_choice=quiz.jsonl, lambada=words.jsonl, core=bundle]",
)


def write_tasks(folder: Path) -> None:
    draw = random.Random(5)

    def word() -> str:
        return "".join(draw.choices("abcdefgh", k=draw.randint(1, 6)))

    quiz = [
        {"ctx": f"{word()} {word()}", "endings": [word(), word(), word()], "label": number % 3}
        for number in range(9)
    ]
    words = [{"text": f"{word()} {word()} {word()}"} for _ in range(8)]
    for name, rows in (("quiz", quiz), ("words", words)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    write_bundle(folder / "bundle")


def records(folder: Path, kind: str, *, file: str = "training_metrics") -> list[dict[str, Any]]:
    found = log_lines(folder / "runs" / "tiny", file)
    return [record for record in found if record["kind"] == kind]


def test_tasks_and_samples_of_a_run_under_zero_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(tmp_path)
    write_tasks(tmp_path)
    ended = train(tmp_path, "--config", "tiny.yaml", *SETTINGS, ranks=2)
    told = records(tmp_path, "tasks")
    assert [record["step"] for record in told] == [3, 6]
    assert all(record["seconds"] > 0 for record in told)
    samples = records(tmp_path, "sample", file="events")
    assert [record["step"] for record in samples] == [0, 2, 4, 6]
    assert all(record["sample"].startswith("def") for record in samples)
    assert "tasks      3 multiple_choice acc 0." in ended.out[0]
    assert "(7 items)" in ended.out[0]
    assert re.search(r"core CORE -?0\.\d+ \+- 0\.\d+ \(35 items\)", ended.out[0])
    validations = records(tmp_path, "validation")
    assert [record["step"] for record in validations] == [6]

    monkeypatch.chdir(tmp_path)
    tasks = "multiple_choice=quiz.jsonl,lambada=words.jsonl,core=bundle"
    arguments = ["tiny", "--tasks", tasks, "--limit", "7", "--device", "cpu", "--json"]
    assert run_command("evaluate", arguments) == 0
    after = json.loads(capsys.readouterr().out)
    assert (after["step"], after["context_tokens"]) == (6, 32)
    for task, found in after["tasks"].items():
        for name, measure in told[-1]["tasks"][task].items():
            if isinstance(measure, dict):
                assert found[name] == pytest.approx(measure, rel=1e-5), (task, name)

    assert run_command("evaluate", ["compare", "--run", "tiny", *arguments[1:]]) == 0
    compared = json.loads(capsys.readouterr().out)
    (alone,) = compared["models"]
    assert (alone["model"], alone["step"]) == ("6", 6)
    quiz = after["tasks"]["multiple_choice"]["acc"]
    assert alone["tasks"]["multiple_choice"]["acc"] == pytest.approx(quiz)

    assert run_command("evaluate", ["tiny", "--device", "cpu", "--json"]) == 0
    (name,) = (validation := json.loads(capsys.readouterr().out)["tasks"])
    assert (name, validation[name]["items"]) == ("validation", 8)
    last = validations[-1]
    assert validation[name]["loss"]["value"] == pytest.approx(last["validation_loss"], rel=1e-5)
    assert validation[name]["perplexity"]["value"] == pytest.approx(last["perplexity"], rel=1e-5)
    bits = validation[name]["bits_per_byte"]["value"]
    assert bits == pytest.approx(last["bits_per_byte"], rel=1e-5)
    assert bits == pytest.approx(last["validation_loss"] / math.log(2), rel=0.05)  # of bytes
    state = json.loads((tmp_path / "runs/tiny/state.json").read_text())
    assert (state["bits_per_byte"], state["best_bits_per_byte"]) == (last["bits_per_byte"],) * 2
    assert f"bpb {bits:.4f} (best)" in ended.out[0]
    assert run_command("checkpoints", ["list", "--run", "tiny", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["steps"][-1]
    assert (newest["step"], newest["bits_per_byte"]) == (6, last["bits_per_byte"])
    assert run_command("evaluate", ["tiny", "--device", "cpu", "--context", "16"]) == 2
    assert "--context needs --tasks" in capsys.readouterr().err


def test_tasks_cut_short_by_a_stop_are_repeated_once(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    row = {"ctx": "a" * 20, "endings": ["b" * 10, "c" * 10], "label": 0}
    (tmp_path / "quiz.jsonl").write_text((json.dumps(row) + "\n") * 4000)
    given = ["--config", "tiny.yaml", "data.tokenizer=bytes", "evaluation.tasks=[quiz.jsonl]"]
    given += [
        "run.steps=6",
        "evaluation.interval=2",
        "evaluation.task_interval=2",
        "batch.micro_batch_size=1",
    ]
    run = tmp_path / "runs" / "tiny"
    with ForkedRanks(2, [*given, "evaluation.task_items=4000"], folder=tmp_path) as started:
        started.wait_until(lambda: "(best)" in started.printed(), timeout=60)
        (run / "STOP").touch()
        ended = started.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert records(tmp_path, "tasks") == []
    saved = json.loads((run / "checkpoints/checkpoint_step_2/trainer.json").read_text())
    assert (saved["validation_step"], saved["tasks_step"]) == (2, None)

    train(tmp_path, *given, "evaluation.task_items=5", ranks=2)
    told = records(tmp_path, "tasks")
    assert [(one["step"], one["tasks"]["quiz"]["items"]) for one in told] == [
        (2, 5),
        (4, 5),
        (6, 5),
    ]
    losses = {one["step"]: one["validation_loss"] for one in records(tmp_path, "validation")}
    assert len(records(tmp_path, "validation")) == 3 and list(losses) == [2, 4, 6]
    last = json.loads((run / "checkpoints/checkpoint_step_6/trainer.json").read_text())
    assert last["tasks_step"] == 6
    assert (last["best_loss"], last["best_step"]) == min((losses[one], one) for one in losses)


def test_a_baseline_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    tiny_run(tmp_path)  # with dropout, whose random numbers would shift
    write_tasks(tmp_path)
    given = ["--config", "tiny.yaml", *SETTINGS, "evaluation.interval=3", "checkpoint.mirror=null"]
    train(tmp_path, *given, ranks=2)
    shutil.move(tmp_path / "runs", tmp_path / "without")
    started = train(tmp_path, *given, "evaluation.at_start=true", ranks=2).out[0]
    validations = records(tmp_path, "validation")
    assert [record["step"] for record in validations] == [0, 3, 6]
    assert validations[0]["validation_loss"] == pytest.approx(math.log(512), abs=0.3)
    assert [record["step"] for record in records(tmp_path, "tasks")] == [0, 3, 6]
    assert "eval       0 val " in started and "(best)" not in started.partition("eval       3")[0]
    for folder in ("without", "runs"):
        state = json.loads((tmp_path / folder / "tiny" / "state.json").read_text())
        assert state["best_step"] == 6
    without, run = tmp_path / "without" / "tiny", tmp_path / "runs" / "tiny"
    assert losses(run) == losses(without)
    files = sorted(path.relative_to(run) for path in run.glob("checkpoints/*/zero/*.pt"))
    assert len(files) > 3
    for file in files:
        one, other = (torch.load(folder / file, weights_only=False) for folder in (run, without))
        assert same(one, other), file
