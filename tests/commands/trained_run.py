"""The files of a run that trained for a while, for what reads its time and cost."""

import json
from pathlib import Path
from typing import Any

from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.config.load_run import load_run, render_run
from refocused.metrics.run_time import PERFORMANCE_FILE
from refocused.system.processes import this_process

RUN = "gpt2_1b_8xh100_fast"


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
    metrics: list[dict[str, Any]] = [
        {"kind": "validation", "step": 250, "seconds": 20.0},
        {"kind": "step", "step": 490, "step_seconds": 3.0, "tokens_per_second": 375e3},
        {"kind": "step", "step": 500, "step_seconds": 1.0, "tokens_per_second": 750e3},
    ]
    metrics[-1]["seconds_left"] = 1100.0
    for name, lines in ((PERFORMANCE_FILE, time_lines()), ("logs/training_metrics.jsonl", metrics)):
        (run / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
