"""What the lines of gpu_metrics.jsonl look like to their readers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from monitor.watched_run import GPU, NOW, SYSTEM, iso, new_run

from refocused.metrics.jsonl import JsonLines
from refocused.monitor import readings
from refocused.monitor.readings import (
    AlarmEvent,
    GpuMinute,
    GpuSample,
    as_record,
    gpu_minutes,
    read_gpu_minutes,
)

MINUTE = NOW // 60 * 60
HOT = dataclasses.replace(GPU, throttle_reasons=("hw_thermal",), processes={4711: 47.9})
LOST = GpuSample(host="node1", index=7, uuid="GPU-7", lost=True)


def as_read(sample: Any, **changes: object) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(as_record(sample)))
    return record | changes


def test_a_line_holds_its_kind_and_every_field_under_its_own_name(tmp_path: Path) -> None:
    alarm = AlarmEvent("gpu_lost", "node1 GPU 7", True, "critical", "it is lost", "node1")
    file = JsonLines(tmp_path / "samples.jsonl", compact=True)
    assert all(file.write(as_record(sample)) for sample in (HOT, LOST, SYSTEM, alarm))
    file.close()
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(record.pop("time") for record in records)
    hot, lost, system, alarm_line = records
    assert [one["kind"] for one in (hot, lost, system, alarm_line)] == [
        *("gpu", "gpu", "system", "alarm")
    ]
    assert set(hot) == set(lost) == {"kind", *GpuSample.__slots__}  # unknown is null, and there
    assert lost["temperature_celsius"] is lost["throttle_reasons"] is None
    assert hot["processes"] == {"4711": 47.9}  # JSON's names are texts
    assert hot["throttle_reasons"] == ["hw_thermal"]
    assert (hot["utilization_fraction"], hot["sm_clock_mhz"]) == (0.97, 1905)


def sample(at: float, **changes: object) -> dict[str, Any]:
    return as_read(GPU, time=iso(at), **changes)


@pytest.mark.parametrize(
    ("records", "minutes"),
    [
        (
            [
                sample(MINUTE + 1, utilization_fraction=0.9, temperature_celsius=60),
                sample(MINUTE + 59, index=1, utilization_fraction=0.5, temperature_celsius=80),
                {"time": iso(MINUTE + 2), "kind": "system", "host": "node1"},
                as_read(LOST, time=iso(MINUTE + 70)),
                {"kind": "gpu"},
            ],
            [
                GpuMinute(MINUTE, 0.7, 80, 640.0, 48.4),
                GpuMinute(MINUTE + 60, None, None, None, None),
            ],
        ),
        (  # GPUs of others on the machine are left out
            [sample(MINUTE, local_rank=0), sample(MINUTE, index=1, temperature_celsius=90)],
            [GpuMinute(MINUTE, 0.97, 66, 640.0, 48.4)],
        ),
    ],
)
def test_gpu_readings_are_gathered_by_the_minute(
    records: list[dict[str, Any]], minutes: list[GpuMinute]
) -> None:
    assert gpu_minutes(records) == minutes


def test_of_a_long_file_evenly_spread_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    logs = run.folder / "logs"
    assert read_gpu_minutes(logs) == []
    for second in range(600):
        run.line("gpu_metrics", MINUTE + second, as_record(GPU))
    assert len(read_gpu_minutes(logs)) == 10
    size = (logs / "gpu_metrics.jsonl").stat().st_size
    monkeypatch.setattr(readings, "MOST_BYTES", size // 2)
    found = read_gpu_minutes(logs)
    assert 3 <= len(found) < 10
    assert found[-1].time > MINUTE + 300
