"""What a run measures of itself is what the finished model shows when it is asked again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedRanks, train
from tiny import tiny_run

from refocused.commands.evaluate import main

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
    "evaluation.tasks=[multiple_choice=quiz.jsonl, lambada=words.jsonl]",
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


def records(folder: Path, kind: str, *, file: str = "training_metrics") -> list[dict[str, Any]]:
    lines = (folder / "runs" / "tiny" / "logs" / f"{file}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [record for record in found if record["kind"] == kind]


def test_tasks_and_samples_of_a_run_under_zero_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(tmp_path)
    write_tasks(tmp_path)
    ended = train(tmp_path, "--config", "tiny.yaml", *SETTINGS, ranks=2)
    assert ended.codes == [0, 0], ended.everything
    told = records(tmp_path, "tasks")
    assert [record["step"] for record in told] == [3, 6]
    assert all(record["seconds"] > 0 for record in told)
    samples = records(tmp_path, "sample", file="events")
    assert [record["step"] for record in samples] == [2, 4]  # that of 6 is in the summary
    assert all(record["sample"].startswith("def") for record in samples)
    assert "tasks      3 multiple_choice acc 0." in ended.out[0]
    assert "(7 items)" in ended.out[0]
    validations = records(tmp_path, "validation")
    assert [record["step"] for record in validations] == [6]

    monkeypatch.chdir(tmp_path)
    tasks = "multiple_choice=quiz.jsonl,lambada=words.jsonl"
    arguments = ["tiny", "--tasks", tasks, "--limit", "7", "--device", "cpu", "--json"]
    assert main(arguments) == 0
    after = json.loads(capsys.readouterr().out)
    assert (after["step"], after["context_tokens"]) == (6, 32)
    for task, found in after["tasks"].items():
        for name, measure in told[-1]["tasks"][task].items():
            if isinstance(measure, dict):
                assert found[name] == pytest.approx(measure, rel=1e-5), (task, name)

    assert main(["compare", "--run", "tiny", *arguments[1:]]) == 0
    compared = json.loads(capsys.readouterr().out)
    (alone,) = compared["models"]
    assert (alone["model"], alone["step"]) == ("6", 6)
    quiz = after["tasks"]["multiple_choice"]["acc"]
    assert alone["tasks"]["multiple_choice"]["acc"] == pytest.approx(quiz)
    assert (tmp_path / "comparison.png").is_file()


def test_a_stop_between_batches_of_tasks_saves_and_ends(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    row = {"ctx": "a" * 20, "endings": ["b" * 10, "c" * 10], "label": 0}
    (tmp_path / "quiz.jsonl").write_text((json.dumps(row) + "\n") * 4000)
    settings = ("data.tokenizer=bytes", "evaluation.tasks=[quiz.jsonl]", "run.steps=6")
    settings += ("evaluation.task_interval=2", "evaluation.task_items=4000", "batch.micro=1")
    started = ForkedRanks(2, ["--config", "tiny.yaml", *settings], folder=tmp_path)
    try:
        started.wait_until(lambda: "2/6 33.3%" in started.printed(), timeout=60)
        (tmp_path / "runs" / "tiny" / "STOP").touch()
        ended = started.wait(30)
    finally:
        started.kill()
    assert ended.codes == [130, 130], ended.everything
    assert records(tmp_path, "tasks") == []
    assert (tmp_path / "runs/tiny/checkpoints/checkpoint_step_2").is_dir()


def test_a_broken_task_file_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    (tmp_path / "quiz.jsonl").write_bytes(b'{"ctx": "\xff"}\n')
    settings = ("data.tokenizer=bytes", "evaluation.tasks=[quiz.jsonl]")
    ended = train(tmp_path, "--config", "tiny.yaml", *settings, ranks=2)
    assert ended.codes == [2, 2], ended.everything
    assert "evaluation.tasks: quiz.jsonl:1: byte 10 of it is no UTF-8" in ended.err[0]
    assert not (tmp_path / "runs/tiny/logs/training_metrics.jsonl").exists()
