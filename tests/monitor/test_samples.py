"""What the lines of gpu_metrics.jsonl look like to those who read them."""

from __future__ import annotations

import json
from pathlib import Path

from refocused.metrics.jsonl import JsonLines
from refocused.monitor.readings import AlarmEvent, GpuSample, SystemSample, as_record

HOT_GPU = GpuSample(
    host="node1",
    index=5,
    uuid="GPU-5c0ffee0-0000-4000-8000-000000000005",
    name="NVIDIA H100 80GB HBM3",
    local_rank=5,
    utilization_fraction=0.97,
    memory_used_gib=48.4,
    memory_total_gib=79.6,
    temperature_celsius=88,
    slowdown_celsius=87,
    memory_temperature_celsius=92,
    power_watts=540.2,
    power_limit_watts=700.0,
    sm_clock_mhz=1305,
    sm_clock_max_mhz=1980,
    memory_clock_mhz=2619,
    throttle_reasons=("hw_thermal",),
    clock_event_bits=0x40,
    ecc_corrected=0,
    ecc_uncorrected=0,
    remapped_rows=0,
    remap_pending=False,
    remap_failed=False,
    nvlinks_active=18,
    nvlinks_total=18,
    nvlink_errors=0,
    nvlink_sent_gib_per_second=61.2,
    nvlink_received_gib_per_second=61.1,
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    pcie_replays=0,
    mig=False,
    processes={4711: 47.9},
)


def test_a_gpus_line_holds_its_fields_under_their_own_names(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "gpu_metrics.jsonl")
    file.write(as_record(HOT_GPU))
    file.close()
    line = json.loads((tmp_path / "gpu_metrics.jsonl").read_text())
    assert line.pop("time").endswith("Z")
    assert line.pop("kind") == "gpu"
    assert line.pop("processes") == {"4711": 47.9}  # JSON's names are texts
    assert line.pop("throttle_reasons") == ["hw_thermal"]
    assert GpuSample(**line, processes={4711: 47.9}, throttle_reasons=("hw_thermal",)) == HOT_GPU


def test_what_is_unknown_is_null_and_there() -> None:
    lost = as_record(GpuSample(host="node1", index=7, uuid="GPU-7", lost=True))
    assert set(lost) == set(as_record(HOT_GPU))
    assert {lost[name] for name in ("temperature_celsius", "throttle_reasons", "mig")} == {None}


def test_kinds_tell_the_lines_apart() -> None:
    alarm = AlarmEvent(
        alarm="gpu_lost",
        subject="node1 GPU 7",
        raised=True,
        severity="critical",
        text="GPU 7 of node1 is lost",
        host="node1",
    )
    samples = (HOT_GPU, SystemSample(host="node1"), alarm)
    assert [as_record(sample)["kind"] for sample in samples] == ["gpu", "system", "alarm"]
