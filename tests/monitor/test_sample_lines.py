from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from monitor.test_samples import HOT_GPU

from refocused.metrics.jsonl import JsonLines
from refocused.monitor.readings import GpuSample, SystemSample, as_record
from refocused.monitor.sample_lines import (
    EVERY_LINE,
    WHOLE_EVERY,
    SampleShortener,
    SamplesTail,
)

COOL_GPU = dataclasses.replace(HOT_GPU, temperature_celsius=60, throttle_reasons=None)
SYSTEM = SystemSample(host="node1", gpus=8, cpu_fraction=0.5)


def written(path: Path, *samples: GpuSample | SystemSample) -> Path:
    file, shortener = JsonLines(path, compact=True), SampleShortener()
    for sample in samples:
        assert file.write(shortener.record(sample))
    file.close()
    return path


def as_read(sample: GpuSample | SystemSample) -> dict[str, Any]:
    record = as_record(sample)
    if record.get("throttle_reasons") is not None:
        record["throttle_reasons"] = list(record["throttle_reasons"])
    if record.get("processes") is not None:
        record["processes"] = {str(pid): gib for pid, gib in record["processes"].items()}
    return record


def read(tail: SamplesTail) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name != "time"} for line in tail.records()
    ]


def test_what_is_read_is_what_was_sampled(tmp_path: Path) -> None:
    """Also what changes and comes back, and what becomes unknown."""
    other = dataclasses.replace(HOT_GPU, index=6, utilization_fraction=0.1)
    lost = GpuSample(host="node1", index=5, uuid=HOT_GPU.uuid, lost=True)
    busier = dataclasses.replace(SYSTEM, cpu_fraction=0.9)
    samples = (HOT_GPU, other, SYSTEM, COOL_GPU, other, busier, HOT_GPU, lost, other, SYSTEM)
    path = written(tmp_path / "samples.jsonl", *samples)
    assert read(SamplesTail(path)) == [as_read(sample) for sample in samples]


def test_a_line_holds_what_every_line_holds_and_what_is_new() -> None:
    shortener = SampleShortener()
    assert set(shortener.record(HOT_GPU)) == set(as_record(HOT_GPU))
    assert set(shortener.record(HOT_GPU)) == EVERY_LINE
    assert set(shortener.record(COOL_GPU)) == EVERY_LINE | {"throttle_reasons"}
    assert set(shortener.record(COOL_GPU)) == EVERY_LINE
    assert set(shortener.record(SYSTEM)) == set(as_record(SYSTEM))
    assert set(shortener.record(SYSTEM)) == {"kind", "memory_used_gib"}


def test_a_whole_line_comes_again_and_again() -> None:
    shortener = SampleShortener()
    lines = [shortener.record(HOT_GPU) for _ in range(2 * WHOLE_EVERY + 1)]
    whole = [place for place, line in enumerate(lines) if "host" in line]
    assert whole == [0, WHOLE_EVERY, 2 * WHOLE_EVERY]


def test_after_a_line_that_may_be_lost_comes_a_whole_one() -> None:
    shortener = SampleShortener()
    shortener.record(HOT_GPU)
    shortener.forget()
    assert "host" in shortener.record(HOT_GPU)


def test_lines_before_the_first_whole_one_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "samples.jsonl", *[HOT_GPU] * (WHOLE_EVERY + 3))
    whole_bytes = path.stat().st_size - len(b"".join(path.read_bytes().splitlines(True)[1:]))
    tail = SamplesTail(path, last_bytes=path.stat().st_size - whole_bytes + 10)
    assert read(tail) == [as_read(HOT_GPU)] * 3
