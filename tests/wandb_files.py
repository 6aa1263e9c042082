"""Read the files that Weights & Biases writes offline."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768  # of LevelDB's record log, the files' format
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One session."""

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]  # all records
    step_metric: str | None  # x axis of the other metrics

    @property
    def steps(self) -> list[int]:
        """Steps of the records with a training loss."""
        return [one["train/step"] for one in self.history if "train/loss" in one]


def offline_sessions(folder: Path) -> list[Session]:
    """Read all sessions below a run's folder, oldest first."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    files.sort(key=lambda file: file.stat().st_mtime_ns)
    return [_read(file) for file in files]


def _read(file: Path) -> Session:
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
    return Session(run_id, project, config, history, metrics.get("*"))


def _records(content: bytes) -> Iterator[Any]:
    """Yield the records; a torn one ends the file."""
    at, parts = 7, b""  # after the file's header
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
