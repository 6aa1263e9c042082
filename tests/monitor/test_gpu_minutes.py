from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from monitor.watched_run import GPU, NOW, iso, new_run

from refocused.monitor import gpu_minutes as module
from refocused.monitor.gpu_minutes import GpuMinute, gpu_minutes, read_gpu_minutes
from refocused.monitor.readings import GpuSample, as_record

MINUTE = NOW // 60 * 60


def sample(at: float, **changes: object) -> dict[str, object]:
    return {"time": iso(at), **as_record(dataclasses.replace(GPU, **changes))}


def test_samples_are_gathered_by_the_minute() -> None:
    lost = {"time": iso(MINUTE + 70), **as_record(GpuSample(host="node1", index=7, lost=True))}
    assert gpu_minutes(
        [
            sample(MINUTE + 1, utilization_fraction=0.9, temperature_celsius=60),
            sample(MINUTE + 59, index=1, utilization_fraction=0.5, temperature_celsius=80),
            {"time": iso(MINUTE + 2), "kind": "system", "host": "node1"},
            lost,
            {"kind": "gpu"},
        ]
    ) == [GpuMinute(MINUTE, 0.7, 80, 640.0, 48.4), GpuMinute(MINUTE + 60, None, None, None, None)]


def test_gpus_of_others_on_the_machine_are_left_out() -> None:
    busy = sample(MINUTE, local_rank=0, utilization_fraction=0.9, temperature_celsius=60)
    idle = sample(MINUTE, index=1, utilization_fraction=0.1, temperature_celsius=90)
    assert gpu_minutes([busy, idle]) == [GpuMinute(MINUTE, 0.9, 60, 640.0, 48.4)]
    # where nobody's rank is known, which ones they are is not either
    unknown = sample(MINUTE, utilization_fraction=0.9, temperature_celsius=60)
    assert gpu_minutes([unknown, idle]) == [GpuMinute(MINUTE, 0.5, 90, 640.0, 48.4)]


def test_of_a_long_file_evenly_spread_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    for minute in range(10):
        for second in range(60):
            run.line("gpu_metrics", MINUTE + 60 * minute + second, as_record(GPU))
    logs = run.folder / "logs"
    assert len(read_gpu_minutes(logs)) == 10
    monkeypatch.setattr(module, "MOST_BYTES", (logs / "gpu_metrics.jsonl").stat().st_size // 2)
    found = read_gpu_minutes(logs)
    assert 3 <= len(found) < 10
    assert found[-1].time > MINUTE + 300


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert read_gpu_minutes(tmp_path / "logs") == []
