from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from refocused.train.step.step_figures import Cadence


def test_things_are_due_at_their_multiples() -> None:
    cadence = Cadence(log=2, validation=3, checkpoint=5)
    steps = range(1, 11)
    assert [step for step in steps if cadence.due("log", step)] == [2, 4, 6, 8, 10]
    assert [step for step in steps if cadence.due("validation", step)] == [3, 6, 9]
    assert [step for step in steps if cadence.due("checkpoint", step)] == [5, 10]


def test_zero_is_never() -> None:
    cadence = Cadence(log=0, validation=0, checkpoint=0)
    assert not any(
        cadence.due(what, step) for step in range(20) for what in ("log", "validation", "sample")
    )
    assert cadence.ahead(3, 10)["save"] == 1  # the last step


@given(
    step=st.integers(1, 60),
    more=st.integers(0, 60),
    interval=st.integers(0, 20),
    saves=st.integers(0, 20),
    save_best=st.booleans(),
)
def test_what_is_ahead_is_what_the_loop_will_do(
    step: int, more: int, interval: int, saves: int, save_best: bool
) -> None:
    total = step + more
    cadence = Cadence(log=1, validation=interval, checkpoint=saves, save_best=save_best)
    to_come = range(step, total + 1)  # a step's validation and save come after its log line
    validations = [one for one in to_come if one == total or cadence.due("validation", one)]
    saved = {one for one in to_come if one == total or cadence.due("checkpoint", one)}
    ahead = cadence.ahead(step, total)
    assert ahead["step"] == more
    assert ahead["validation"] == len(validations)
    assert ahead["save"] == len(saved | set(validations) if save_best else saved)


def test_a_save_says_what_it_is_for() -> None:
    cadence = Cadence(log=1, validation=0, checkpoint=5, keep_epochs=True)

    def reasons(step: int, **facts: bool) -> list[str]:
        given = {"last": False, "epoch_ended": False, "is_best": False, "stopping": False} | facts
        return [tier.value for tier in cadence.reasons_to_save(step, **given)]

    assert reasons(4) == []
    assert reasons(5) == ["rolling"]
    assert reasons(5, epoch_ended=True, last=True) == ["rolling", "epoch", "final"]
    assert reasons(4, is_best=True) == []
    assert reasons(4, stopping=True) == ["emergency"]
    assert reasons(5, stopping=True) == ["rolling"]  # it would have been saved anyway


def test_the_end_of_an_epoch_is_saved_only_when_that_is_wanted() -> None:
    cadence = Cadence(log=1, validation=0, checkpoint=5)
    assert (
        cadence.reasons_to_save(4, last=False, epoch_ended=True, is_best=False, stopping=False)
        == ()
    )
