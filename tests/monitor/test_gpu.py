from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from nvml_machine import GIB, Machine, uuid

from refocused.monitor.sampler.gpu_reader import SLOW_SECONDS, GpuReader, NoGpusError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(eight_gpus: Machine, clock: Clock) -> Iterator[GpuReader]:
    opened = GpuReader(host="node1", ranks=8, clock=clock)
    yield opened
    opened.close()


def test_a_healthy_gpu(reader: GpuReader) -> None:
    sample = reader.samples()[3]
    assert (sample.host, sample.index, sample.local_rank) == ("node1", 3, 3)
    assert (sample.uuid, sample.name) == (uuid(3), "NVIDIA H100 80GB HBM3")
    assert sample.utilization_fraction == 0.97
    assert (sample.memory_used_gib, sample.memory_total_gib) == (48, 80)
    assert (sample.temperature_celsius, sample.slowdown_celsius) == (61, 87)
    assert sample.memory_temperature_celsius == 70
    assert (sample.power_watts, sample.power_limit_watts) == (640.5, 700)
    assert (sample.sm_clock_mhz, sample.sm_clock_max_mhz) == (1755, 1980)
    assert sample.memory_clock_mhz == 2619
    assert (sample.ecc_corrected, sample.ecc_uncorrected) == (0, 0)
    assert (sample.remapped_rows, sample.remap_pending, sample.remap_failed) == (0, False, False)
    assert (sample.nvlinks_active, sample.nvlinks_total, sample.nvlink_errors) == (18, 18, 0)
    assert (sample.pcie_generation, sample.pcie_width, sample.pcie_replays) == (5, 16, 0)
    assert (sample.pcie_generation_max, sample.pcie_width_max) == (5, 16)
    assert sample.mig is False
    assert sample.processes == {4711: 47.0}


def test_the_power_limit_is_no_throttling(reader: GpuReader) -> None:
    sample = reader.samples()[0]
    assert sample.clock_event_bits == 0x4
    assert sample.throttle_reasons == ()


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x8, ("hw_slowdown",)),
        (0x20, ("sw_thermal",)),
        (0x44, ("hw_thermal",)),
        (0x80, ("hw_power_brake",)),
        (0x1 | 0x2 | 0x10 | 0x100, ()),
        (0xFF, ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")),
    ],
)
def test_reasons_to_throttle(
    eight_gpus: Machine, reader: GpuReader, bits: int, names: tuple[str, ...]
) -> None:
    eight_gpus.gpu(5, clock_events=bits)
    assert reader.samples()[5].throttle_reasons == names
    assert reader.samples()[4].throttle_reasons == ()


def test_errors_of_the_memory(eight_gpus: Machine, reader: GpuReader) -> None:
    eight_gpus.gpu(
        2,
        ecc_corrected=12,
        ecc_uncorrected=3,
        remapped_corrected=1,
        remapped_uncorrected=2,
        remap_pending=1,
        remap_failed=1,
    )
    sample = reader.samples()[2]
    assert (sample.ecc_corrected, sample.ecc_uncorrected, sample.remapped_rows) == (12, 3, 3)
    assert sample.remap_pending
    assert sample.remap_failed


def test_a_gpu_that_is_lost_is_still_known(eight_gpus: Machine, reader: GpuReader) -> None:
    assert reader.samples()[7].pcie_width == 16
    eight_gpus.gpu(7, lost=1)
    *others, lost = reader.samples()
    assert lost.lost
    assert (lost.uuid, lost.name, lost.local_rank) == (uuid(7), "NVIDIA H100 80GB HBM3", 7)
    assert lost.temperature_celsius is lost.processes is lost.utilization_fraction is None
    assert not any(sample.lost for sample in others)
    eight_gpus.gpu(7, lost=0, pcie_width=8)
    back = reader.samples()[7]
    assert (back.lost, back.pcie_width) == (False, 8)  # what rarely changes is asked anew


def test_a_gpu_that_was_lost_before_does_not_hide_whose_the_others_are(eight_gpus: Machine) -> None:
    eight_gpus.gpu(0, gone=1)
    first, second, *_ = GpuReader(host="node1", ranks=8).samples()
    assert first.lost
    assert first.uuid is None
    assert (second.index, second.local_rank, second.lost) == (1, 1, False)


@pytest.mark.parametrize(
    ("fact", "fields"),
    [
        ("utilization", ["utilization_fraction"]),
        ("memory_used", ["memory_used_gib", "memory_total_gib"]),
        ("temperature", ["temperature_celsius"]),
        ("slowdown", ["slowdown_celsius"]),
        ("power", ["power_watts"]),
        ("power_limit", ["power_limit_watts"]),
        ("sm_clock", ["sm_clock_mhz"]),
        ("clock_events", ["clock_event_bits", "throttle_reasons"]),
        ("ecc_corrected", ["ecc_corrected"]),
        ("ecc_uncorrected", ["ecc_uncorrected"]),
        ("remapped_corrected", ["remapped_rows", "remap_pending", "remap_failed"]),
        ("pcie_replays", ["pcie_replays"]),
        ("mig", ["mig"]),
        ("field_82", ["memory_temperature_celsius"]),
    ],
)
def test_what_is_not_supported_is_unknown_and_hides_nothing_else(
    eight_gpus: Machine, fact: str, fields: list[str]
) -> None:
    def unknown() -> set[str]:
        sample = GpuReader(host="node1", ranks=8).samples()[1]
        return {name for name in sample.__slots__ if getattr(sample, name) is None}

    before = unknown()
    eight_gpus.gpu(1, **{fact: None})
    assert unknown() - before == set(fields)


def test_what_rarely_changes_is_asked_rarely(
    eight_gpus: Machine, reader: GpuReader, clock: Clock
) -> None:
    reader.samples()
    eight_gpus.gpu(2, remap_pending=1, field_165_0=0, temperature=70)
    clock.now += SLOW_SECONDS - 1
    early = reader.samples()[2]
    clock.now += 1
    late = reader.samples()[2]
    assert (early.remap_pending, early.nvlinks_active, early.temperature_celsius) == (False, 18, 70)
    assert (late.remap_pending, late.nvlinks_active) == (True, 17)


def test_a_card_without_nvlink(eight_gpus: Machine) -> None:
    eight_gpus.gpu(0, field_91=None)
    sample = GpuReader(host="node1").samples()[0]
    assert sample.nvlinks_total is sample.nvlinks_active is sample.nvlink_errors is None
    assert sample.memory_temperature_celsius == 70


def test_traffic_and_errors_of_nvlink(eight_gpus: Machine, reader: GpuReader, clock: Clock) -> None:
    assert reader.samples()[0].nvlink_sent_gib_per_second is None
    gib_in_kib = 2**20
    eight_gpus.gpu(
        0, field_138=90 * gib_in_kib, field_139=60 * gib_in_kib, field_52=2, field_59=1,
        field_165_4=0,
    )  # fmt: skip
    clock.now += SLOW_SECONDS
    sample = reader.samples()[0]
    assert sample.nvlink_sent_gib_per_second == 3
    assert sample.nvlink_received_gib_per_second == 2
    assert sample.nvlink_errors == 3
    assert (sample.nvlinks_active, sample.nvlinks_total) == (17, 18)


def test_a_counter_that_began_anew_gives_no_rate(
    eight_gpus: Machine, reader: GpuReader, clock: Clock
) -> None:
    eight_gpus.gpu(0, field_138=500)
    reader.samples()
    eight_gpus.gpu(0, field_138=100)
    clock.now += SLOW_SECONDS
    assert reader.samples()[0].nvlink_sent_gib_per_second is None


def test_memory_of_a_process_that_is_not_told(eight_gpus: Machine, reader: GpuReader) -> None:
    eight_gpus.gpu(0, process=f"17 {pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value}")
    eight_gpus.gpu(1, process=None)
    eight_gpus.gpu(2, process=f"17 {GIB // 2}")
    found = [sample.processes for sample in reader.samples()[:3]]
    assert found == [{17: None}, {}, {17: 0.5}]


def test_the_ranks_gpus_by_cuda_visible_devices(eight_gpus: Machine) -> None:
    visible = f"{uuid(6)},2"
    reader = GpuReader(host="node1", visible=visible, ranks=2)
    owners = {sample.index: sample.local_rank for sample in reader.samples()}
    assert {index: rank for index, rank in owners.items() if rank is not None} == {6: 0, 2: 1}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Restart the machine"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "kernel module is not loaded"),
        (pynvml.NVML_ERROR_UNKNOWN, "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_fault(
    eight_gpus: Machine, code: int, words: str
) -> None:
    eight_gpus.driver(init=code)
    with pytest.raises(NoGpusError, match=words) as caught:
        GpuReader(host="node1")
    assert caught.value.is_fault


def test_a_driver_that_cannot_count_is_a_fault(eight_gpus: Machine) -> None:
    eight_gpus.driver(count=999)
    with pytest.raises(NoGpusError, match="nvidia-smi") as caught:
        GpuReader(host="node1")
    assert caught.value.is_fault


def test_a_machine_without_a_driver_has_no_gpus_and_no_fault(tmp_path: Path) -> None:
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
