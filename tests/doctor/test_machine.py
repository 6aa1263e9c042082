from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

import pytest

from refocused.doctor.machine import (
    EARLIEST_SECONDS,
    Disk,
    DiskNeed,
    Machine,
    folder_bytes,
    judge_clock,
    judge_disk,
    judge_machine,
    probe_disks,
    probe_machine,
)
from refocused.monitor.sampler.machine_readings import Memory

GOOD = Machine(
    cores=16,
    memory=Memory(total=10**12, available=10**11, swap_used=0),
    shm_bytes=10**10,
    open_files=(20_000, 20_000),
)
NOW = EARLIEST_SECONDS + 1e6


@pytest.mark.parametrize(
    ("change", "device", "check", "level", "words"),
    [
        ({}, "cuda", "machine", "ok", "16 cores, 100.0 GB"),
        ({"cores": 4}, "cuda", "machine", "warn", "8 ranks share the cores"),
        ({"shm_bytes": 64 * 10**6}, "cuda", "shm", "warn", "64 MB"),
        ({"shm_bytes": None}, "cuda", "shm", "fail", "NCCL"),
        ({"open_files": (256, 4096)}, "cpu", "limits", "warn", "256 files"),
        ({"open_files": (-1, -1)}, "cpu", "limits", "ok", "any number"),
    ],
)
def test_machine(
    change: dict[str, object], device: Literal["cuda", "cpu"], check: str, level: str, words: str
) -> None:
    found = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    findings = {one.check: one for one in judge_machine(found, ranks=8, device=device)}
    assert findings[check].level == level
    assert words in findings[check].text
    assert (findings[check].fix is None) == (level == "ok")


def test_small_shared_memory_is_no_matter_without_gpus() -> None:
    found = dataclasses.replace(GOOD, shm_bytes=0)
    assert "shm" not in [one.check for one in judge_machine(found, ranks=8, device="cpu")]


def test_a_limit_is_raised_no_higher_than_it_may() -> None:
    found = dataclasses.replace(GOOD, open_files=(256, 4096))
    *_, limits = judge_machine(found, ranks=1, device="cpu")
    assert limits.fix is not None and limits.fix.startswith("ulimit -n 4096,")


@pytest.mark.parametrize(
    ("ahead_s", "signs", "level"),
    [(1.0, True, "ok"), (-30.0, True, "warn"), (600.0, True, "fail"), (None, True, "warn")],
)
def test_clock(ahead_s: float | None, signs: bool, level: str) -> None:
    store = None if ahead_s is None else NOW - ahead_s
    assert judge_clock(now_s=NOW, store_s=store, signs=signs).level == level


def test_a_clock_that_was_never_set() -> None:
    assert judge_clock(now_s=1000.0, store_s=None, signs=False).level == "fail"
    assert judge_clock(now_s=NOW, store_s=None, signs=False).level == "ok"


@pytest.mark.parametrize(
    ("free_bytes", "level"), [(9 * 10**9, "fail"), (20 * 10**9, "warn"), (31 * 10**9, "ok")]
)
def test_needs_of_one_disk_count_together(free_bytes: int, level: str) -> None:
    needs = (
        DiskNeed("of checkpoints", Path("runs/a"), wanted_bytes=20 * 10**9, least_bytes=10**10),
        DiskNeed("of shards", Path("cache"), wanted_bytes=10 * 10**9, least_bytes=0),
    )
    finding = judge_disk(Disk(free_bytes, needs))
    assert finding.level == level
    assert "for runs/a, cache: 20.0 GB of checkpoints, 10.0 GB of shards" in finding.text


def test_probes_of_this_machine(tmp_path: Path) -> None:
    found = probe_machine()
    assert found.cores >= 1 and found.memory.available > 0
    needs = [DiskNeed(name, tmp_path / name / "deep", 1, 1) for name in ("a", "b")]
    (disk,) = probe_disks(needs)
    assert disk.needs == tuple(needs) and disk.free_bytes > 0


def test_a_linked_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    os.link(tmp_path / "a", tmp_path / "b")
    assert folder_bytes(tmp_path) == 5
    assert folder_bytes(tmp_path / "none") == 0
