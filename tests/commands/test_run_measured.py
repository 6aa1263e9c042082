"""What a run has taken and has left, read off its own files."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from commands.cost_estimates import RUN, estimated, main

from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.commands.run_measured import measure
from refocused.config.load_run import load_run, render_run
from refocused.metrics.run_time import PERFORMANCE_FILE
from refocused.system.processes import this_process


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of its own, the current one: a run below it is found by its name."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(folder: Path, status: str, **changes: object) -> Path:
    """A run of 1,000 steps of two seconds, at step 500 after a rewind from 480 to 400."""
    run = folder / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    write_settings(run)
    process = this_process()
    state = {
        "run": "one",
        "status": status,
        "host": "elsewhere",
        "pid": process.pid,
        "pid_started": process.started,
        "updated": "2026-11-22T09:00:00.000Z",
        "step": 500,
        "total_steps": 1000,
        "tokens": 500_000_000,
        "seconds": 1300.0,
        "cost_usd": None,
        "tokens_per_second": 750e3,
    }
    (run / "state.json").write_text(json.dumps(state | changes))
    saved = run / "checkpoints" / f"checkpoint_step_{(state | changes)['step']}"
    saved.mkdir(parents=True)
    (saved / MANIFEST).touch()
    (run / PERFORMANCE_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in time_lines()))
    metrics = [
        {"kind": "validation", "step": 250, "seconds": 20.0},
        {"kind": "step", "step": 490, "step_seconds": 3.0, "tokens_per_second": 375e3},
        {
            "kind": "step",
            "step": 500,
            "step_seconds": 1.0,
            "tokens_per_second": 750e3,
            "seconds_left": 1100.0,
        },
    ]
    lines = "".join(f"{json.dumps(line)}\n" for line in metrics)
    (run / "logs" / "training_metrics.jsonl").write_text(lines)
    return run


def write_settings(run: Path, *more: str) -> None:
    settings = [*more, "run.steps=1000", "checkpoint.interval=100", "evaluation.interval=250"]
    settings += ["schedule.warmup_steps=10"]
    (run / "run.yaml").write_text(render_run(load_run(RUN, settings, name="one").config))


def time_lines() -> list[dict[str, Any]]:
    def line(kind: str, at: str, step: int, first: int = 0, **uses: float) -> dict[str, Any]:
        seconds = {f"{name}_seconds": value for name, value in uses.items()}
        moment = f"2026-11-22T{at}.000Z"
        return {"kind": kind, "time": moment, "step": step, "first_step": first, **seconds}

    return [
        line("session", "08:01:00", 0, start_up=60),
        line("time", "08:18:00", 480, 0, forward_backward=900, update=60, save_stall=60),
        line("save", "08:18:00", 400, save_stall=12),
        line("session", "08:30:00", 400, start_up=40),
        line("time", "08:30:40", 410, 400, forward_backward=40),
        line("time", "08:33:40", 500, 410, forward_backward=170, update=10),
    ]


def test_a_stopped_run_by_hand_over_a_rewind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(here, "stopped")
    found = estimated(capsys, "--measured", "one", "--per-hour", "36", "--budget", "18")
    assert (found["sessions"], found["step_seconds"]) == (2, 2.0)
    assert found["seconds_left"] == 1100.0  # as it expected at its last line
    assert found["cost_left_usd"] == pytest.approx(11.0)
    assert found["cost_usd"] == pytest.approx(13.0)
    assert found["usd_per_million_tokens"] == pytest.approx(13.0 / 500)
    assert found["total_usd"] == pytest.approx(24.0)
    assert found["budget_step"] == 500 + int(500 * 5 / 11)
    # 960 s for 480 steps, of which 80 were lost; 220 s for 100 steps more; 08:00:00 to 08:33:40
    assert found["goodput_fraction"] == pytest.approx((960 * 400 / 480 + 220) / 2020)
    assert main(["--measured", "one", "--per-hour", "36"]) == 0
    text = capsys.readouterr().out
    assert "left       18.3 min, $11.00, ends" in text
    assert "if resumed now from checkpoint 500\n" in text
    assert "2 s a step, 500,000 tokens/s, 20 s a validation, 12 s a save" in text
    assert main(["--measured", "one", "--budget", "5"]) == 0
    text = capsys.readouterr().out
    assert "in 2 sessions, price unknown: set --per-hour" in text
    assert "left       18.3 min, ends" in text
    assert "budget     $5.00: its last step is known with --per-hour" in text


def test_a_run_that_trains_has_used_the_time_since_its_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, "training")
    now = 1_795_338_000.0 + 100  # 2026-11-22T09:00:00Z and a hundred seconds
    found = measure(run, per_hour_usd=None, budget_usd=None, now=now)
    assert found["seconds_left"] == 1000.0
    assert found["ends"] == now + 1000.0
    assert [found[name] for name in ("cost_usd", "cost_left_usd", "budget_step")] == [None] * 3


def test_what_a_crashed_run_has_left_counts_from_its_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {"host": socket.gethostname(), "pid": 2**22 + 1}  # no process has such a pid
    run = write_run(here, "training", step=400, **gone)
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"step": 500}))
    found = estimated(capsys, "--measured", "one", "--per-hour", "36", "--budget", "18")
    # What was left at its last line, and 100 steps again
    assert (found["status"], found["step"], found["resumes_from"]) == ("crashed", 500, 400)
    assert found["seconds_left"] == 1100.0 + 100 * 2.0
    assert found["budget_step"] == 400 + int(600 * 5 / (found["seconds_left"] / 100))
    (run / "checkpoints" / "checkpoint_step_400" / MANIFEST).unlink()
    assert main(["--measured", "one"]) == 0
    assert "if resumed now from the start\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "step", "budget", "answer"),
    [
        ("finished", 1000, "60", "sufficient"),
        ("finished", 1000, "20", "exceeded by $30.00"),
        ("stopped", 500, "49", "exceeded by $1.00"),
        ("stopped", 500, "50", "reached at step 500"),
    ],
)
def test_what_a_run_cost_and_a_budget_was_good_for(
    here: Path, capsys: pytest.CaptureFixture[str], status: str, step: int, budget: str, answer: str
) -> None:
    write_settings(write_run(here, status, step=step, cost_usd=50.0), "cost.per_hour_usd=36")
    assert main(["--measured", "one", "--per-hour", "72"]) == 0  # for the time so far, too
    assert "in 2 sessions, $26.00, $0.0520 a million tokens" in capsys.readouterr().out
    assert main(["--measured", "one", "--budget", budget]) == 0
    text = capsys.readouterr().out
    assert f": {answer}\n" in text
    assert f"step {step:,} of 1,000, 500.00 M tokens, {status}" in text
    assert "in 2 sessions, $50.00, $0.1000 a million tokens" in text
    assert ("left  " in text) == (status == "stopped") and "goodput" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("[1]", "cannot be read: it is "),
        ('{"step": 3', "cannot be read: it is "),
        (None, "is missing or is not a run's"),
        ('{"step": 3}', "is missing or is not a run's"),
    ],
)
def test_a_folder_without_the_state_of_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str | None, words: str
) -> None:
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    assert main(["--measured", str(tmp_path)]) == 1
    assert f"{tmp_path}/state.json {words}" in capsys.readouterr().err
