from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path

import pytest
from checkpoints.step_samples import make_step

from refocused.checkpoints.mirror.mirror_status import MirrorStatus
from refocused.checkpoints.step import retention
from refocused.checkpoints.step.branches import saved_steps
from refocused.checkpoints.step.retention import disk_is_low, local_steps, thin_out
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import in_use, is_in_use
from refocused.system.processes import this_process
from refocused.system.world import World


def there(folder: Path) -> list[int]:
    return saved_steps(folder)


def named(*steps: int) -> list[str]:
    return [f"checkpoint_step_{step}" for step in steps]


def status(**facts: tuple[int, ...]) -> MirrorStatus:
    return MirrorStatus(bucket="b", prefix="p", process=this_process(), heartbeat=0.0, **facts)


def test_labels_and_the_best_decide_what_stays(tmp_path: Path) -> None:
    make_step(tmp_path, 10, validation_loss=1.0)
    make_step(tmp_path, 20, tiers=["epoch"])
    make_step(tmp_path, 30, validation_loss=2.0)
    make_step(tmp_path, 40, tiers=["emergency"])
    for step in (50, 60, 9000, 10000):
        make_step(tmp_path, step)
    assert thin_out(tmp_path, World(), keep=2, mirrored=False, status=None) == named(30, 50, 60)
    assert there(tmp_path) == [10, 20, 40, 9000, 10000]


def test_a_step_that_is_read_stays_until_that_is_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_step(tmp_path, step)
    with in_use(tmp_path / "checkpoint_step_10"):
        assert is_in_use(tmp_path / "checkpoint_step_10")
        assert thin_out(tmp_path, World(), keep=2, mirrored=False, status=None) == []
    assert thin_out(tmp_path, World(), keep=2, mirrored=False, status=None) == named(10)


def test_a_reader_that_comes_between_the_choice_and_the_removal_keeps_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        make_step(tmp_path, step)
    readers = contextlib.ExitStack()

    def come(*_: object, **__: object) -> list[int]:
        readers.enter_context(in_use(tmp_path / "checkpoint_step_10"))
        return [10]

    monkeypatch.setattr(retention, "to_remove", come)
    thin_out(tmp_path, World(), keep=2, mirrored=False, status=None)
    assert there(tmp_path) == [10, 20, 30]
    readers.close()


def test_a_step_removed_before_its_reader_has_the_lock_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(tmp_path, 10)
    step = tmp_path / "checkpoint_step_10"
    monkeypatch.setattr(fcntl, "flock", lambda *_: remove_step(step))
    with pytest.raises(FileNotFoundError), in_use(step):
        pytest.fail("it is gone")


def test_what_is_mirrored_is_what_the_mirror_says(tmp_path: Path) -> None:
    for step in range(1, 7):
        make_step(tmp_path, step)
    said = status(mirrored=(1, 6), waiting=(5,), skipped=(3, 4), unwanted=(2,))
    steps = local_steps(tmp_path, mirrored=True, status=said)
    assert [step.mirrored for step in steps] == [True, None, False, False, False, True]
    assert [step.skipped for step in steps] == [False, False, True, True, False, False]
    assert all(not step.mirrored for step in local_steps(tmp_path, mirrored=True, status=None))
    assert thin_out(tmp_path, World(), keep=2, mirrored=True, status=None) == []
    assert thin_out(tmp_path, World(), keep=2, mirrored=True, status=said) == named(1, 2)
    assert thin_out(tmp_path, World(), keep=2, mirrored=True, status=said, disk_low=True) == named(
        3, 4
    )


def test_a_disk_is_low_below_the_room_of_two_more_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not disk_is_low(tmp_path)  # nothing is known of the size of a save
    size = make_step(tmp_path, 10).manifest.total_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * size))
    assert disk_is_low(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * size))
    assert not disk_is_low(tmp_path)
