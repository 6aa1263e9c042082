from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from refocused.monitor.run_reader import TAIL_BYTES, RunReader, RunSight

BEGAN = datetime.datetime(2026, 11, 22, 8, tzinfo=datetime.UTC).timestamp()


class Run:
    """A run's folder as training writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "logs" / "training_metrics.jsonl"
        self.metrics.parent.mkdir()
        self.reader = RunReader(folder, began=BEGAN)

    def write(self, name: str, **content: object) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)

    def log(self, steps: Sequence[int], *, at: float = 0.0, **more: object) -> None:
        for step in steps:
            time = datetime.datetime.fromtimestamp(BEGAN + at + step, datetime.UTC).isoformat()
            record = {"time": time, "kind": "step", "step": step, "loss": step / 100, **more}
            self.append(json.dumps(record) + "\n")

    def append(self, text: str) -> None:
        with self.metrics.open("a") as file:
            file.write(text)

    def sight(self) -> RunSight:
        return self.reader.sight(alive=True)

    def steps(self) -> list[int]:
        return [logged.step for logged in self.sight().logged]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_has_written_nothing(run: Run) -> None:
    assert run.sight() == RunSight(began=BEGAN, alive=True)
    assert not run.sight().is_training


def test_what_the_files_say(run: Run) -> None:
    run.write("state.json", status="training", step=7, total_steps=9, cost_usd=1.5)
    run.write("mirror.json", waiting=[5, 7], last_error="503", heartbeat=12.0)
    run.log([6, 7], cost_left_usd=0.5)
    sight = run.sight()
    assert (sight.status, sight.step, sight.total_steps) == ("training", 7, 9)
    assert (sight.cost_usd, sight.cost_left_usd) == (1.5, 0.5)
    assert sight.mirror is not None
    assert (sight.mirror.waiting, sight.mirror.last_error) == (2, "503")
    assert sight.mirror.heartbeat == 12.0
    assert [(step.step, step.loss, step.at - BEGAN) for step in sight.logged] == [
        (6, 0.06, 6.0),
        (7, 0.07, 7.0),
    ]
    assert sight.is_training
    run.write("state.json", status="finished", step=9, total_steps=9)
    assert run.sight().status == "finished"
    assert not run.sight().is_training


def test_a_file_that_cannot_be_read_leaves_what_was_known(run: Run) -> None:
    run.write("state.json", status="training")
    assert run.sight().status == "training"
    (run.folder / "state.json").write_text("{half")
    assert run.sight().status == "training"


def test_lines_count_when_their_end_is_there(run: Run) -> None:
    run.log([1, 2])
    assert run.steps() == [1, 2]
    run.append('{"time": "2026-11-22T08:00:03Z", "kind": "step", "st')
    assert run.steps() == [1, 2]
    run.append('ep": 3, "loss": null}\n')
    assert run.steps() == [1, 2, 3]
    assert run.sight().logged[-1].loss is None


def test_other_lines_are_passed_over(run: Run) -> None:
    run.append('\n[1]\n"text"\n\xff\xfe torn\n{"kind": "validation", "step": 1}\n')
    run.append('{"kind": "step", "step": "x"}\n{"kind": "step", "time": 3, "step": 4, "loss": 1}\n')
    run.log([5])
    assert run.steps() == [5]


def test_a_rewind_takes_back_what_came_after(run: Run) -> None:
    run.log([1, 2, 3, 4])
    run.log([3], at=100)
    assert run.steps() == [1, 2, 3]


def test_only_the_end_of_a_long_file_is_read(run: Run) -> None:
    run.log(range(3000))
    assert run.metrics.stat().st_size > 2 * TAIL_BYTES
    assert run.steps() == list(range(2949, 3000))
    run.log([3000])
    assert run.steps() == list(range(2950, 3001))


def test_a_file_that_became_shorter_is_read_anew(run: Run) -> None:
    run.log([1, 2, 3])
    assert run.steps() == [1, 2, 3]
    run.metrics.unlink()
    run.log([2])
    assert run.steps() == [1, 2]


def test_steps_of_earlier_sessions_are_no_steps_of_this_one(run: Run) -> None:
    run.write("state.json", status="training", step=3, total_steps=9)
    run.log([1, 2, 3], at=-1000)
    assert [logged.step for logged in run.sight().logged_now] == []
    assert not run.sight().is_training
    run.log([4])
    assert [logged.step for logged in run.sight().logged_now] == [4]
    assert run.sight().is_training
