import os
import types

import psutil
import pytest

from refocused.monitor.sampler import machine_readings
from refocused.monitor.sampler.machine_readings import SystemReader
from refocused.system.hardware import FreeMemory, memory_now

MB = 10**6


def test_rates_are_since_the_last_reading(tmp_path, monkeypatch):
    def moved(received_mb, sent_mb):
        return types.SimpleNamespace(bytes_recv=received_mb * MB, bytes_sent=sent_mb * MB)

    disk = types.SimpleNamespace(read_bytes=0, write_bytes=0)
    network = {name: moved(0, 0) for name in ("lo", "eth0", "eth1")}
    monkeypatch.setattr(psutil, "disk_io_counters", lambda nowrap: disk)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic, nowrap: network)
    times = iter([100.0, 102.0, 106.0, 108.0])
    reader = SystemReader(tmp_path, host="here", clock=lambda: next(times))
    disk.read_bytes, disk.write_bytes = 8 * MB, 20 * MB
    network |= {"lo": moved(99, 99), "eth0": moved(2, 4), "eth1": moved(2, 0)}
    first, second = reader.sample(), reader.sample()
    assert (first.disk_read_mb_per_second, first.disk_written_mb_per_second) == (4, 10)
    assert first.network_received_mb_per_second == 2
    assert first.network_sent_mb_per_second == 2
    assert second.disk_written_mb_per_second == 0
    del network["eth1"]  # a device that has gone gives no rate
    monkeypatch.setattr(psutil, "disk_io_counters", lambda nowrap: None)
    third = reader.sample()
    assert third.network_received_mb_per_second is third.disk_read_mb_per_second is None


def test_figures_come_in_gigabytes_and_as_a_fraction(tmp_path, monkeypatch):
    memory = FreeMemory(total=64_250_000_000, available=48_000_000_000, swap_used=3_500_000_000)
    disk = types.SimpleNamespace(total=2_000_500_000_000, free=750_250_000_000)
    monkeypatch.setattr(machine_readings, "memory_now", lambda: memory)
    monkeypatch.setattr(machine_readings.shutil, "disk_usage", lambda path: disk)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 37.5)
    sample = SystemReader(tmp_path, host="here").sample()
    assert (sample.cpu_fraction, sample.memory_used_gb, sample.memory_total_gb) == (
        pytest.approx(0.375),
        16.25,
        64.25,
    )
    assert (sample.swap_used_gb, sample.disk_free_gb, sample.disk_total_gb) == (3.5, 750.25, 2000.5)


def test_this_machine(tmp_path):
    sample = SystemReader(tmp_path, host="here", gpus=None, gpu_note="none").sample()
    assert sample.cpu_cores == os.cpu_count()
    assert sample.cpu_fraction is not None and 0 <= sample.cpu_fraction <= 1
    assert sample.memory_total_gb is not None and sample.memory_used_gb is not None
    assert 0 < sample.memory_used_gb < sample.memory_total_gb
    assert sample.disk_free_gb is not None and sample.disk_total_gb is not None
    assert 0 < sample.disk_free_gb <= sample.disk_total_gb
    assert (sample.gpus, sample.gpu_note) == (None, "none")
    gone = SystemReader(tmp_path / "gone", host="here").sample()
    assert gone.disk_free_gb is gone.disk_total_gb is None
    memory = memory_now()
    assert 0 < memory.available < memory.total <= psutil.virtual_memory().total


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
    tmp_path, monkeypatch, groups, folder, limit, used
):
    machine = types.SimpleNamespace(total=65_536, available=61_440)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(psutil, "swap_memory", lambda: types.SimpleNamespace(used=7))
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (mount / folder).mkdir(parents=True)
    unlimited = FreeMemory(total=65_536, available=61_440, swap_used=7)
    assert memory_now(proc, mount) == unlimited
    (mount / folder / used).write_text("30720\n")
    # Page cache counts against the limit, and goes when memory is needed.
    cache = "anon 90\nactive_file 1024\ninactive_file 20480\nfile 300\n"
    (mount / folder / "memory.stat").write_text(cache)
    (mount / folder / limit).write_text("max\n")
    assert memory_now(proc, mount) == unlimited
    (mount / folder / limit).write_text("40960\n")
    assert memory_now(proc, mount) == FreeMemory(total=40_960, available=31_744, swap_used=7)
