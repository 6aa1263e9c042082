"""Full disks: a failed save costs one save, several in a row the run; no half of a step stays."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import ForkedRanks, train
from ranks import metrics
from tiny import tiny_run

pytestmark = pytest.mark.slow
SETTINGS = [
    "--config",
    "tiny.yaml",
    "checkpoint.mirror=null",
    "checkpoint.interval=4",
    "evaluation.interval=0",
]
SmallDisk = Callable[[Path, int], Path]


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    """Mount disks of so many KiB at folders."""
    with contextlib.ExitStack() as stack:

        def mount(folder: Path, kib: int) -> Path:
            folder.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("a full disk is made by mounting a small tmpfs, which needs root")
            stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
            return folder

        yield mount


def fill(folder: Path) -> Path:
    """Write until the disk is full."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    return filler


def test_saves_that_keep_failing_end_the_run(tmp_path: Path, small_disk: SmallDisk) -> None:
    tiny_run(tmp_path)
    runs = small_disk(tmp_path / "runs", 1024)  # a step takes 1.7 MB
    ended = train(tmp_path, *SETTINGS, ranks=2)
    assert ended.codes == [1, 1], ended.everything
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    for step in (4, 8):
        assert f"WARN  checkpoint_step_{step} was not saved: No space left on dev" in ended.err[0]
    assert ended.err[0].count("Training goes on.") == 2
    assert ended.err[0].count("3 saves in a row have failed; the run stops") == 1
    assert ended.err[0].count("checkpoint_step_12 was not saved: No space left on device") == 1
    assert sorted(metrics(runs / "tiny")) == list(range(1, 13))
    assert not list((runs / "tiny" / "checkpoints").iterdir())


def test_a_failed_save_is_made_up_for_when_there_is_room_again(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    tiny_run(tmp_path)
    runs = small_disk(tmp_path / "runs", 16 * 1024)
    filler = fill(runs)
    with filler.open("ab") as file:
        file.truncate(15 * 1024 * 1024)  # room for what is not a step
    ranks = ForkedRanks(2, [*SETTINGS, "checkpoint.max_failed_saves=9"], folder=tmp_path)
    ranks.wait_until(lambda: "checkpoint_step_4 was not saved" in ranks.printed("err"))
    filler.unlink()
    ended = ranks.wait(60)
    assert ended.codes == [0, 0], ended.everything
    assert "save      20 local" in ended.out[0]
    assert sorted(metrics(runs / "tiny")) == list(range(1, 21))


def test_a_run_whose_last_step_is_not_saved_has_failed(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    tiny_run(tmp_path)
    small_disk(tmp_path / "runs", 1024)
    ended = train(tmp_path, *SETTINGS, "checkpoint.interval=0", "run.steps=8")
    assert ended.codes == [1], ended.everything
    assert ended.out[0].count("the last step is NOT saved (see the warnings above)") == 1


def test_a_read_only_disk_costs_the_saves_that_meet_it(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    tiny_run(tmp_path)
    checkpoints = small_disk(tmp_path / "runs" / "tiny" / "checkpoints", 65536)
    subprocess.run(["mount", "-o", "remount,ro", checkpoints], check=True)
    ranks = ForkedRanks(2, [*SETTINGS, "checkpoint.max_failed_saves=1000"], folder=tmp_path)
    try:
        ranks.wait_until(lambda: "checkpoint_step_4 was not saved" in ranks.printed("err"))
        subprocess.run(["mount", "-o", "remount,rw", checkpoints], check=True)
        ended = ranks.wait(60)
    finally:
        ranks.kill()
    assert ended.codes == [0, 0], ended.everything
    assert "checkpoint_step_4 was not saved: Read-only file system" in ended.err[0]
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    assert (checkpoints / "checkpoint_step_20" / "manifest.json").exists()


def test_a_run_folder_without_room_is_named(tmp_path: Path, small_disk: SmallDisk) -> None:
    tiny_run(tmp_path)
    fill(small_disk(tmp_path / "runs", 64))
    ended = train(tmp_path, *SETTINGS)
    assert ended.codes == [2], ended.everything
    assert ended.err[0].count("The run's folder runs/tiny cannot be written: No space left") == 1
    assert "set run.directory to a folder on another disk" in ended.err[0]
    assert "Traceback" not in ended.everything


@pytest.mark.parametrize("filled", [False, True])
def test_shards_without_room_are_named(tmp_path: Path, small_disk: SmallDisk, filled: bool) -> None:
    tiny_run(tmp_path)
    cache = small_disk(tmp_path / "cache", 16)
    if filled:
        fill(cache)
    ended = train(tmp_path, *SETTINGS)
    assert ended.codes == [1], ended.everything
    assert "Traceback" not in ended.everything
    message = "\n".join(line for line in ended.err[0].splitlines() if not line.startswith("WARN"))
    assert "cache" in message and ("No space left" in message or "are free" in message)
    assert not list((tmp_path / "cache").rglob("incoming/*/*"))
