"""`speedrun` with real ranks: ten kills, Ctrl+C, full disks, and what the demonstration writes."""

import collections
import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from data.text_samples import random_texts, write_jsonl
from end_to_end.speedrun_process import SHORT, finished, results, started
from end_to_end.test_full_disks import SmallDisk, small_disk  # noqa: F401
from kills import report_of
from ranks import until

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_ten_kills_over_all_stages_are_continued(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    finished(tmp_path / "whole")
    victim = "end_to_end.speedrun_process:Speedrun"
    report = report_of(victim, tmp_path / "killed", kills=10)
    assert report["kills"] == 10 and set(report["stages"]) >= {"text", "shards", "training"}
    expected = results(tmp_path / "whole")
    assert {Path(name).suffix for name in expected} == {".jsonl", ".json", ".npy"}
    assert results(tmp_path / "killed") == expected
    whole, killed = (
        next((tmp_path / name).glob("runs/*/final_model/model.safetensors")).read_bytes()
        for name in ("whole", "killed")
    )
    assert whole == killed


@pytest.mark.timeout(600)
def test_ctrl_c_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", random_texts(2000))
    given = ["--data", "texts.jsonl", *SHORT, "run.steps=2000", "evaluation.interval=0"]
    running = started(tmp_path, given)
    until(lambda: "\nstep " in (tmp_path / "log").read_text(), seconds=300)
    processes = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert running.wait(120) == 130
    text = (tmp_path / "log").read_text()
    hint = "hint: Stopped in stage training (finished: tokenizer, shards). The same command "
    assert f"{hint}continues: refocused speedrun --data texts.jsonl" in text
    (saved,) = re.findall(r"^done  step (\d+) of", text, re.M)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    running = started(tmp_path, given)
    until(lambda: "\nstep " in (tmp_path / "log").read_text(), seconds=300)
    (first, *_) = re.findall(r"^step +([\d,]+)/", (tmp_path / "log").read_text(), re.M)
    assert int(first) == int(saved) + 1
    running.send_signal(signal.SIGINT)
    running.wait(120)


@pytest.mark.parametrize(
    ("stage", "kib"), [("start", 4), ("text", 64), ("tokenizer", 8), ("shards", 64)]
)
@pytest.mark.timeout(600)
def test_a_full_disk_in_each_stage_loses_nothing(
    tmp_path: Path,
    small_disk: SmallDisk,  # noqa: F811
    stage: str,
    kib: int,
) -> None:
    write_jsonl(tmp_path / "texts.jsonl", random_texts(3000))
    out = small_disk(tmp_path / "out", kib)
    given = ["--out", "out", *SHORT, *([] if stage == "text" else ["--data", "texts.jsonl"])]
    text = finished(tmp_path, given, code=1)
    (error,) = re.findall(r"^error: .*", text, re.M)
    assert "out" in error and re.search("No space left|are free|disk is full", error), error
    if stage != "start":
        assert f"hint: Stopped in stage {stage} (finished: " in text
    there = {path: path.stat().st_mtime_ns for path in out.glob("tokenizer-*.json")}
    assert bool(there) == (stage == "shards")
    subprocess.run(["mount", "-o", "remount,size=65536k", out], check=True)
    assert "\nfinished in " in finished(tmp_path, given)
    assert {path: path.stat().st_mtime_ns for path in there} == there


@pytest.mark.timeout(600)
def test_a_full_disk_of_the_run_is_one_sentence(
    tmp_path: Path,
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    write_jsonl(tmp_path / "texts.jsonl", random_texts(300))
    small_disk(tmp_path / "runs", 256)
    given = ["--data", "texts.jsonl", *SHORT, "checkpoint.max_failed_saves=1"]
    running = started(tmp_path, given)
    assert running.wait(600) != 0
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text and "hint: Stopped in stage training" in text
    # Besides the alarm of the disk.
    refusal = r"^error: No checkpoint could be saved. Training has not started: .* run\.directory"
    assert len(re.findall(refusal, text, re.M)) == 1


def is_degenerate(text: str) -> bool:
    """Whether one character is more than half of a text."""
    return max(collections.Counter(text).values(), default=0) > len(text) / 2


def test_a_line_of_underscores_is_degenerate() -> None:
    assert is_degenerate("def " + "_" * 200) and not is_degenerate("This function returns a list.")


@pytest.mark.timeout(900)
def test_the_demonstration_writes_words_of_its_text(tmp_path: Path) -> None:
    finished(tmp_path, [])
    (run,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (run / "logs/events.jsonl").read_text().splitlines()]
    first, *_, last = [event for event in events if event["kind"] == "sample"]
    samples = last["sample"].split("\n---\n")
    assert len(samples) == 3 and first["step"] == 0
    assert [text for text in samples if is_degenerate(text)] == []
    (text,) = (tmp_path / "data/speedrun").glob("docstrings-*.jsonl")
    known = set(re.findall(r"[a-z]{3,}", text.read_text().lower()))
    words = [word for sample in samples for word in re.findall(r"[a-z]{3,}", sample.lower())]
    assert len(words) >= 8 and sum(word in known for word in words) > 0.8 * len(words)
    assert re.search(r"^  page +file:", (tmp_path / "log").read_text(), re.M)
