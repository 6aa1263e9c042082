"""What stays and what goes: the choice, and the removal from the disk and from a bucket."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import copied, make_step
from fakes import Emulator
from hypothesis import strategies

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copy_step import verify_remote
from refocused.checkpoints.mirror.remote_steps import RemoteRetention, RemoteSteps
from refocused.checkpoints.step import retention
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, saved_steps
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, SUPERSEDED, SaveReason
from refocused.checkpoints.step.retention import Copies, KeptStep, disk_is_low, thin_out, to_remove
from refocused.checkpoints.step.staging import remove_step, write_manifest
from refocused.checkpoints.step.step_directory import in_use, is_in_use
from refocused.system.errors import BucketError
from refocused.system.world import World

flags = strategies.booleans()
any_steps = strategies.lists(
    strategies.builds(
        KeptStep,
        strategies.integers(0, 60),
        verified=flags,
        reasons=strategies.frozensets(strategies.sampled_from(SaveReason), min_size=1),
        mirrored=strategies.sampled_from([True, False, None]),
        skipped=flags,
        best=flags,
        in_use=flags,
    ),
    unique_by=lambda step: step.step,
)


def plain(*steps: int, mirrored: bool | None = None, verified: bool = True) -> list[KeptStep]:
    return [KeptStep(step, verified=verified, mirrored=mirrored) for step in steps]


def labelled(step: int, *reasons: SaveReason) -> KeptStep:
    return KeptStep(step, verified=True, reasons=frozenset(reasons))


def emergencies(*steps: int) -> list[KeptStep]:
    return [labelled(step, SaveReason.EMERGENCY) for step in steps]


OLD = [
    KeptStep(1, verified=True, mirrored=True, best=True),
    labelled(2, SaveReason.FINAL),
    KeptStep(3, verified=True, mirrored=True, in_use=True),
    *plain(4, mirrored=False),
    *plain(5, 7, 8, mirrored=True),
    labelled(6, SaveReason.ROLLING, SaveReason.EPOCH),
]
BEHIND = [*plain(1, mirrored=False), *plain(2, mirrored=True), *plain(3, 4, 5, 6, mirrored=False)]
PUT_BACK = [KeptStep(s, verified=True, mirrored=False, skipped=s < 4) for s in range(1, 6)]
BY_NUMBER = [*plain(1, 2, 3), *emergencies(4), labelled(5, SaveReason.FINAL)]
BROKEN = [*plain(1, 2, 3), *plain(0, 4, verified=False)]
CHOICES: dict[str, tuple[list[KeptStep], list[int], list[int]]] = {
    "the newest by number stay": (plain(9500, 10000, 9000, 8500), [8500, 9000], [8500, 9000]),
    "best, final, epoch, used and unmirrored stay": (OLD, [5], [4, 5]),
    "only rolling steps count among those kept by number": (BY_NUMBER, [1], [1]),
    "only the newest emergency stays": ([*emergencies(1, 3, 5), *plain(6, 7)], [1, 3], [1, 3]),
    "on a full disk what the mirror lacks goes behind what it has": (BEHIND, [2], [1, 2]),
    "on a full disk what the mirror puts back goes": (PUT_BACK, [], [1, 2, 3]),
    "a broken step does not count": (BROKEN, [0, 1], [0, 1]),
    "nothing goes while fewer than two are good": ([*plain(3), *plain(1, verified=False)], [], []),
}


@pytest.mark.parametrize(("steps", "gone", "gone_when_low"), CHOICES.values(), ids=CHOICES)
def test_what_goes(steps: list[KeptStep], gone: list[int], gone_when_low: list[int]) -> None:
    assert to_remove(steps, keep=2) == gone
    assert to_remove(steps, keep=2, disk_low=True) == gone_when_low


@hypothesis.given(any_steps, strategies.integers(0, 8), flags)
def test_what_must_stay_stays(steps: list[KeptStep], keep: int, low: bool) -> None:
    gone = set(to_remove(steps, keep=keep, disk_low=low))
    good = sorted(step.step for step in steps if step.verified)
    newest_mirrored = max((s.step for s in steps if s.verified and s.mirrored), default=-1)
    for step in steps:
        if step.best or step.in_use or step.reasons & {SaveReason.EPOCH, SaveReason.FINAL}:
            assert step.step not in gone
        if step.mirrored is False and step.step in gone:
            assert low
            assert step.skipped or step.step < newest_mirrored
        if SaveReason.EMERGENCY in step.reasons and step.verified and step.step in gone:
            assert any(newer > step.step for newer in good)
    rolling = sorted(s.step for s in steps if s.verified and SaveReason.ROLLING in s.reasons)
    assert not gone & {*good[-2:], *(rolling[-keep:] if keep else [])}
    rest = [step for step in steps if step.step not in gone]
    assert to_remove(rest, keep=keep, disk_low=low) == []  # stable


def named(*steps: int) -> list[str]:
    return [f"checkpoint_step_{step}" for step in steps]


def thinned(folder: Path) -> list[str]:
    return thin_out(folder, World(), keep=2)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        make_step(tmp_path, step)
    return tmp_path


def test_a_step_that_is_read_stays_until_that_is_over(three: Path) -> None:
    with in_use(three / "checkpoint_step_10"):
        assert is_in_use(three / "checkpoint_step_10")
        assert thinned(three) == []
    assert thinned(three) == named(10)


def test_a_step_that_this_version_cannot_read_stays(three: Path) -> None:
    """Found: it counted as broken, and was removed."""
    old = make_step(three, 5)
    write_manifest(old.path, old.manifest.model_copy(update={"schema_version": 99}))
    assert thinned(three) == named(10)


def test_a_reader_that_comes_between_the_choice_and_the_removal_keeps_its_step(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = contextlib.ExitStack()

    def come(*_: object, **__: object) -> list[int]:
        readers.enter_context(in_use(three / "checkpoint_step_10"))
        return [10]

    monkeypatch.setattr(retention, "to_remove", come)
    thinned(three)
    assert saved_steps(three) == [10, 20, 30]
    readers.close()


def test_a_step_removed_before_its_reader_has_the_lock_is_not_read(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = three / "checkpoint_step_10"
    monkeypatch.setattr(fcntl, "flock", lambda *_: remove_step(step))
    with pytest.raises(FileNotFoundError), in_use(step):
        pytest.fail("it is gone")


def test_what_is_mirrored_is_what_the_mirror_says(tmp_path: Path) -> None:
    for step in range(1, 7):
        make_step(tmp_path, step)
    said = Copies(mirrored=(1, 6), skipped=(3, 4), unwanted=(2,))
    for copies, low, gone in ((Copies(), False, []), (said, False, [1, 2]), (said, True, [3, 4])):
        removed = thin_out(tmp_path, World(), keep=2, copies=copies, disk_low=low)
        assert removed == named(*gone)


def test_a_disk_is_low_below_the_room_of_two_more_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not disk_is_low(tmp_path)  # nothing is known of the size of a save
    size = make_step(tmp_path, 10).manifest.total_bytes
    usage = shutil.disk_usage(tmp_path)
    for saves, is_low in ((2, True), (3, False)):
        free = usage._replace(free=saves * size)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: free)
        assert disk_is_low(tmp_path) is is_low


Mirrored = Callable[..., None]


def steps_in(remote: RemoteSteps) -> list[int | None]:
    return [FIRST_BRANCH.step_of(name) for name in remote.scan()]


@pytest.fixture
def mirrored(remote: RemoteSteps, tmp_path: Path) -> Mirrored:
    """Save steps, and copy them to the bucket."""

    def save(*steps: int, **changes: object) -> None:
        for step in steps:
            assert copied(remote, make_step(tmp_path, step, **changes))

    return save


def test_labels_and_the_best_decide_what_stays_in_a_bucket(
    mirrored: Mirrored, remote: RemoteSteps, bucket: FaultyBucket
) -> None:
    mirrored(10, validation_loss=1.0)
    mirrored(20, tiers=["epoch"])
    mirrored(30, 40, tiers=["emergency"])
    mirrored(50, 9500, 10000, 10500)
    (bucket.steps / "checkpoint_step_10500" / SUPERSEDED).touch()  # by version 0.1
    assert RemoteRetention(remote, keep=2).thin_out() == [30, 50]
    assert steps_in(remote) == [10, 20, 40, 9500, 10000, 10500]


def test_checkpoints_of_other_branches_and_unreadable_ones_stay(
    mirrored: Mirrored, remote: RemoteSteps, bucket: FaultyBucket
) -> None:
    branch = Branch(number=2, ancestry=((1, 20),))
    mirrored(10, 20, 30, 40)
    mirrored(30, 40, branch=2, ancestry=branch.ancestry)
    (bucket.steps / "checkpoint_step_10" / "manifest.json").write_text("{")
    assert RemoteRetention(remote, branch, keep=1).thin_out() == [20]
    branches = [f"branch-2/{name}" for name in named(30, 40)]
    assert list(remote.scan()) == [*named(10, 30, 40), *branches]


def test_a_half_uploaded_step_goes_when_nobody_is_at_it(
    mirrored: Mirrored, remote: RemoteSteps
) -> None:
    mirrored(10, 20, 30, 40)
    remote.unmark("checkpoint_step_10")
    remote.unmark("checkpoint_step_40")
    keeper = RemoteRetention(remote, keep=2)
    assert keeper.thin_out(in_use=[10]) == []
    assert keeper.thin_out() == [10]  # the newer one may still be of use
    assert steps_in(remote) == [20, 30, 40]


def test_a_removal_that_ends_at_any_moment_leaves_no_marked_step_that_is_broken(
    mirrored: Mirrored, remote: RemoteSteps, bucket: FaultyBucket
) -> None:
    mirrored(10, 20, 30)
    ends = 0
    while "checkpoint_step_10" in remote.scan():
        bucket.removals_left = 2  # the marker, which may be gone, and one more
        try:
            RemoteRetention(remote, keep=2).thin_out()
        except BucketError:
            ends += 1
        for name, objects in remote.scan().items():
            if COMMITTED in objects:
                assert verify_remote(remote, name, deep=True) == []
            else:
                assert name == "checkpoint_step_10"
    assert ends > 5
    assert steps_in(remote) == [20, 30]


def test_a_local_step_that_would_be_removed_at_once_is_not_wanted(
    mirrored: Mirrored, remote: RemoteSteps, bucket: FaultyBucket, tmp_path: Path
) -> None:
    mirrored(40, 50)
    kinds: dict[int, dict[str, object]] = {
        10: {"validation_loss": 1.0},
        20: {},
        30: {"tiers": ["final"]},
        60: {},
    }
    lacking = {s: make_step(tmp_path, s, **changes).manifest for s, changes in kinds.items()}
    keeper = RemoteRetention(remote, keep=2)
    bucket.reads.clear()
    assert keeper.thin_out() == []
    assert keeper.unwanted(lacking) == {20}
    keeper.steps()
    assert keeper.unwanted(lacking) == {20}
    assert len(bucket.reads) == 2  # each manifest once


@pytest.mark.bucket
def test_an_object_store_is_thinned_out_and_removing_twice_is_no_error(
    emulator: Emulator, tmp_path: Path
) -> None:
    bucket = open_bucket(f"{emulator.url}/mirror")
    for step in (10, 20, 30):
        assert copied(RemoteSteps(bucket, "run"), make_step(tmp_path, step))
    remote = RemoteSteps(bucket, "run")
    assert RemoteRetention(remote, keep=2).thin_out() == [10]
    remote.retract("checkpoint_step_10")
    assert steps_in(remote) == [20, 30]
