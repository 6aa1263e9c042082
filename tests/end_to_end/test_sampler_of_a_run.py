"""The sampler beside a run: it starts with it, ends with it, and tells when it was killed."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedRanks
from ranks import metrics
from tiny import tiny_run

pytestmark = pytest.mark.slow
SETTINGS = ["--config", "tiny.yaml", "checkpoint.mirror=null", "log.sample_seconds=0.5"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def samplers(run: Path) -> list[Path]:
    """The processes of this run's sampler."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if b"refocused.monitor.sampler.sampler_process" in words and str(run).encode() in words:
                found.append(path.parent)
    return found


def test_a_killed_run_is_told_and_the_next_one_is_watched_again(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    samples, events = run / "logs" / "gpu_metrics.jsonl", run / "logs" / "events.jsonl"

    def alarms() -> list[tuple[str, bool]]:
        return [(line["alarm"], line["raised"]) for line in lines(events) if "alarm" in line]

    def await_end() -> None:
        deadline = time.monotonic() + 30
        while samplers(run):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    killed = ForkedRanks(2, [*SETTINGS, "run.steps=100000"], folder=tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(killed.kill)
        killed.wait_until(lambda: bool(metrics(run)) and bool(lines(samples)))
        assert len(samplers(run)) == 1
        killed.kill(signal.SIGKILL)
        killed.wait()
    await_end()
    assert alarms() == [("run_died", True)]
    assert {line["kind"] for line in lines(samples)} <= {"system", "gpu"}

    before = len(lines(samples))
    again = ForkedRanks(2, [*SETTINGS, "--resume", "none", "run.steps=6"], folder=tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(again.kill)
        ended = again.wait()
    assert ended.codes == [0, 0], ended.everything
    await_end()
    assert alarms() == [("run_died", True), ("run_died", False)]
    assert len(lines(samples)) > before
