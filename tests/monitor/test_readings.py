"""The lines of gpu_metrics.jsonl: written, and read back but for what is damaged."""

import dataclasses
import json
from typing import Any

import pytest
from monitor.watched_run import GPU, SYSTEM

from refocused.metrics.jsonl import JsonLines
from refocused.monitor.readings import AlarmEvent, GpuSample, as_record, sample_of

HOT = dataclasses.replace(GPU, throttle_reasons=("hw_thermal",), processes={4711: 47.9})
LOST = GpuSample(host="node1", index=7, uuid="GPU-7", lost=True)


def test_a_line_holds_its_kind_and_every_field_under_its_own_name(tmp_path):
    alarm = AlarmEvent("gpu_lost", "node1 GPU 7", True, "critical", "it is lost", "node1")
    file = JsonLines(tmp_path / "samples.jsonl", compact=True)
    assert all(file.write(as_record(sample)) for sample in (HOT, LOST, SYSTEM, alarm))
    file.close()
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(record.pop("time") for record in records)
    assert [record["kind"] for record in records] == ["gpu", "gpu", "system", "alarm"]
    hot, lost, *_ = records
    assert set(hot) == set(lost) == {"kind", *GpuSample.__slots__}  # unknown is null, and there
    assert lost["temperature_celsius"] is lost["throttle_reasons"] is None
    assert (hot["processes"], hot["throttle_reasons"]) == ({"4711": 47.9}, ["hw_thermal"])
    assert [sample_of(record) for record in records] == [HOT, LOST, SYSTEM, None]


@pytest.mark.parametrize("sample", [HOT, SYSTEM])
def test_a_damaged_field_costs_that_field_alone(sample):
    written: dict[str, Any] = json.loads(json.dumps(as_record(sample)))
    for field in dataclasses.fields(sample):
        is_named = field.name not in ("host", "index")  # without them nothing shows what it is
        whole = dataclasses.replace(sample, **{field.name: field.default}) if is_named else None
        assert sample_of(written | {field.name: {"x": 1}}) == whole
    assert sample_of({"kind": "gpu"}) is sample_of({"kind": ["gpu"]}) is None
