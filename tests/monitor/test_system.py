from __future__ import annotations

import os
import types
from pathlib import Path

import psutil
import pytest

from refocused.monitor.sampler.machine_readings import (
    Memory,
    SystemReader,
    memory_now,
    within_group,
)

MIB = 2**20


class Counters:
    """Bytes that disks and network devices have moved, as psutil gives them."""

    def __init__(self) -> None:
        self.disk: tuple[int, int] | None = (0, 0)
        self.network = {"lo": (0, 0), "eth0": (0, 0), "eth1": (0, 0)}

    def disk_io_counters(self, nowrap: bool) -> object:
        if self.disk is None:
            return None
        return types.SimpleNamespace(read_bytes=self.disk[0], write_bytes=self.disk[1])

    def net_io_counters(self, pernic: bool, nowrap: bool) -> dict[str, object]:
        return {
            name: types.SimpleNamespace(bytes_recv=received, bytes_sent=sent)
            for name, (received, sent) in self.network.items()
        }


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(psutil, "disk_io_counters", made.disk_io_counters)
    monkeypatch.setattr(psutil, "net_io_counters", made.net_io_counters)
    return made


def test_rates_since_the_last_sample(tmp_path: Path, counters: Counters) -> None:
    times = iter([100.0, 102.0, 106.0])
    reader = SystemReader(tmp_path, host="here", clock=lambda: next(times))
    counters.disk = (8 * MIB, 20 * MIB)
    counters.network = {"lo": (99, 99), "eth0": (2 * MIB, 4 * MIB), "eth1": (2 * MIB, 0)}
    first, second = reader.sample(), reader.sample()
    assert (first.disk_read_mib_per_second, first.disk_written_mib_per_second) == (4, 10)
    assert first.network_received_mib_per_second == 2
    assert first.network_sent_mib_per_second == 2
    assert second.disk_written_mib_per_second == 0


def test_a_device_that_has_gone_gives_no_rate(tmp_path: Path, counters: Counters) -> None:
    times = iter([100.0, 102.0, 104.0])
    counters.network["eth1"] = (50 * MIB, 0)
    reader = SystemReader(tmp_path, host="here", clock=lambda: next(times))
    del counters.network["eth1"]
    counters.disk = None
    sample = reader.sample()
    assert sample.network_received_mib_per_second is None
    assert sample.disk_read_mib_per_second is None


def test_this_machine(tmp_path: Path) -> None:
    sample = SystemReader(tmp_path, host="here", gpus=None, gpu_note="none").sample()
    assert sample.cpu_cores == os.cpu_count()
    assert sample.cpu_fraction is not None and 0 <= sample.cpu_fraction <= 1
    assert sample.memory_total_gib is not None and sample.memory_used_gib is not None
    assert 0 < sample.memory_used_gib < sample.memory_total_gib
    assert sample.disk_free_gib is not None and sample.disk_total_gib is not None
    assert 0 < sample.disk_free_gib <= sample.disk_total_gib
    assert (sample.gpus, sample.gpu_note) == (None, "none")


def test_a_folder_that_has_gone(tmp_path: Path) -> None:
    sample = SystemReader(tmp_path / "gone", host="here").sample()
    assert sample.disk_free_gib is sample.disk_total_gib is None


def test_the_memory_of_a_container(tmp_path: Path) -> None:
    machine = Memory(total=1000, available=700, swap_used=0)
    (tmp_path / "max").write_text("400\n")
    (tmp_path / "now").write_text("390\n")
    (tmp_path / "memory.stat").write_text("anon 90\nactive_file 100\ninactive_file 200\nfile 300")
    found = within_group(machine, tmp_path, limit="max", used="now")
    assert found == Memory(total=400, available=310, swap_used=0)


@pytest.mark.parametrize("limit", ["max\n", None])
def test_a_container_without_a_limit(tmp_path: Path, limit: str | None) -> None:
    machine = Memory(total=1000, available=700, swap_used=0)
    if limit is not None:
        (tmp_path / "max").write_text(limit)
    assert within_group(machine, tmp_path, limit="max", used="now") == machine


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "used"),
    [
        ("0::/run.slice/train.scope\n", "run.slice", "memory.max", "memory.current"),
        (
            "9:cpu:/\n4:cpuset,memory:/docker/1\n0::/\n",
            "memory/docker",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
        # Inside a container the path is the host's; the limit is at what is mounted there.
        ("0::/docker/1\n", ".", "memory.max", "memory.current"),
    ],
)
def test_the_limit_of_any_group_around_us_counts(
    tmp_path: Path, groups: str, folder: str, limit: str, used: str
) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 60 kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    (mount / folder).mkdir(parents=True)
    assert memory_now(proc, mount) == Memory(total=65_536, available=61_440, swap_used=0)
    (mount / folder / limit).write_text("40960\n")
    (mount / folder / used).write_text("10240\n")
    (mount / folder / "memory.stat").write_text("inactive_file 1024\n")
    assert memory_now(proc, mount) == Memory(total=40_960, available=31_744, swap_used=0)


def test_the_machines_own_memory() -> None:
    memory = memory_now()
    assert 0 < memory.available < memory.total <= psutil.virtual_memory().total
