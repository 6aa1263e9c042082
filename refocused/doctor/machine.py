"""The machine around the GPUs: memory, shared memory, limits, the clock, room on its disks."""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from refocused.bucket.partial_files import free_bytes
from refocused.doctor.finding import Finding, size
from refocused.monitor.sampler.machine_readings import Memory, memory_now

FEWEST_FILES = 1024
# NCCL passes data between the processes of a machine through /dev/shm, and fails where that is
# Docker's 64 MB.
LEAST_SHM_BYTES = 2**30
# A token of a Google key is refused where the clocks differ by some minutes.
REFUSED_SKEW_SECONDS = 240.0
NOTICED_SKEW_SECONDS = 5.0
EARLIEST_SECONDS = 1_735_689_600.0  # 2025: a clock before it was never set


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What there is.

    Attributes:
        cores: Processors that this process may use.
        memory: All of it, and what is left.
        shm_bytes: Room in /dev/shm; None: there is none.
        open_files: How many files a process may open, now and at most.
    """

    cores: int
    memory: Memory
    shm_bytes: int | None
    open_files: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class DiskNeed:
    """What something takes on a disk.

    Attributes:
        what: It, in words.
        folder: Where it will be.
        wanted_bytes: What all of it takes, beyond what is there already.
        least_bytes: Below this the run fails.
    """

    what: str
    folder: Path
    wanted_bytes: int
    least_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Disk:
    """The room for one or several needs.

    Attributes:
        free_bytes: What is left for us.
        needs: All that go to this disk.
    """

    free_bytes: int
    needs: tuple[DiskNeed, ...]


def probe_machine() -> Machine:
    """Look at this machine, or at the container that this runs in."""
    shm = Path("/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory=memory_now(),
        shm_bytes=free_bytes(shm) if shm.is_dir() else None,
        open_files=(soft, hard),
    )


def judge_machine(
    found: Machine, *, ranks: int, device: Literal["cuda", "cpu"]
) -> Iterator[Finding]:
    """Say what of the machine is too small for a run.

    Args:
        found: What there is.
        ranks: Processes of the run here.
        device: What it computes on.
    """
    memory = f"{found.cores} cores, {size(found.memory.available)} of memory left"
    if found.cores < ranks:
        text = f"{memory}: {ranks} ranks share the cores, and GPUs wait for their hosts"
        yield Finding("machine", "warn", text, "Take a machine with more cores.")
    else:
        yield Finding("machine", "ok", memory)
    if device == "cuda" and ranks > 1 and (found.shm_bytes or 0) < LEAST_SHM_BYTES:
        yield Finding(
            "shm",
            "fail" if not found.shm_bytes else "warn",
            f"/dev/shm has {(found.shm_bytes or 0) / 1e6:.0f} MB left, which NCCL uses between "
            "GPUs",
            "Start the container with --ipc=host or --shm-size=8g.",
        )
    yield _limits(*found.open_files)


def _limits(soft: int, hard: int) -> Finding:
    unlimited = resource.RLIM_INFINITY
    shown = "any number of" if soft == unlimited else f"{soft:,}"
    if soft != unlimited and soft < FEWEST_FILES:
        rise = "ulimit -n 65536" if hard == unlimited or hard >= 65536 else f"ulimit -n {hard}"
        text = f"a process may open {shown} files, and a rank uses up to {FEWEST_FILES:,}"
        return Finding("limits", "warn", text, f"{rise}, in the shell that starts training.")
    return Finding("limits", "ok", f"{shown} open files a process")


def judge_clock(*, now_s: float, store_s: float | None, signs: bool) -> Finding:
    """Compare this machine's clock with the store's.

    Args:
        now_s: Here, in seconds since 1970.
        store_s: There; None: it was not asked, or did not answer.
        signs: Whether the run talks to a store that looks at the time.
    """
    fix = "Set it: timedatectl set-ntp true (or chronyc makestep)."
    here = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < EARLIEST_SECONDS:
        return Finding("clock", "fail", f"it says {here}, which is long ago", fix)
    if not signs:
        return Finding("clock", "ok", here)
    if store_s is None:
        text = f"{here}; the store does not tell its own time, to compare"
        return Finding("clock", "warn", text, "See that storage.googleapis.com can be reached.")
    skew = now_s - store_s
    text = f"{abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the store's ({here} here)"
    if abs(skew) > REFUSED_SKEW_SECONDS:
        return Finding("clock", "fail", f"{text}: signed requests are refused", fix)
    if abs(skew) > NOTICED_SKEW_SECONDS:
        return Finding("clock", "warn", text, fix)
    return Finding("clock", "ok", f"{here}, as at the store")


def probe_disks(needs: Sequence[DiskNeed]) -> list[Disk]:
    """Find out which needs share a disk, and what is left there."""
    by_device: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_device.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    return [Disk(free_bytes(shared[0].folder), tuple(shared)) for shared in by_device.values()]


def judge_disk(disk: Disk) -> Finding:
    """Say whether what a run puts on a disk has room there."""
    places = ", ".join(dict.fromkeys(str(need.folder) for need in disk.needs))
    parts = ", ".join(f"{size(need.wanted_bytes)} {need.what}" for need in disk.needs)
    text = f"{size(disk.free_bytes)} free for {places}: {parts}"
    fix = (
        "Free some space, set data.disk_limit_gb or a lower checkpoint.keep, or put run.directory "
        "and data.cache on a larger disk."
    )
    if disk.free_bytes < sum(need.least_bytes for need in disk.needs):
        return Finding("disk", "fail", text, fix)
    if disk.free_bytes < sum(need.wanted_bytes for need in disk.needs):
        return Finding("disk", "warn", text, fix)
    return Finding("disk", "ok", text)


def folder_bytes(folder: Path) -> int:
    """Return what the files below a folder take; 0 where there is none."""
    found_sizes: Mapping[tuple[int, int], int] = {
        (found.st_dev, found.st_ino): found.st_size
        for path in folder.rglob("*")
        if path.is_file() and (found := path.stat())
    }
    return sum(found_sizes.values())


def _existing(folder: Path) -> Path:
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return path
