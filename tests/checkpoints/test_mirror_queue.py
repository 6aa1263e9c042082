from __future__ import annotations

import hypothesis
from hypothesis import strategies

from refocused.checkpoints.mirror.copy_queue import MOST_BEHIND, copy_order
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import KeptStep

any_lacking = strategies.lists(
    strategies.builds(
        KeptStep,
        strategies.integers(0, 60),
        verified=strategies.just(True),
        tiers=strategies.frozensets(strategies.sampled_from(SaveReason), min_size=1),
        best=strategies.booleans(),
    ),
    unique_by=lambda step: step.step,
)


def rolling(*steps: int) -> list[KeptStep]:
    return [KeptStep(step, verified=True) for step in steps]


def test_the_newest_goes_first_by_number() -> None:
    assert copy_order(rolling(9500, 10000)).wanted == (10000, 9500)


def test_more_than_two_behind_the_old_rolling_ones_are_put_back() -> None:
    order = copy_order(
        [
            KeptStep(1, verified=True, best=True),
            KeptStep(2, verified=True, tiers=frozenset({SaveReason.EPOCH})),
            KeptStep(3, verified=True, tiers=frozenset({SaveReason.EMERGENCY})),
            *rolling(4, 5, 6),
        ]
    )
    assert (order.wanted, order.skipped) == ((6, 5, 2, 1), (4, 3))


def test_what_the_bucket_has_replaces_old_ones_too() -> None:
    order = copy_order(rolling(1, 2, 4), there=[3])
    assert (order.wanted, order.skipped) == ((4,), (2, 1))


def test_what_is_being_copied_is_finished() -> None:
    order = copy_order(rolling(1, 2, 3, 4), copying=1)
    assert (order.wanted, order.skipped) == ((1, 4, 3), (2,))


@hypothesis.given(any_lacking, strategies.sets(strategies.integers(61, 63)))
def test_the_queue_is_bounded_and_loses_nothing(lacking: list[KeptStep], there: set[int]) -> None:
    order = copy_order(lacking, there=there)
    by_step = {step.step: step for step in lacking}
    assert sorted((*order.wanted, *order.skipped)) == sorted(by_step)
    plain = [
        step
        for step in order.wanted
        if not (by_step[step].best or by_step[step].tiers & {SaveReason.EPOCH, SaveReason.FINAL})
    ]
    assert len(plain) <= max(MOST_BEHIND - len(there), 0)
    assert order.wanted == tuple(sorted(order.wanted, reverse=True))
    if lacking and not there:
        assert order.wanted[0] == max(by_step)
