from __future__ import annotations

import math

import hypothesis
from hypothesis import strategies

from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import EMERGENCIES, KeptStep, best_of, to_remove

flags = strategies.booleans()
any_steps = strategies.lists(
    strategies.builds(
        KeptStep,
        strategies.integers(0, 60),
        verified=flags,
        tiers=strategies.frozensets(strategies.sampled_from(SaveReason), min_size=1),
        mirrored=strategies.sampled_from([True, False, None]),
        skipped=flags,
        best=flags,
        in_use=flags,
    ),
    unique_by=lambda step: step.step,
)


def plain(*steps: int, mirrored: bool | None = None) -> list[KeptStep]:
    return [KeptStep(step, verified=True, mirrored=mirrored) for step in steps]


def labelled(step: int, *tiers: SaveReason) -> KeptStep:
    return KeptStep(step, verified=True, tiers=frozenset(tiers))


def test_the_newest_by_number_stay() -> None:
    assert to_remove(plain(9500, 10000, 9000, 8500), keep=2) == [8500, 9000]


def test_two_stay_whatever_is_asked() -> None:
    assert to_remove(plain(1, 2, 3), keep=0) == [1]


def test_best_final_epoch_used_and_unmirrored_steps_stay() -> None:
    old = [
        KeptStep(1, verified=True, mirrored=True, best=True),
        labelled(2, SaveReason.FINAL),
        KeptStep(3, verified=True, mirrored=True, in_use=True),
        KeptStep(4, verified=True, mirrored=False),
        KeptStep(5, verified=True, mirrored=True),
        labelled(6, SaveReason.ROLLING, SaveReason.EPOCH),
    ]
    assert to_remove(old + plain(7, 8, mirrored=True), keep=2) == [5]


def test_only_rolling_steps_count_among_those_kept_by_number() -> None:
    steps = [*plain(1, 2, 3), labelled(4, SaveReason.EMERGENCY), labelled(5, SaveReason.FINAL)]
    assert to_remove(steps, keep=2) == [1]


def test_an_old_emergency_goes_once_a_newer_one_is_there() -> None:
    steps = [labelled(step, SaveReason.EMERGENCY) for step in (1, 3, 5)]
    assert to_remove([*steps, *plain(6, 7)], keep=2) == [1, 3]
    assert to_remove([*steps[:2], *plain(2)], keep=2) == [1]  # of the newest two it is one


def test_a_full_disk_takes_what_the_mirror_lacks_only_behind_what_it_has() -> None:
    steps = [
        *plain(1, mirrored=False),
        *plain(2, mirrored=True),
        *plain(3, 4, 5, 6, mirrored=False),
    ]
    assert to_remove(steps, keep=2) == [2]
    assert to_remove(steps, keep=2, disk_low=True) == [1, 2]


def test_a_full_disk_takes_what_the_mirror_itself_puts_back() -> None:
    steps = [
        KeptStep(step, verified=True, mirrored=False, skipped=step < 4) for step in range(1, 6)
    ]
    assert to_remove(steps, keep=2) == []
    assert to_remove(steps, keep=2, disk_low=True) == [1, 2, 3]


def test_a_broken_step_does_not_count_among_the_kept() -> None:
    steps = [*plain(1, 2, 3), KeptStep(4, verified=False), KeptStep(0, verified=False)]
    assert to_remove(steps, keep=2) == [0, 1]


def test_nothing_goes_while_fewer_than_two_are_good() -> None:
    assert to_remove([*plain(3), KeptStep(1, verified=False)], keep=2) == []


@hypothesis.given(any_steps, strategies.integers(0, 8), flags)
def test_what_must_stay_stays(steps: list[KeptStep], keep: int, low: bool) -> None:
    gone = set(to_remove(steps, keep=keep, disk_low=low))
    good = sorted(step.step for step in steps if step.verified)
    newest_mirrored = max((s.step for s in steps if s.verified and s.mirrored), default=-1)
    for step in steps:
        if step.best or step.in_use or step.tiers & {SaveReason.EPOCH, SaveReason.FINAL}:
            assert step.step not in gone
        if step.mirrored is False and step.step in gone:
            assert low
            assert step.skipped or step.step < newest_mirrored
        if SaveReason.EMERGENCY in step.tiers and step.verified and step.step in gone:
            assert any(newer > step.step for newer in good)
    rolling = sorted(s.step for s in steps if s.verified and SaveReason.ROLLING in s.tiers)
    assert not gone & {*good[-2:], *(rolling[-keep:] if keep else [])}
    assert len(set(good) - gone) >= min(2, len(good))


@hypothesis.given(any_steps, strategies.integers(0, 8), flags)
def test_what_remains_is_stable_and_bounded(steps: list[KeptStep], keep: int, low: bool) -> None:
    gone = set(to_remove(steps, keep=keep, disk_low=low))
    rest = [step for step in steps if step.step not in gone]
    assert to_remove(rest, keep=keep, disk_low=low) == []
    free = [
        step
        for step in rest
        if step.verified
        and not (step.best or step.in_use or step.tiers & {SaveReason.EPOCH, SaveReason.FINAL})
        and step.mirrored is not False
    ]
    assert len(free) <= max(keep, 0) + EMERGENCIES + 2


def test_the_best_is_the_first_with_the_lowest_finite_loss() -> None:
    losses = {10: math.nan, 20: 2.0, 30: None, 40: 1.5, 50: 1.5, 60: math.inf}
    assert best_of(losses) == 40
    assert best_of({10: math.nan, 20: None}) is None
