"""Reads what Weights & Biases' own writer leaves on a disk when it is offline."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768  # of the record log of LevelDB, whose form the files have
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """One session: under which id it told what.

    Attributes:
        steps: The records with a training loss: step and loss.
        history: All records.
        config: The settings.
        step_metric: The metric that all others are drawn over.
    """

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    step_metric: str | None

    @property
    def steps(self) -> list[int]:
        return [one["train/step"] for one in self.history if "train/loss" in one]


def offline_sessions(folder: Path) -> list[Told]:
    """Read all sessions below a run's folder, the first one first."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    files.sort(key=lambda file: file.stat().st_mtime_ns)
    return [_read(file) for file in files]


def _read(file: Path) -> Told:
    run_id = project = ""
    config: dict[str, Any] = {}
    history, metrics = [], {}
    for record in _records(file.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif kind == "history":
            history.append(
                {
                    one.key or "/".join(one.nested_key): json.loads(one.value_json)
                    for one in record.history.item
                }
            )
        elif kind == "metric":
            one = record.metric
            metrics[one.name or one.glob_name] = one.step_metric
    return Told(run_id, project, config, history, metrics.get("*"))


def _records(content: bytes) -> Iterator[Any]:
    """Yield the records; one that a kill has torn ends the file."""
    at, parts = 7, b""  # behind the file's own header
    while at + _HEADER.size <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        parts += content[at : at + size]
        at += size
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
        elif kind not in (_FIRST, _MIDDLE):
            return
