import math
from pathlib import Path

import pytest
from monitor.watched_run import GPU, NOW, WatchedRun, new_run

from refocused.metrics.history import StepMetrics, read_history
from refocused.monitor.screen.pictures import draw_history, limits, line_of
from refocused.monitor.screen.summary import write_summary

SUMMARY = {"SUMMARY.md", "summary.html"}


def summary_of(run: WatchedRun) -> dict[str, str]:
    """Write the summary and return the rows of its Markdown."""
    write_summary(run.folder, run.view())
    lines = (run.folder / "SUMMARY.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cell[0]: cell[1] for cell in cells if len(cell) == 2}


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    run = new_run(tmp_path)
    run.begin(step=2000, status="finished", exit_code=0, validation_loss=2.0)
    run.line("training_metrics", NOW, {"kind": "validation", "step": 900, "validation_loss": 3.05})
    run.gpus(GPU)
    for kind in ("start", "resume", "resume"):
        run.line("events", NOW, {"kind": kind, "text": kind})
    for stall in (1.0, 3.0):
        run.line("events", NOW, {"kind": "save", "text": "save", "stall_seconds": stall})
    run.alarm()
    run.alarm(raised=False)
    return run


def test_the_rows_say_what_the_files_say(run: WatchedRun) -> None:
    run.line("events", NOW, {"text": "of no kind"})
    slowest = {"rank": 1, "excess_fraction": 0.1, "limit_fraction": 0.06, "phase": "data"}
    step = {"kind": "step", "step": 2001, "tokens_per_second": -1, "slowest": slowest}
    run.line("training_metrics", NOW, step)
    rows = summary_of(run)
    assert rows["status"] == "finished, exit code 0"
    assert rows["steps"] == "2,000 of 2,000 (100.0%)"
    assert rows["validation loss"] == f"2.0000, perplexity {math.exp(2):.2f}"
    assert rows["best validation loss"].endswith("at step 900")
    assert rows["time trained"] == "50.0 min $20.00"
    assert rows["a million tokens"] == "$10.0000"  # 20 dollars for 2,000 steps of 1,000 tokens
    assert rows["tokens a second, mean"] == "700,000"
    assert rows["step, mean"] == "1.5 s"
    assert rows["GPUs busy, mean"] == "97.0%"
    assert (rows["sessions"], rows["saves"]) == ("3", "2, 2 s each without training")
    assert rows["newest checkpoint here"] == "step 1,900"
    assert rows["alarms"] == "1"
    assert "left" not in rows


def test_the_summary_lists_the_last_troubles_of_all_machines(run: WatchedRun) -> None:
    text = "no room <script>alert(1)</script> | x"
    run.line("events", NOW - 900, {"kind": "save_failed", "text": text})
    run.line("events-node-1", NOW - 950, {"kind": "sampler_warning", "text": "no driver there"})
    for _ in range(100):
        run.line("events", NOW - 800, {"kind": "save", "text": "save"})
    summary_of(run)
    text = (run.folder / "SUMMARY.md").read_text()
    assert "<script" not in text
    assert 0 < text.find("no driver there") < text.find(r"\| x")  # of any machine, by time


@pytest.mark.parametrize("files", ["none", "no steps", "not finite"])
def test_of_a_run_of_which_little_is_known_there_is_a_summary_too(
    tmp_path: Path, files: str
) -> None:
    run = new_run(tmp_path)
    if files != "none":
        run.state(step=0, status="failed", loss=None, total_steps=None)
    if files == "not finite":
        run.line("training_metrics", NOW, {"kind": "step", "step": 1, "loss": None})
        run.line("training_metrics", NOW, {"kind": "validation", "step": 1})
    assert summary_of(run)["status"].startswith("starting" if files == "none" else "failed")
    (run.folder / "lines").write_text('{"kind": "validation", "step": 1}\n')
    draw_history(read_history(run.folder / "lines"), run.folder / "loss.png", title="one")
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    made = {path.name for path in run.folder.iterdir() if path.is_file()}
    assert {name for name in made if name.lower().startswith("summary")} == SUMMARY


def points(*values: float | None) -> list[StepMetrics]:
    return [StepMetrics(step, loss=value) for step, value in enumerate(values, 1)]


def test_a_long_line_is_thinned_by_means_and_keeps_its_gaps() -> None:
    places, values = line_of(points(2.0, None, math.nan), "loss")
    assert (places, values[0]) == ([1, 2, 3], 2.0)
    assert all(map(math.isnan, values[1:]))
    places, values = line_of(points(*(float(n % 2) for n in range(3000))), "loss")
    assert (len(places), places[-1]) == (1000, 3000)
    assert values[0] == pytest.approx(1 / 3)
    _, values = line_of(points(*[None] * 2000), "loss")
    assert all(map(math.isnan, values))


def test_the_first_steps_do_not_set_the_scale() -> None:
    falling = [100.0] * 3 + [3.0 - step / 100 for step in range(3, 100)]
    low, high = limits(line_of(points(*falling), "loss"), ([], []))
    assert (low, high) == (pytest.approx(2.01 - 0.047), pytest.approx(2.95 + 0.047))
    assert limits(line_of(points(2.0), "loss")) == (pytest.approx(1.98), 2.02)
