"""Retention: the choice, and the removal from the disk and from a bucket."""

import contextlib
import fcntl
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import copied, make_step, summary
from fakes import Emulator
from hypothesis import strategies

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints, RemoteRetention
from refocused.checkpoints.step import retention
from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    in_use,
    saved_steps,
)
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import MirroredCheckpoints, disk_is_low, prune, to_remove
from refocused.checkpoints.step.staging import remove_checkpoint, write_manifest
from refocused.checkpoints.step.verify import WHOLE, CheckpointState
from refocused.system.world import World

States = dict[int, CheckpointState]
flags = strategies.booleans()
any_states = strategies.dictionaries(
    strategies.integers(0, 60),
    strategies.builds(
        CheckpointState,
        strategies.sampled_from([WHOLE, "node 1 of 2: its part", "broken: x", "unreadable: x"]),
        strategies.builds(
            lambda reasons, loss: summary(*reasons, loss=loss),
            strategies.frozensets(strategies.sampled_from(SaveReason), min_size=1),
            strategies.sampled_from([None, 1.0, 2.0, math.nan]),
        ),
        in_use=flags,
        mirrored=strategies.sampled_from([True, False, None]),
        skipped=flags,
    ),
)


def plain(*steps: int, **state: Any) -> States:
    return {step: CheckpointState(WHOLE, **{"manifest": summary(), **state}) for step in steps}


def labelled(step: int, *reasons: SaveReason) -> States:
    return plain(step, manifest=summary(*reasons))


def emergencies(*steps: int) -> States:
    return plain(*steps, manifest=summary(SaveReason.EMERGENCY))


OLD = {
    **plain(1, manifest=summary(loss=1.0), mirrored=True),
    **labelled(2, SaveReason.FINAL),
    **plain(3, mirrored=True, in_use=True),
    **plain(4, mirrored=False),
    **plain(5, 7, 8, mirrored=True),
    **labelled(6, SaveReason.ROLLING, SaveReason.EPOCH),
}
BEHIND = {**plain(1, 3, 4, 5, 6, mirrored=False), **plain(2, mirrored=True)}
PUT_BACK = {**plain(1, 2, 3, mirrored=False, skipped=True), **plain(4, 5, mirrored=False)}
BY_NUMBER = {**plain(1, 2, 3), **emergencies(4), **labelled(5, SaveReason.FINAL)}
BROKEN = {**plain(1, 2, 3), **dict.fromkeys((0, 4), CheckpointState("broken: x"))}
TOO_FEW = {**plain(3), 1: CheckpointState("broken: x")}
CHOICES: dict[str, tuple[States, list[int], list[int]]] = {
    "the newest by number stay": (plain(9500, 10000, 9000, 8500), [8500, 9000], [8500, 9000]),
    "best, final, epoch, used and unmirrored stay": (OLD, [5], [4, 5]),
    "only rolling steps count among those kept by number": (BY_NUMBER, [1], [1]),
    "only the newest emergency stays": ({**emergencies(1, 3, 5), **plain(6, 7)}, [1, 3], [1, 3]),
    "on a full disk what the mirror lacks goes behind what it has": (BEHIND, [2], [1, 2]),
    "on a full disk what the mirror puts back goes": (PUT_BACK, [], [1, 2, 3]),
    "a broken step does not count": (BROKEN, [0, 1], [0, 1]),
    "nothing goes while fewer than two are good": (TOO_FEW, [], []),
}


@pytest.mark.parametrize(("states", "gone", "gone_when_low"), CHOICES.values(), ids=CHOICES)
def test_which_are_removed(states: States, gone: list[int], gone_when_low: list[int]) -> None:
    assert to_remove(states, keep=2) == gone
    assert to_remove(states, keep=2, disk_low=True) == gone_when_low


@hypothesis.given(any_states, strategies.integers(0, 8), flags)
def test_which_are_kept(states: States, keep: int, low: bool) -> None:
    gone = set(to_remove(states, keep=keep, disk_low=low))
    good = sorted(step for step, state in states.items() if state.state[:2] in ("ok", "no"))
    reasons = {step: {*state.manifest.tiers} for step, state in states.items() if state.manifest}
    losses = [
        (state.manifest.validation_loss, step)
        for step, state in states.items()
        if step in good and state.manifest and (state.manifest.validation_loss or 9) < 9
    ]
    assert not gone & {step for _, step in sorted(losses)[:1]}
    newest_mirrored = max((step for step in good if states[step].mirrored), default=-1)
    for step, state in states.items():
        if state.in_use or reasons[step] & {SaveReason.EPOCH, SaveReason.FINAL}:
            assert step not in gone
        if state.mirrored is False and step in gone:
            assert low
            assert state.skipped or step < newest_mirrored
        if SaveReason.EMERGENCY in reasons[step] and step in good and step in gone:
            assert any(newer > step for newer in good)
    rolling = [step for step in good if SaveReason.ROLLING in reasons[step]]
    assert not gone & {*good[-2:], *(rolling[-keep:] if keep else [])}
    rest = {step: state for step, state in states.items() if step not in gone}
    assert to_remove(rest, keep=keep, disk_low=low) == []  # stable


def named(*steps: int) -> list[str]:
    return [f"checkpoint_step_{step}" for step in steps]


def thinned(folder: Path) -> list[str]:
    return prune(folder, World(), keep=2)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        make_step(tmp_path, step)
    return tmp_path


def test_a_checkpoint_of_an_unknown_version_is_kept(three: Path) -> None:
    """Regression: it counted as broken and was removed."""
    old = make_step(three, 5)
    write_manifest(old.path, old.manifest.model_copy(update={"schema_version": 99}))
    assert thinned(three) == named(10)


def test_a_late_reader_keeps_its_checkpoint(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = contextlib.ExitStack()

    def come(*_: object, **__: object) -> list[int]:
        readers.enter_context(in_use(three / "checkpoint_step_10"))
        return [10]

    monkeypatch.setattr(retention, "to_remove", come)
    thinned(three)
    assert saved_steps(three) == [10, 20, 30]
    readers.close()


def test_a_checkpoint_removed_before_the_lock_is_not_read(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = three / "checkpoint_step_10"
    monkeypatch.setattr(fcntl, "flock", lambda *_: remove_checkpoint(step))
    with pytest.raises(FileNotFoundError), in_use(step):
        pytest.fail("it is gone")


def test_mirrored_steps_are_those_of_the_status(tmp_path: Path) -> None:
    for step in range(1, 7):
        make_step(tmp_path, step)
    said = MirroredCheckpoints(mirrored=(1, 6), skipped=(3, 4), unwanted=(2,))
    for copies, low, gone in (
        (MirroredCheckpoints(), False, []),
        (said, False, [1, 2]),
        (said, True, [3, 4]),
    ):
        removed = prune(tmp_path, World(), keep=2, copies=copies, disk_low=low)
        assert removed == named(*gone)


@pytest.mark.parametrize("low", [False, True], ids=["room", "full disk"])
@pytest.mark.parametrize("has_mirror", [False, True], ids=["alone", "mirrored"])
def test_the_only_copies_of_a_branch_that_was_left_stay(
    has_mirror: bool, low: bool, tmp_path: Path
) -> None:
    branch = Branch(number=2, ancestry=((1, 20),))
    for step in (10, 20, 30, 40, 50):
        make_step(tmp_path, step)
    make_step(tmp_path, 35, branch=2, ancestry=branch.ancestry)
    make_step(tmp_path, 45, branch=2, ancestry=branch.ancestry)
    copies = (
        MirroredCheckpoints(mirrored=[10], of_other_branches=named(30, 50)) if has_mirror else None
    )
    removed = prune(tmp_path, World(), branch=branch, keep=2, copies=copies, disk_low=low)
    assert set(removed) == {*named(10), *(named(30, 50) if has_mirror else named(20))}
    assert (tmp_path / "checkpoint_step_40").exists()


def test_a_disk_is_low_below_the_room_of_two_more_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not disk_is_low(tmp_path)  # the size of a save is unknown
    size = make_step(tmp_path, 10).manifest.total_bytes
    usage = shutil.disk_usage(tmp_path)
    for saves, is_low in ((2, True), (3, False)):
        free = usage._replace(free=saves * size)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: free)
        assert disk_is_low(tmp_path) is is_low


Mirrored = Callable[..., None]


def steps_in(remote: RemoteCheckpoints) -> list[int | None]:
    return [FIRST_BRANCH.step_of(name) for name in remote.scan()]


@pytest.fixture
def mirrored(remote: RemoteCheckpoints, tmp_path: Path) -> Mirrored:
    """Save steps, and copy them to the bucket."""

    def save(*steps: int, **changes: object) -> None:
        for step in steps:
            assert copied(remote, make_step(tmp_path, step, **changes))

    return save


def test_an_abandoned_upload_is_removed(mirrored: Mirrored, remote: RemoteCheckpoints) -> None:
    mirrored(10, 20, 30, 40)
    remote.unmark("checkpoint_step_10")
    remote.unmark("checkpoint_step_40")
    retention = RemoteRetention(remote, keep=2)
    assert retention.prune(in_use=[10]) == []
    assert retention.prune() == [10]  # the newer one is kept for a rescue
    assert steps_in(remote) == [20, 30, 40]


def test_a_step_that_would_be_removed_at_once_is_unwanted(
    mirrored: Mirrored, remote: RemoteCheckpoints, bucket: FaultyBucket, tmp_path: Path
) -> None:
    mirrored(40, 50)
    kinds: dict[int, dict[str, object]] = {
        10: {"validation_loss": 1.0},
        20: {},
        30: {"tiers": ["final"]},
        60: {},
    }
    missing = {s: make_step(tmp_path, s, **changes).manifest for s, changes in kinds.items()}
    retention = RemoteRetention(remote, keep=2)
    bucket.reads.clear()
    assert retention.prune() == []
    assert retention.unwanted(missing) == {20}
    retention.states()
    assert retention.unwanted(missing) == {20}
    assert len(bucket.reads) == 4  # each manifest and marker once


@pytest.mark.bucket
def test_an_object_store_is_pruned_and_removing_twice_is_no_error(
    emulator: Emulator, tmp_path: Path
) -> None:
    bucket = open_bucket(f"{emulator.url}/mirror")
    for step in (10, 20, 30):
        assert copied(RemoteCheckpoints(bucket, "run"), make_step(tmp_path, step))
    remote = RemoteCheckpoints(bucket, "run")
    assert RemoteRetention(remote, keep=2).prune() == [10]
    remote.retract("checkpoint_step_10")
    assert steps_in(remote) == [20, 30]
