import dataclasses
import json
import math

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.data.order.sequences import Position
from refocused.metrics import history as history_module
from refocused.metrics.history import (
    HISTORY,
    MetricsTimeline,
    StepMetrics,
    Validation,
    end_of,
    lowest,
    perplexity,
    read_history,
)
from refocused.metrics.jsonl import JsonLines
from refocused.system.number_text import duration
from refocused.system.world import World
from refocused.train.step.state import TrainState


def steps(*pairs):
    return [{"kind": "step", "step": step, "loss": loss} for step, loss in pairs]


def validation(step, loss):
    return {"kind": "validation", "step": step, "validation_loss": loss}


def read(records):
    timeline = MetricsTimeline()
    for record in records:
        timeline.add(record)
    return timeline


def losses(timeline):
    """The losses of steps, and of validations."""
    both = timeline.steps, timeline.validations
    training, validations = ([(one.step, one.loss) for one in points] for points in both)
    return training, validations


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [*steps((10, 3.0), (20, 2.5)), validation(20, 2.6), *steps((30, 2.4))],
            ([(10, 3.0), (20, 2.5), (30, 2.4)], [(20, 2.6)]),
        ),
        (  # after a rewind the later line of a step wins
            steps((10, 3.0), (20, 2.5), (10, 3.1), (20, 2.7), (30, 2.4)),
            ([(10, 3.1), (20, 2.7), (30, 2.4)], []),
        ),
        (  # what lies beyond a rewind belongs to another branch
            [*steps((10, 3.0), (20, 2.5)), validation(20, 2.0), *steps((30, 2.2), (15, 2.8))],
            ([(10, 3.0), (15, 2.8)], []),
        ),
    ],
)
def test_the_losses_are_those_of_the_present_branch(records, expected):
    assert losses(read(records)) == expected


# That of step 0 is a baseline, of which there is no checkpoint.
LOSSES = ((0, 1.5), (1, 2.5), (2, None), (3, 2.1), (4, 2.3))


def test_the_best_is_the_lowest_finite_validation():
    records = [validation(step, loss) for step, loss in LOSSES]
    assert lowest(read(records).validations) == Validation(3, 2.1)
    other = [
        {**validation(step, loss), "validation_set": "other"} for step, loss in ((5, 9.0), (6, 8))
    ]
    best = lowest(read([*records, *other]).validations)
    assert best is not None and (best.step, best.loss) == (6, 8), "of the set used last"
    assert lowest(read(records[2:3]).validations) is None


def test_a_torn_line_and_other_records_are_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(FileNotFoundError):
        read_history(file)
    lines = JsonLines(file)
    for record in (*steps((1, 3.0)), {"kind": "note", "step": 5}, *steps((2, float("nan")))):
        lines.write(record)
    lines.close()
    with file.open("ab") as torn:
        torn.write(json.dumps(steps((3, 1.0))[0]).encode()[:20])
    assert losses(read_history(file)) == ([(1, 3.0), (2, None)], [])


LINES = b"".join(b'{"kind": "step", "step": %d, "loss": 2.5}\n' % step for step in range(1, 11))


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "run" / "logs" / "training_metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(LINES)
    return path


def checkpointer(metrics, *, run=FACTS.run):
    facts = dataclasses.replace(FACTS, run=run)
    return Checkpointer(
        metrics.parents[1] / "steps", world=World(), metadata=facts, history=metrics
    )


@pytest.fixture
def step(metrics):
    state = TrainState(step=10, tokens=1, position=Position(0, 1), loss=2.5)
    saved = checkpointer(metrics).save(FakeOwner(), state.as_record(), files_done=0)
    assert saved is not None
    return read_checkpoint(saved.path)


def resumed(step, elsewhere, *, run=FACTS.run):
    checkpointer(elsewhere, run=run).restore_history(step)


def test_a_resume_brings_the_history_where_there_is_none(step, metrics, tmp_path):
    assert (step.path / HISTORY).read_bytes() == LINES
    assert HISTORY in step.manifest.files
    elsewhere = tmp_path / "other" / "logs" / "training_metrics.jsonl"
    checkpointer(elsewhere).load(FakeOwner(), step, exact=True)
    assert not elsewhere.exists()  # loading alone brings none
    resumed(step, elsewhere, run="branch")
    assert not elsewhere.exists()  # nor is another run's taken
    resumed(step, elsewhere)
    assert elsewhere.read_bytes() == LINES
    elsewhere.write_bytes(b"")
    resumed(step, elsewhere)
    assert elsewhere.read_bytes() == LINES
    metrics.write_bytes(LINES + b"later\n")
    resumed(step, metrics)
    assert metrics.read_bytes() == LINES + b"later\n"  # what is there stays as it is


def test_a_disk_that_refuses_it_costs_the_history_alone(step, tmp_path, caplog):
    (tmp_path / "file").touch()
    resumed(step, tmp_path / "file" / "logs" / "training_metrics.jsonl")
    assert "The losses before step 10 are not in" in caplog.text


def test_only_whole_lines_of_the_end_are_kept(metrics, monkeypatch):
    last = LINES.splitlines(keepends=True)
    with metrics.open("ab") as file:
        file.write(b'{"kind": "st')  # torn by a crash
    assert end_of(metrics) == LINES
    monkeypatch.setattr(history_module, "MOST_BYTES", 3 * len(last[-1]))
    assert end_of(metrics) == b"".join(last[-2:])
    metrics.write_bytes(LINES)
    assert end_of(metrics) == b"".join(last[-3:])
    metrics.write_bytes(b"{")
    assert end_of(metrics) is None
    metrics.unlink()
    assert end_of(metrics) is None


FULL = StepMetrics(
    step=1200,
    total_steps=100_000,
    tokens=1_258_291_200,
    epoch=0,
    loss=3.21456,
    loss_mean=3.2301,
    best_loss=3.1021,
    learning_rate=2.99e-4,
    gradient_norm=0.457,
    loss_scale=None,
    skipped_steps=0,
    step_seconds=1.8349,
    tokens_per_second=571_466.7,
    mfu_fraction=0.4123,
    data_wait_fraction=0.0004,
    gpu_memory_fraction=0.8765,
    seconds_left=181_290.0,
    seconds_trained=2200.0,
    cost_usd=14.6,
    cost_left_usd=1208.6,
)
UNKNOWN = ("best_loss", "gradient_norm", "mfu_fraction", "gpu_memory_fraction", "step_seconds")
MONEY = ("cost_usd", "seconds_left", "cost_left_usd")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | gnorm 0.46 | "
            "1.83 s 571,467 tok/s | MFU 41.2% | spent $14.60, left 50.4 h $1,208.60",
        ),
        (  # what is unknown is left out, as is the mean of one step
            {**dict.fromkeys([*UNKNOWN, *MONEY]), "loss_mean": 3.21456, "learning_rate": 3e-10},
            "loss 3.2146 | lr 3.00e-10",
        ),
        (  # waits and memory are shown where they need attention
            {"data_wait_fraction": 0.123, "gpu_memory_fraction": 0.95, "cost_left_usd": None},
            "loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | gnorm 0.46 | "
            "1.83 s 571,467 tok/s | MFU 41.2% | data 12.3% | mem 95% | spent $14.60, left 50.4 h",
        ),
        (
            {**dict.fromkeys([*UNKNOWN, *MONEY]), "loss_scale": 32_768.0, "skipped_steps": 2}
            | {"mfu_refused": True, "seconds_left": 1.8},
            "loss 3.2146 mean 3.2301 | lr 2.99e-4 "
            "| scale 32768 (2 skipped; their steps and tokens count) | MFU ? | left 2 s",
        ),
    ],
)
def test_the_line_of_a_step(changes, line):
    metrics = dataclasses.replace(FULL, **changes)
    assert metrics.as_line() == f"step   1,200/100,000 1.2% | {line}"
    assert StepMetrics(**metrics.as_record()) == metrics  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.041, "0.04 s"),
        (0.996, "1 s"),
        (99.4, "99 s"),
        (100.0, "1.7 min"),
        (5999.0, "100.0 min"),
        (6000.0, "1.7 h"),
    ],
)
def test_a_time_span_is_written_as_it_is_said(seconds, text):
    assert duration(seconds) == text


def test_perplexity():
    assert (perplexity(0.0), perplexity(1e6)) == (1.0, math.inf)
    assert perplexity(2.5) == pytest.approx(12.182494)
    assert math.isnan(perplexity(math.nan))
