"""The end of a run: exit codes, last lines, the wait for the mirror."""

import dataclasses
import types
from pathlib import Path
from typing import Literal, cast

import pytest
from checkpoints.step_samples import make_step
from run_fakes import FakeSaver, Log, config_of, status_of_mirror, trainer_of

from refocused.checkpoints.step.checkpoint_directory import Branch
from refocused.config.outputs import CheckpointConfig
from refocused.evaluate.final_model import FinalModel, FinalModelAnswer
from refocused.metrics.jsonl import JsonLines
from refocused.system.errors import ExitCode
from refocused.train.lifecycle.shutdown import (
    INTERRUPTED_DRAIN_S,
    REPORT_AGAIN_S,
    REPORT_SOON_S,
    DrainProgress,
    finish,
)
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason

pytestmark = pytest.mark.usefixtures("screen")

BEST = {"best_loss": 2.0, "best_bits_per_byte": 0.75, "best_step": 4}
DONE = TrainState(step=6, tokens=48_000, **BEST, seconds=750.0, cost_usd=12.345)


@pytest.fixture(autouse=True)
def no_summary(monkeypatch):
    """Disable the summary."""
    monkeypatch.setattr("refocused.train.lifecycle.shutdown.write_summary", lambda run: "")


@dataclasses.dataclass
class FakeFinalModel:
    """A final model with this result; None: it is not done in time."""

    log: Log
    status: Literal["made", "uploaded", "failed"] | None = "made"
    folder = Path("final_model")

    def begin(self, step):
        self.log.append(f"begin {step}")

    def wait(self, timeout_s, stop):
        self.log.append(f"wait {timeout_s}")
        if self.status is None:
            return None
        return FinalModelAnswer(token="", status=self.status, text="so it is")


def end(
    saver,
    *,
    stopped=StopReason.NONE,
    state=DONE,
    sample=None,
    mirror="gs://bucket/runs",
    final=None,
):
    settings = CheckpointConfig(mirror=mirror, drain_minutes=2.0)
    command = (
        "deepspeed launch/train.py run.steps=5 --max-steps 6"  # reached: another takes its place
    )
    writer = types.SimpleNamespace(write=lambda engine, stopping: sample)
    trainer = trainer_of(
        saver.log,
        config=config_of(checkpoint=settings),
        saver=saver,
        sampler=None if sample is None else writer,
    )
    final_model = cast("FinalModel | None", final)
    return finish(trainer, state, stopped, command=command, final_model=final_model)


@pytest.mark.parametrize(
    ("changes", "stopped", "code"),
    [
        ({}, StopReason.NONE, ExitCode.OK),
        ({"mirrored": False}, StopReason.NONE, ExitCode.NOT_MIRRORED),
        ({}, StopReason.SIGNAL, ExitCode.INTERRUPTED),
        ({"mirrored": False}, StopReason.STOP_FILE, ExitCode.INTERRUPTED),
        ({"failures": 1, "saved_step": 4}, StopReason.SIGNAL, ExitCode.FAILED),
        ({"mirrored": False}, StopReason.BUDGET, ExitCode.LIMIT_REACHED),
    ],
)
def test_the_exit_code_gives_the_outcome(changes, stopped, code):
    log: Log = []
    assert end(FakeSaver(log, **changes), stopped=stopped) == code
    status = "stopped" if stopped else "finished"
    facts = {"exit_code": code, "stopped_by": stopped.name if stopped else None}
    assert log == [
        f"{status}: ",
        f"state {status} {facts | {'mirrored': changes.get('mirrored', True)}}",
        f"trackers end {int(code)} within {5 if stopped else 30}",
        "closed",
    ]


MADE = "final model final_model: so it is"
OPEN = "final model final_model: it goes on in the background"


@pytest.mark.parametrize(
    ("status", "mirror", "code", "said"),
    [
        ("uploaded", "m", ExitCode.OK, f"export: {MADE}"),
        ("made", None, ExitCode.OK, f"export: {MADE}"),
        ("made", "m", ExitCode.NOT_MIRRORED, f"export_warning: {MADE}"),
        ("failed", "m", ExitCode.FAILED, "export_failed: final model NOT made: so it is"),
        (None, "m", ExitCode.NOT_MIRRORED, f"export_warning: {OPEN}"),
    ],
)
def test_the_final_model_affects_the_exit_code(status, mirror, code, said):
    log: Log = []
    assert end(FakeSaver(log), mirror=mirror, final=FakeFinalModel(log, status)) == code
    assert log[:3] == ["begin 6", "wait 120.0", said]


def test_only_finished_and_saved_runs_get_a_final_model():
    log: Log = []
    final = FakeFinalModel(log)
    end(FakeSaver(log), stopped=StopReason.SIGNAL, final=final)
    end(FakeSaver(log, failures=1, saved_step=4), final=final)
    assert "begin 6" not in log


def test_an_interrupted_run_does_not_wait_for_its_mirror_as_long():
    finished, interrupted = FakeSaver([]), FakeSaver([])
    end(finished)
    end(interrupted, stopped=StopReason.SIGNAL)
    # Its wait is short already; that of a finished run can be cut short by the first signal.
    assert finished.drained == (120.0, True)
    assert interrupted.drained == (INTERRUPTED_DRAIN_S, False)


@pytest.mark.parametrize(
    ("saver", "settings", "lines"),
    [
        (
            {"skipped_uploads": 3},
            {"sample": "def f():\n    pass"},
            [
                "done  step 6 of 6, 48,000 tokens, 12.5 min, $12.35",
                "      best validation loss 2.0000 (perplexity 7.39, 0.7500 bits per byte) "
                "at step 4",
                "      checkpoint runs/sample/checkpoints/branch-2/checkpoint_step_6",
                "      mirror gs://bucket/runs: everything is there but older steps that newer "
                "ones replace: 3",
                "      text sample after step 6:",
                "      | def f():",
                "      |     pass",
                "      train on: deepspeed launch/train.py --max-steps N optimizer.lr=1.0e-04 "
                "schedule.kind=constant",  # the rate that the cosine ended at
            ],
        ),
        (
            {"failures": 1, "saved_step": 4},
            {
                "mirror": None,
                "state": TrainState(step=5, tokens=40_000, seconds=30.0),
                "stopped": StopReason.BUDGET,
            },
            [
                "done  step 5 of 6, 40,000 tokens, 30 s | stopped by cost.budget_usd",
                "      the last step is NOT saved (see the warnings above)",
                "      resume: raise cost.budget_usd, then deepspeed launch/train.py run.steps=5 "
                "--max-steps 6",
            ],
        ),
    ],
    ids=["finished", "unsaved"],
)
def test_the_last_lines(saver, settings, lines, caplog):
    end(FakeSaver([], branch=Branch(number=2, ancestry=((1, 4),)), **saver), **settings)
    page = Path("runs/sample/summary.html")
    assert caplog.messages == [
        *lines,
        f"      summary: {page} = {page.absolute().as_uri()}",
        "      monitor: ./launch/monitor.py runs/sample",
    ]


@pytest.mark.parametrize("columns", [80, 71])
def test_text_samples_stand_side_by_side_where_there_is_room(
    columns, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    events = JsonLines(Path("runs/sample/logs/events.jsonl"))
    for step, text in ((0, "def \x1b[2Jx[bold]\n"), (6, "between")):
        events.write({"kind": "sample", "step": step, "sample": text})
    log: Log = []
    end(FakeSaver(log), sample="def f():\n    " + 9 * "long ")
    assert log[0] == "sample: "  # an event of its own
    first = next(at for at, line in enumerate(caplog.messages) if "text sample" in line)
    title, rule, *lines = caplog.messages[first:]
    if columns == 71:
        assert title == "      text sample of untrained weights:"
        assert (rule, lines[0]) == ("      | def ?[2Jx[bold]", "      text sample after step 6:")
        return
    shown = [[part.strip() for part in line.split(" | ")] for line in (title, *lines[:3])]
    assert shown == [
        ["text sample of untrained weights", "text sample after step 6"],
        ["def ?[2Jx[bold]", "def f():"],
        ["", "long long long long long long"],
        ["", "long long long"],
    ]
    assert all(len(line) <= columns for line in (title, rule, *lines[:3]))


def status(done, *waiting, error=None):
    return status_of_mirror(waiting=waiting, done_bytes=done, total_bytes=1000, last_error=error)


DOWN = status(0, 20, error="HTTP 503")


class Waiting:
    """A wait of 10 minutes for a mirror, with a clock of its own and step 20 to be copied."""

    def __init__(self, folder, caplog):
        make_step(folder, 20)
        self.caplog, self.now = caplog, 100.0
        self.progress = DrainProgress(
            folder, 600.0, lambda: self.now, per_hour_usd=30.0, setting="checkpoint.drain_minutes"
        )

    def hears(self, status, seconds):
        """Look five times a second for so long; return what was said."""
        self.caplog.clear()
        for _ in range(round(seconds * 5)):
            self.progress(status)
            self.now += 0.2
        return [message.strip() for message in self.caplog.messages]


@pytest.fixture
def waiting(tmp_path, caplog):
    return Waiting(tmp_path, caplog)


def test_a_mirror_error_is_reported_soon_and_then_repeatedly(waiting):
    assert waiting.hears(DOWN, REPORT_SOON_S - 1.0) == []
    assert waiting.hears(DOWN, REPORT_AGAIN_S) == [
        "waiting for the mirror, for at most 9.9 min more ($4.97; set by "
        "checkpoint.drain_minutes): nothing mirrored yet, 1 behind, last error: HTTP 503"
    ]
    assert len(waiting.hears(DOWN, 3 * REPORT_AGAIN_S)) == 3
    assert waiting.hears(status(500, 20), 10.0) == ["upload of step 20: 50 % (1 waiting)"]
    assert len(waiting.hears(DOWN, 10.0)) == 1  # the outage returns


def test_upload_progress_is_reported_at_every_tenth(waiting):
    [line] = waiting.hears(None, 10.0)
    assert line.endswith("it has reported nothing yet, see logs/mirror.log")
    assert waiting.hears(status(0, 20), 1.0) == ["upload of step 20: 0 % (1 waiting)"]
    assert waiting.hears(status(50, 20), 1.0) == []
    lines = waiting.hears(status(120, 20, 30), 2.5 * REPORT_AGAIN_S)
    assert lines[0] == "upload of step 20: 10 % (2 waiting)"
    assert [line[:7] for line in lines[1:]] == ["waiting", "waiting"]
    # It has not seen the last step.
    assert waiting.hears(status(0), 10.0)[0].endswith("nothing mirrored yet, 1 behind")
