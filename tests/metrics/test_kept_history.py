from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner

from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.step_directory import StepDirectory, read_step
from refocused.checkpoints.step.verify import verify
from refocused.data.order.position import Position
from refocused.metrics import history as kept_history
from refocused.metrics.history import HISTORY, end_of
from refocused.system.world import World
from refocused.train.step.state import TrainState

LINES = b"".join(b'{"kind": "step", "step": %d, "loss": 2.5}\n' % step for step in range(1, 11))


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "logs" / "training_metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(LINES)
    return path


def checkpointer(metrics: Path, *, run: str = FACTS.run) -> Checkpointer:
    facts = dataclasses.replace(FACTS, run=run)
    return Checkpointer(metrics.parents[1] / "steps", world=World(), facts=facts, history=metrics)


@pytest.fixture
def step(metrics: Path) -> StepDirectory:
    state = TrainState(step=10, tokens=1, position=Position(0, 1), loss=2.5)
    saved = checkpointer(metrics).save(FakeOwner(), state.as_record(), files_done=0)
    return read_step(saved.step.path)


def resumed(step: StepDirectory, elsewhere: Path, *, run: str = FACTS.run) -> None:
    checkpointer(elsewhere, run=run).bring_back_history(step)


def test_a_step_vouches_for_the_history_that_it_keeps(step: StepDirectory) -> None:
    assert (step.path / HISTORY).read_bytes() == LINES
    assert HISTORY in step.manifest.files
    assert verify(step, deep=True) == []


def test_a_machine_without_a_history_gets_it(step: StepDirectory, tmp_path: Path) -> None:
    for there, content in (("missing", None), ("empty", b"")):
        elsewhere = tmp_path / there / "logs" / "training_metrics.jsonl"
        if content is not None:
            elsewhere.parent.mkdir(parents=True)
            elsewhere.write_bytes(content)
        resumed(step, elsewhere)
        assert elsewhere.read_bytes() == LINES


def test_loading_alone_leaves_no_history(step: StepDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "refused" / "logs" / "training_metrics.jsonl"
    anew = checkpointer(elsewhere)
    anew.load(FakeOwner(), step, exact=True)
    assert not elsewhere.exists()


def test_a_history_that_is_there_stays_as_it_is(step: StepDirectory, metrics: Path) -> None:
    metrics.write_bytes(LINES + b"later\n")
    resumed(step, metrics)
    assert metrics.read_bytes() == LINES + b"later\n"


def test_another_runs_history_is_not_taken(step: StepDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "branch" / "logs" / "training_metrics.jsonl"
    resumed(step, elsewhere, run="branch")
    assert not elsewhere.exists()


def test_a_disk_that_refuses_it_costs_the_history_alone(
    step: StepDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    resumed(step, tmp_path / "file" / "logs" / "training_metrics.jsonl")
    assert "The losses before step 10 are not in" in caplog.text


def test_only_whole_lines_of_the_end_are_kept(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = len(LINES.splitlines(keepends=True)[-1])
    with metrics.open("ab") as file:
        file.write(b'{"kind": "st')  # torn by a crash
    assert end_of(metrics) == LINES
    monkeypatch.setattr(kept_history, "MOST_BYTES", 3 * line)
    assert end_of(metrics) == b"".join(LINES.splitlines(keepends=True)[-2:])
    metrics.write_bytes(LINES)
    assert end_of(metrics) == b"".join(LINES.splitlines(keepends=True)[-3:])


def test_nothing_is_kept_of_nothing(tmp_path: Path) -> None:
    assert end_of(tmp_path / "missing") is None
    (tmp_path / "torn").write_bytes(b"{")
    assert end_of(tmp_path / "torn") is None
