from __future__ import annotations

import json
from pathlib import Path

import pytest

from refocused.metrics.history import LossHistory, LossPoint, loss_history, read_history
from refocused.metrics.jsonl import JsonLines
from refocused.monitor.screen.pictures import draw_history


def steps(*pairs: tuple[int, float | None]) -> list[dict[str, object]]:
    return [{"kind": "step", "step": step, "loss": loss} for step, loss in pairs]


def validation(step: int, loss: float | None) -> dict[str, object]:
    return {"kind": "validation", "step": step, "validation_loss": loss}


def seen(history: LossHistory) -> list[tuple[int, float | None]]:
    return [(point.step, point.loss) for point in history.training]


def test_steps_and_validations_are_told_apart() -> None:
    history = loss_history([*steps((10, 3.0), (20, 2.5)), validation(20, 2.6), *steps((30, 2.4))])
    assert seen(history) == [(10, 3.0), (20, 2.5), (30, 2.4)]
    assert history.validation == [LossPoint(20, 2.6)]


def test_after_a_rewind_the_later_line_of_a_step_wins() -> None:
    history = loss_history(steps((10, 3.0), (20, 2.5), (10, 3.1), (20, 2.7), (30, 2.4)))
    assert seen(history) == [(10, 3.1), (20, 2.7), (30, 2.4)]


def test_what_lies_beyond_a_rewind_belongs_to_a_way_that_was_left() -> None:
    records = [*steps((10, 3.0), (20, 2.5)), validation(20, 2.0), *steps((30, 2.2), (15, 2.8))]
    history = loss_history(records)
    assert seen(history) == [(10, 3.0), (15, 2.8)]
    assert history.validation == []


def test_the_best_is_the_lowest_finite_validation() -> None:
    records = [validation(10, 2.5), validation(20, None), validation(30, 2.1), validation(40, 2.3)]
    assert loss_history(records).best == LossPoint(30, 2.1)
    assert loss_history(records[1:2]).best is None


def test_a_torn_line_and_other_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file)
    lines.write(steps((1, 3.0))[0])
    lines.write({"kind": "note", "step": 5})
    lines.write(steps((2, float("nan")))[0])
    lines.close()
    with file.open("ab") as torn:
        torn.write(json.dumps(steps((3, 1.0))[0]).encode()[:20])
    assert seen(read_history(file)) == [(1, 3.0), (2, None)]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "records", [steps((1, 3.0), (2, None), (3, 2.5)), [validation(1, 2.0)], [validation(1, None)]]
)
def test_every_history_can_be_drawn(tmp_path: Path, records: list[dict[str, object]]) -> None:
    file = tmp_path / "new" / "loss.png"
    draw_history(loss_history(records), file, title="one")
    assert file.read_bytes().startswith(b"\x89PNG")
