from __future__ import annotations

import hypothesis
from hypothesis import strategies

from refocused.checkpoints.retention import KeptStep, to_remove

flags = strategies.booleans()
any_steps = strategies.lists(
    strategies.builds(
        KeptStep,
        strategies.integers(0, 60),
        verified=flags,
        mirrored=strategies.sampled_from([True, False, None]),
        best=flags,
        final=flags,
        in_use=flags,
    ),
    unique_by=lambda step: step.step,
)


def plain(*steps: int, mirrored: bool | None = None) -> list[KeptStep]:
    return [KeptStep(step, verified=True, mirrored=mirrored) for step in steps]


def test_the_newest_by_number_stay() -> None:
    assert to_remove(plain(9500, 10000, 9000, 8500), keep=2) == [8500, 9000]


def test_two_stay_whatever_is_asked() -> None:
    assert to_remove(plain(1, 2, 3), keep=0) == [1]


def test_best_final_used_and_unmirrored_steps_stay() -> None:
    old = [
        KeptStep(1, verified=True, mirrored=True, best=True),
        KeptStep(2, verified=True, mirrored=True, final=True),
        KeptStep(3, verified=True, mirrored=True, in_use=True),
        KeptStep(4, verified=True, mirrored=False),
        KeptStep(5, verified=True, mirrored=True),
    ]
    assert to_remove(old + plain(6, 7, mirrored=True), keep=2) == [5]


def test_a_broken_step_does_not_count_among_those_kept() -> None:
    steps = [*plain(1, 2, 3), KeptStep(4, verified=False), KeptStep(0, verified=False)]
    assert to_remove(steps, keep=2) == [0, 1]


def test_nothing_goes_while_fewer_than_two_are_good() -> None:
    assert to_remove([*plain(3), KeptStep(1, verified=False)], keep=2) == []


@hypothesis.given(any_steps, strategies.integers(0, 8))
def test_what_must_stay_stays(steps: list[KeptStep], keep: int) -> None:
    gone = set(to_remove(steps, keep=keep))
    for step in steps:
        if step.best or step.final or step.in_use or step.mirrored is False:
            assert step.step not in gone
    good = sorted(step.step for step in steps if step.verified)
    wanted = good[-max(keep, 2) :]
    assert not gone & set(wanted)
    assert all(step < min(wanted) for step in gone)


@hypothesis.given(any_steps, strategies.integers(0, 8))
def test_what_remains_is_stable_and_bounded(steps: list[KeptStep], keep: int) -> None:
    gone = set(to_remove(steps, keep=keep))
    rest = [step for step in steps if step.step not in gone]
    assert to_remove(rest, keep=keep) == []
    free = [
        step
        for step in rest
        if step.verified
        and not (step.best or step.final or step.in_use)
        and step.mirrored is not False
    ]
    assert len(free) <= max(keep, 2)
