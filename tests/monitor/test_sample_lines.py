from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from monitor.test_samples import HOT_GPU

from refocused.metrics.jsonl import JsonLines
from refocused.monitor.readings import GpuSample, SystemSample, as_record
from refocused.monitor.sample_lines import SamplesTail

SYSTEM = SystemSample(host="node1", gpus=8, cpu_fraction=0.5)


def as_read(sample: GpuSample | SystemSample) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(as_record(sample)))
    return read


def read(path: Path, **options: int) -> list[dict[str, Any]]:
    tail = SamplesTail(path, **options)
    return [
        {name: value for name, value in line.items() if name != "time"} for line in tail.records()
    ]


def test_what_is_read_is_what_was_sampled(tmp_path: Path) -> None:
    lost = GpuSample(host="node1", index=5, uuid=HOT_GPU.uuid, lost=True)
    samples = [HOT_GPU, lost, SYSTEM, dataclasses.replace(HOT_GPU, throttle_reasons=None), SYSTEM]
    file = JsonLines(tmp_path / "samples.jsonl", compact=True)
    assert all(file.write(as_record(sample)) for sample in samples)
    file.close()
    assert read(tmp_path / "samples.jsonl") == [as_read(sample) for sample in samples]


def test_the_short_lines_of_version_0_1_are_completed(tmp_path: Path) -> None:
    path, whole = tmp_path / "samples.jsonl", as_read(HOT_GPU)
    other = whole | {"index": 6}
    short = {"kind": whole["kind"], "index": whole["index"], "temperature_celsius": 60}
    same = {"kind": whole["kind"], "index": 6, "throttle_reasons": None}
    lines = [short, whole, other, short, same]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(path) == [
        whole,  # what comes before a GPU's first whole line is left out
        other,
        whole | {"temperature_celsius": 60},
        other | {"throttle_reasons": None},
    ]
