"""The losses of a run as its metrics file tells them, after every resume and rewind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = Path("logs") / "training_metrics.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class LossPoint:
    """A loss at a step, in nats a token; None: it was not finite."""

    step: int
    loss: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class LossHistory:
    """The way that training took, ascending by step.

    Attributes:
        training: Loss of the steps that were logged.
        validation: Mean loss on the validation windows.
    """

    training: list[LossPoint]
    validation: list[LossPoint]

    @property
    def best(self) -> LossPoint | None:
        """The lowest validation loss, the earliest where two are equal; None: there is none."""
        measured = [(point.loss, point) for point in self.validation if point.loss is not None]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None


def read_history(file: Path) -> LossHistory:
    """Read a metrics file; a line that a crash tore is left out.

    Raises:
        OSError: It cannot be read.
    """
    with file.open("rb") as lines:
        return loss_history(record for line in lines if (record := _record(line)) is not None)


def loss_history(records: Iterable[Mapping[str, Any]]) -> LossHistory:
    """Keep the way that training took: the later record of a step wins.

    A record of an earlier step than the last means that training went back. What lies beyond it
    belongs to a way that was left, also where the new one has not come as far yet.
    """
    points: dict[str, dict[int, LossPoint]] = {"step": {}, "validation": {}}
    newest = 0
    for record in records:
        kind, step = record.get("kind"), record.get("step")
        if kind not in points or not isinstance(step, int):
            continue
        if step < newest:
            for found in points.values():
                for left in [other for other in found if other > step]:
                    del found[left]
        newest = step
        loss = record.get("loss" if kind == "step" else "validation_loss")
        points[kind][step] = LossPoint(step, loss)
    training, validation = (
        sorted(found.values(), key=lambda point: point.step) for found in points.values()
    )
    return LossHistory(training, validation)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
