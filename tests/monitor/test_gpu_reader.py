import subprocess
import sys

import pynvml
import pytest
from nvml_machine import uuid

from refocused.monitor.sampler import gpu_reader
from refocused.monitor.sampler.gpu_reader import (
    SLOW_SECONDS,
    GpuReader,
    NoGpusError,
    driver_versions,
    gpu_capabilities,
    gpu_names,
    visible_devices,
)
from refocused.system.errors import RefocusedError

UNKNOWN_MEMORY = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value


@pytest.fixture
def clock():
    """The time in seconds, which a test moves."""
    return [100.0]


@pytest.fixture
def reader(eight_gpus, clock):
    opened = GpuReader(host="node1", ranks=8, clock=lambda: clock[0])
    yield opened
    opened.close()


def test_a_healthy_gpu(reader):
    found = reader.samples()[3]
    expected = """
        host node1, index 3, local_rank 3, uuid UUID, name NVIDIA H100 80GB HBM3, lost False,
        utilization_fraction 0.97, memory_used_gb 48.0, memory_total_gb 80.0,
        temperature_celsius 61, slowdown_celsius 87, memory_temperature_celsius 70,
        power_watts 640.5, power_limit_watts 700.0, sm_clock_mhz 1755, sm_clock_max_mhz 1980,
        memory_clock_mhz 2619, throttle_reasons (), clock_event_bits 4, ecc_corrected 0,
        ecc_uncorrected 0, remapped_rows 0, remap_pending False, remap_failed False,
        nvlinks_active 18, nvlinks_total 18, nvlink_errors 0, nvlink_sent_gb_per_second None,
        nvlink_received_gb_per_second None, pcie_generation 5, pcie_generation_max 5,
        pcie_width 16, pcie_width_max 16, pcie_replays 0, mig False, processes {4711: 47.0}"""
    facts = " ".join(expected.split()).replace("UUID", uuid(3)).split(", ")
    assert sorted(facts) == sorted(f"{name} {getattr(found, name)}" for name in found.__slots__)


THROTTLES = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
REMAPPED = {"remapped_corrected": 1, "remapped_uncorrected": 2, "remap_pending": 1}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"clock_events": 0x8}, {"throttle_reasons": THROTTLES[:1]}),
        ({"clock_events": 0x1 | 0x2 | 0x10 | 0x100}, {"throttle_reasons": ()}),
        ({"clock_events": 0xFF}, {"throttle_reasons": THROTTLES}),
        ({"ecc_uncorrected": 3}, {"ecc_corrected": 0, "ecc_uncorrected": 3}),
        (REMAPPED, {"remapped_rows": 3, "remap_pending": True, "remap_failed": False}),
        ({"process": [17, UNKNOWN_MEMORY]}, {"processes": {17: None}}),
        ({"process": None}, {"processes": {}}),
    ],
)
def test_one_gpu_among_healthy_ones(eight_gpus, reader, facts, expected):
    eight_gpus.gpu(5, **facts)
    samples = reader.samples()
    assert {name: getattr(samples[5], name) for name in expected} == expected
    assert samples[4].throttle_reasons == ()


def test_a_gpu_that_is_lost_is_still_known(eight_gpus, reader):
    assert reader.samples()[7].pcie_width == 16
    eight_gpus.gpu(7, lost=1)
    *others, lost = reader.samples()
    assert lost.lost
    assert (lost.uuid, lost.name, lost.local_rank) == (uuid(7), "NVIDIA H100 80GB HBM3", 7)
    assert lost.temperature_celsius is lost.processes is lost.utilization_fraction is None
    assert not any(sample.lost for sample in others)
    eight_gpus.gpu(7, lost=0, pcie_width=8)
    back = reader.samples()[7]
    assert (back.lost, back.pcie_width) == (False, 8)  # what rarely changes is queried anew


def test_a_gpu_that_was_lost_before_does_not_hide_whose_the_others_are(eight_gpus):
    eight_gpus.gpu(0, gone=1)
    first, second, *_ = GpuReader(host="node1", ranks=8).samples()
    assert first.lost
    assert first.uuid is None
    assert (second.index, second.local_rank, second.lost) == (1, 1, False)


@pytest.mark.parametrize(
    ("fact", "fields"),
    [
        ("utilization", ["utilization_fraction"]),
        ("memory_used", ["memory_used_gb", "memory_total_gb"]),
        ("power", ["power_watts"]),
        ("clock_events", ["clock_event_bits", "throttle_reasons"]),
        ("ecc_uncorrected", ["ecc_uncorrected"]),
        ("remapped_corrected", ["remapped_rows", "remap_pending", "remap_failed"]),
        ("mig", ["mig"]),
        ("field_82", ["memory_temperature_celsius"]),
        ("field_91", ["nvlinks_total", "nvlinks_active", "nvlink_errors"]),  # has no NVLink
    ],
)
def test_what_is_not_supported_is_unknown_and_hides_nothing_else(eight_gpus, fact, fields):
    def unknown():
        sample = GpuReader(host="node1", ranks=8).samples()[1]
        return {name for name in sample.__slots__ if getattr(sample, name) is None}

    before = unknown()
    eight_gpus.gpu(1, **{fact: None})
    assert unknown() - before == set(fields)


def test_nvlink_and_what_rarely_changes_are_queried_rarely(eight_gpus, reader, clock):
    assert reader.samples()[0].nvlink_sent_gb_per_second is None
    kib = {"field_138": 90 * 10**9 // 1024, "field_139": 60 * 10**9 // 1024}
    eight_gpus.gpu(0, **kib, field_52=2, field_59=1, field_165_4=0, temperature=70)
    clock[0] += SLOW_SECONDS - 1
    early = reader.samples()[0]
    assert (early.nvlinks_active, early.temperature_celsius) == (18, 70)
    clock[0] += 1
    found = reader.samples()[0]
    assert found.nvlink_sent_gb_per_second == 3
    assert found.nvlink_received_gb_per_second == 2
    assert found.nvlink_errors == 3
    assert (found.nvlinks_active, found.nvlinks_total) == (17, 18)
    eight_gpus.gpu(0, field_138=100)  # a counter that began anew gives no rate
    clock[0] += SLOW_SECONDS
    assert reader.samples()[0].nvlink_sent_gb_per_second is None


@pytest.mark.parametrize(("visible", "ranks", "owners"), [("3,1", 4, {3: 0, 1: 1}), ("0", 0, {})])
def test_the_ranks_gpus_by_cuda_visible_devices(eight_gpus, visible, ranks, owners):
    samples = GpuReader(host="node1", visible=visible, ranks=ranks).samples()
    found = {one.index: one.local_rank for one in samples if one.local_rank is not None}
    assert found == owners


ALIKE = [("GPU-aa00", "H100"), ("GPU-ab00", "H100"), ("GPU-bb00", "H100"), ("GPU-cc00", "H100")]
MIXED = [("GPU-aa00", "L4"), ("GPU-ab00", "H100")]


@pytest.mark.parametrize(
    ("gpus", "visible", "cuda_order", "expected"),
    [
        (ALIKE, None, None, [0, 1, 2, 3]),
        (ALIKE, "", None, []),
        (ALIKE, "2,0", None, [2, 0]),
        (ALIKE, "GPU-bb,1", None, [2, 1]),
        (ALIKE, "GPU-a,1", None, []),  # two begin so
        (ALIKE, "1,-1,2", None, [1]),  # what follows a word that names none is not seen
        (ALIKE, "1,1", None, []),
        (ALIKE, "0,GPU-aa", None, []),
        (ALIKE, "MIG-aa00,1", None, []),
        # Numbers say nothing where kinds differ and CUDA begins with the fastest.
        (MIXED, "0,1", None, [None, None]),
        (MIXED, None, "FASTEST_FIRST", [None, None]),
        (MIXED, "1,0", "PCI_BUS_ID", [1, 0]),
        (MIXED, "GPU-ab,GPU-aa", None, [1, 0]),
        ([(None, None), *ALIKE[1:]], "0,1", None, [0, 1]),  # an unknown name is no other kind
    ],
)
def test_devices_as_cuda_numbers_them(gpus, visible, cuda_order, expected):
    assert visible_devices(gpus, visible=visible, cuda_order=cuda_order) == expected


def test_the_driver_is_queried_by_another_process_and_tells_its_versions(eight_gpus):
    for index in range(6):
        eight_gpus.gpu(index, major=9, minor=0)
    eight_gpus.gpu(3, lost=1)
    eight_gpus.gpu(7, major=7, minor=5)
    assert gpu_capabilities() == [*[(9, 0)] * 3, None, (9, 0), (9, 0), None, (7, 5)]
    h100 = "NVIDIA H100 80GB HBM3"
    assert gpu_names() == [*[h100] * 3, None, h100, h100, None, h100]
    pynvml.nvmlInit()
    assert driver_versions() == (None, None)
    eight_gpus.driver(driver="570.86.15", cuda=13010)
    assert driver_versions() == ("570.86.15", (13, 1))


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({"init": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}, "Restart the machine"),
        ({"init": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}, "kernel module is not loaded"),
        ({"init": pynvml.NVML_ERROR_UNKNOWN}, "nvidia-smi"),
        ({"count": 999}, "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_fault(eight_gpus, driver, words):
    eight_gpus.driver(**driver)
    with pytest.raises(NoGpusError, match=words) as caught:
        GpuReader(host="node1")
    assert caught.value.is_fault
    with pytest.raises(NoGpusError, match=words) as caught:
        gpu_capabilities()
    assert caught.value.is_fault


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import time; time.sleep(600)", RefocusedError, r"not answer within 1 s.*run\.device=cpu"),
        ("import os; os.abort()", NoGpusError, "exited with -6"),
    ],
)
def test_a_driver_that_hangs_or_crashes_harms_its_own_process_alone(
    monkeypatch, program, kind, words
):
    monkeypatch.setattr(gpu_reader, "QUERY", [sys.executable, "-c", program])
    monkeypatch.setattr(gpu_reader, "LIMIT_SECONDS", 1.0)
    with pytest.raises(kind, match=words):
        gpu_capabilities()


def test_a_machine_without_a_driver_has_no_gpus_and_no_fault():
    program = (
        "import pynvml, refocused.monitor.sampler.gpu_reader as gpu\n"
        "pynvml.CDLL = lambda name: (_ for _ in ()).throw(OSError(name))\n"
        "try: gpu.GpuReader(host='here')\n"
        "except gpu.NoGpusError as error: print(error.is_fault, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("False This machine has no NVIDIA driver")
    assert gpu_capabilities() == []
