from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from end_to_end.forked import ForkedRanks
from evaluate.harness import MODELS
from ranks import Ended

from refocused.commands.evaluate.compare import steps_of_one_run
from refocused.commands.evaluate.model import Evaluated
from refocused.commands.main import run_command
from refocused.evaluate.comparison import SpeedRow, draw_scores, draw_speed, measure_speed
from refocused.evaluate.multiple_choice import Measure

main = functools.partial(run_command, "evaluate")

PNG = b"\x89PNG"
ITEM = {"ctx": "the cat", "endings": ["sat on", "ran"], "label": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        network, tokenizer = make()
        network.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "quiz.jsonl").write_text((json.dumps(ITEM) + "\n") * 3)
    return folder


def compare(capture: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    given = [str(argument) for argument in ("compare", *arguments, "--device", "cpu")]
    assert main(given) == code
    out, err = capture.readouterr()
    return out if code == 0 else err


def test_models_are_compared_by_tasks(models: Path, capsys: Any) -> None:
    out = models / "scores.png"
    tasks = ("--tasks", models / "quiz.jsonl", "--picture", out)
    told = json.loads(compare(capsys, models / "bytes", models / "words", *tasks, "--json"))
    assert [one["model"] for one in told["models"]] == [f"{models}/bytes", f"{models}/words"]
    for one in told["models"]:
        assert one["tasks"]["quiz"]["items"] == 3
        assert one["tasks"]["quiz"]["acc"]["value"] in (0.0, 1.0)
    assert out.read_bytes().startswith(PNG)
    lines = compare(capsys, models / "words", *tasks).splitlines()
    assert lines[0].split() == ["MODEL", "quiz", "acc", "quiz", "acc_norm"]
    assert lines[1].startswith(f"{models}/words")


def test_a_model_that_no_item_fits_has_no_score(models: Path, capsys: Any) -> None:
    """Its tokens are bytes, of which every ending has more than the context."""
    tasks = ("--tasks", models / "quiz.jsonl", "--out", models / "few.png", "--context", 3)
    heading, none, some, _ = compare(
        capsys, models / "bytes", models / "words", *tasks
    ).splitlines()
    assert heading.split() == ["MODEL", "quiz", "acc", "quiz", "acc_norm"]
    assert none.split() == [f"{models}/bytes", "-", "-"]
    assert len(some.split()) > 3
    (line,) = compare(capsys, models / "bytes", *tasks).splitlines()[1:]
    assert line == f"{models}/bytes"
    assert main([str(models / "bytes"), *map(str, tasks[:2]), "--context", "3"]) == 0
    assert "0 items" in (told := capsys.readouterr().out)
    assert "3 skipped: an ending is longer than the context" in told


def test_models_are_compared_by_speed(models: Path, capsys: Any) -> None:
    out = models / "speed.png"
    options = ("--lengths", "8,95,500", "--batches", "2", "--new-tokens", "4", "--picture", out)
    rows = json.loads(compare(capsys, models / "bytes", *options, "--json"))["rows"]
    short, full, too_long = rows
    assert short["parameters"] == 22_968
    assert short["tokens_per_second"] == pytest.approx(16 / short["latency_seconds"])
    assert short["written_per_second"] is None or short["written_per_second"] > 0
    assert full["latency_seconds"] > 0
    assert full["written_per_second"] is None  # no room for four tokens more
    assert too_long["latency_seconds"] is None
    assert out.read_bytes().startswith(PNG)
    lines = compare(capsys, "ten_tiny", "--lengths", "8", "--batches", "1", "--picture", out)
    assert lines.splitlines()[0].split()[:4] == ["MODEL", "PARAMETERS", "LENGTH", "BATCH"]
    assert lines.splitlines()[1].split()[0] == "ten_tiny"


def test_nothing_is_drawn_unless_a_picture_is_named(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(capsys, models / "words", "--tasks", models / "quiz.jsonl")
    compare(capsys, "ten_tiny", "--lengths", "8", "--batches", "1", "--new-tokens", "0")
    assert main(["spectrum", "ten_tiny"]) == 0
    assert "PART" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []


def test_speed_is_counted_by_the_clock() -> None:
    network, _ = MODELS["bytes"]()
    now = iter(float(second) for second in range(100))
    (row,) = measure_speed(
        "m", network, lengths=[8], batches=[3], new_tokens=5, clock=lambda: next(now) ** 2
    )
    # The clock is asked twice for each time: 1, 5, 9 s read, 13, 17, 21 s write, 25, 29, 33 s pass.
    assert row.written_per_second == pytest.approx(3 * 4 / (17 - 5))
    assert row.latency_seconds == 29.0
    assert row.tokens_per_second == pytest.approx(24 / 29)


@pytest.mark.parametrize("memory_gib", [None, 0.0, 0.5])
def test_what_is_unknown_of_every_model_is_drawn_as_that(
    tmp_path: Path, memory_gib: float | None
) -> None:
    row = SpeedRow("m", 10, 8, 2, latency_seconds=0.1, memory_gib=memory_gib)
    draw_speed([row, SpeedRow("m", 10, 16, 2)], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG)


def test_a_time_that_drowns_in_noise_is_unknown() -> None:
    network, _ = MODELS["bytes"]()
    rows = measure_speed("m", network, lengths=[8], batches=[1], new_tokens=5, clock=_Alike())
    assert next(rows).written_per_second is None


class _Alike:
    """A clock by which everything takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_scores_over_steps_are_a_curve(tmp_path: Path) -> None:
    rows = {str(step): {"quiz acc": Measure(step / 100, None)} for step in (10, 20)}
    draw_scores(rows, tmp_path / "a" / "curve.png", steps={"10": 10, "20": 20})
    assert (tmp_path / "a" / "curve.png").read_bytes().startswith(PNG)


def test_steps_of_several_runs_are_no_curve() -> None:
    one, other, later = (
        Evaluated({"run": run, "step": step}, [])
        for run, step in (("one", 10), ("other", 20), ("one", 30))
    )
    assert steps_of_one_run({"a": one, "b": later}) == {"a": 10, "b": 30}
    assert steps_of_one_run({"a": one, "b": other}) == {}
    assert steps_of_one_run({"a": one, "b": Evaluated({}, [])}) == {}


def on_two_ranks(folder: Path, *arguments: object) -> Ended:
    given = ["compare", *map(str, arguments), "--device", "cpu"]
    started = ForkedRanks(2, given, folder=folder, command=main)
    try:
        return started.wait(60)
    finally:
        started.kill()


@pytest.mark.slow
def test_ranks_share_the_tasks_of_a_comparison(models: Path, tmp_path: Path, capsys: Any) -> None:
    given = (models / "bytes", models / "words", "--tasks", models / "quiz.jsonl", "--json")
    alone = json.loads(compare(capsys, *given, "--picture", tmp_path / "alone.png"))
    ended = on_two_ranks(tmp_path, *given, "--picture", tmp_path / "both.png", "--local_rank=0")
    assert ended.codes == [0, 0], ended.everything
    assert ended.out[1] == ""
    for one, other in zip(alone["models"], json.loads(ended.out[0])["models"], strict=True):
        assert one["model"] == other["model"]
        for name in ("acc", "acc_norm", "items"):
            assert one["tasks"]["quiz"][name] == other["tasks"]["quiz"][name]
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_speed_is_not_measured_by_several_ranks(models: Path, tmp_path: Path) -> None:
    ended = on_two_ranks(tmp_path, models / "bytes", "--lengths", "8")
    assert ended.codes == [2, 2], ended.everything
    assert "speed is measured by one process, and 2 ranks would share" in ended.err[0]
    assert ended.out == ["", ""] and "speed" not in ended.err[1]
    assert not (tmp_path / "comparison.png").exists()


def test_what_was_measured_is_printed_though_it_cannot_be_drawn(models: Path, capsys: Any) -> None:
    tasks = ("--tasks", str(models / "quiz.jsonl"), "--picture", "/proc/none/a.png")
    assert main(["compare", str(models / "words"), *tasks, "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert f"{models}/words" in out.splitlines()[1]
    assert "/proc/none/a.png cannot be written" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "compare: name models"),
        (("x", "--picture", "a.jpg"), 2, "--picture a.jpg: give it a name"),
        (
            ("gpt2_tiny", "--lengths", "8", "--batches", "1", "--picture", "/proc/a.png"),
            1,
            "written",
        ),
    ],
)
def test_what_cannot_be_is_one_message(
    capsys: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    told = compare(capsys, *arguments, code=code)
    assert message in told
    assert len(told.splitlines()) == 1
