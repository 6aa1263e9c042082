"""Full disks: one failed save is skipped, several stop the run, no partial checkpoint stays."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import ForkedRanks, metrics, train
from tiny import tiny_run

pytestmark = pytest.mark.slow
SETTINGS = [
    "--config",
    "tiny.yaml",
    "checkpoint.mirror=null",
    "checkpoint.interval=4",
    "evaluation.interval=0",
]
TWO_STEPS = 4500  # KiB; a checkpoint takes 1.7 MB, and two are kept
SmallDisk = Callable[[Path, int], Path]


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    """Mount disks of so many KiB at folders."""
    with contextlib.ExitStack() as stack:

        def mount(folder: Path, kib: int) -> Path:
            folder.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("needs root, to mount a small tmpfs as a full disk")
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
    runs = small_disk(tmp_path / "runs", TWO_STEPS)
    ended = train(tmp_path, *SETTINGS, ranks=2, code=1)
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    for step in (12, 16):
        assert f"warning: checkpoint_step_{step} was not saved: " in ended.err[0]
    assert ended.err[0].count("Training goes on.") == 2
    assert ended.err[0].count("3 saves in a row have failed; the run stops") == 1
    assert ended.err[0].count("checkpoint_step_20 was not saved: ") == 1
    assert sorted(metrics(runs / "tiny")) == list(range(1, 21))
    steps = [path.name for path in (runs / "tiny" / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(steps) == ["checkpoint_step_4", "checkpoint_step_8"]


def test_a_read_only_disk_fails_only_its_saves(tmp_path: Path, small_disk: SmallDisk) -> None:
    tiny_run(tmp_path)
    checkpoints = small_disk(tmp_path / "runs" / "tiny" / "checkpoints", 65536)
    settings = [*SETTINGS, "checkpoint.max_failed_saves=1000", "run.steps=60"]
    with ForkedRanks(2, settings, folder=tmp_path) as ranks:
        ranks.wait_until(lambda: "save       4 local" in ranks.printed("out"))
        # Retry while a file is open for writing, as in a save.
        ranks.wait_until(lambda: remounted(checkpoints, "ro"))
        ranks.wait_until(lambda: "was not saved: Read-only" in ranks.printed("err"))
        assert remounted(checkpoints, "rw")
        ended = ranks.wait(60)
    assert ended.codes == [0, 0], ended.everything
    assert "Traceback" not in ended.everything and ended.err[1] == ""
    assert (checkpoints / "checkpoint_step_60" / "manifest.json").exists()


def remounted(folder: Path, how: str) -> bool:
    command = ["mount", "-o", f"remount,{how}", folder]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_run_folder_without_room_is_reported(tmp_path: Path, small_disk: SmallDisk) -> None:
    tiny_run(tmp_path)
    fill(small_disk(tmp_path / "runs", 64))
    ended = train(tmp_path, *SETTINGS, code=2)
    assert ended.err[0].count("The run's folder runs/tiny cannot be written: No space left") == 1
    assert "set run.directory to a folder on another disk" in ended.err[0]
    assert "Traceback" not in ended.everything


@pytest.mark.parametrize("filled", [False, True])
def test_shards_without_room_are_reported(
    tmp_path: Path, small_disk: SmallDisk, filled: bool
) -> None:
    tiny_run(tmp_path)
    cache = small_disk(tmp_path / "cache", 16)
    if filled:
        fill(cache)
    ended = train(tmp_path, "data.fetch_timeout_s=6", *SETTINGS, code=1)
    assert "Traceback" not in ended.everything
    message = "\n".join(
        line for line in ended.err[0].splitlines() if not line.startswith("warning: ")
    )
    assert "cache" in message and ("No space left" in message or "are free" in message)
    assert not list((tmp_path / "cache").rglob("incoming/*/*"))
