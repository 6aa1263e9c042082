"""The phases of steps, and the slowest rank among times with simulated and recorded jitter."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from refocused.metrics.meter import MARKED_EVERY, Meter
from refocused.metrics.rank_times import WINDOW, RankTimes, find_slowest

RECORDED = Path(__file__).parent / "recorded_step_times.json"
LOG_INTERVAL = 10
STEPS = 10_000
# Shares of a rank's work outside of waits, as in a step under ZeRO-3: data, forward, backward,
# update.
SHARES = np.array([0.0, 0.3, 0.6, 0.1])
Jitter = Callable[[np.random.Generator, int, int], np.ndarray]


class Watch:
    """A clock that a test moves, and the phases of a rank's steps on it."""

    def __init__(self):
        self.now = 0.0
        self.meter = Meter(lambda: self.now)
        self.gather = self.meter.as_wait(self.spend)

    def spend(self, seconds):
        self.now += seconds

    def step(self):
        self.meter.begin_step()
        for _ in range(2):
            self.meter.begin("forward")
            self.gather(0.5)
            self.spend(1.0)
            self.meter.begin("backward")
            self.spend(2.0)
            self.gather(0.25)
        self.meter.begin("update")
        self.meter.as_wait(self.gather)(4.0)  # a wait inside another one
        self.spend(3.0)
        self.meter.end_step()
        self.spend(50.0)


def test_the_time_in_which_a_rank_waits_is_not_its_work():
    watch = Watch()
    watch.gather(1.0)  # before the first step
    for _ in range(2 * MARKED_EVERY):
        watch.step()
        watch.gather(7.0)  # of a validation
    own = [0.125, 2.0, 4.0, 3.0]
    assert watch.meter.step_phases(data_seconds=0.125) == [[*own, 5.5]] * 2
    assert watch.meter.step_phases(data_seconds=0.125) == []


def test_only_calls_in_the_queue_of_the_computation_are_waits():
    watch, computes = Watch(), True
    reduce = watch.meter.as_wait(watch.spend, if_=lambda: computes)
    for _ in range(MARKED_EVERY):
        watch.meter.begin_step()
    reduce(1.0)
    computes = False
    reduce(2.0)
    watch.meter.end_step()
    assert watch.meter.step_phases(data_seconds=0.0) == [[0.0, 2.0, 0.0, 0.0, 1.0]]


def even(draw, steps, ranks):
    """Steps of a healthy GPU, whose times vary by 1 %."""
    return 1 + 0.01 * draw.standard_normal((steps, ranks))


def noisy(draw, steps, ranks):
    return 1 + 0.02 * draw.standard_normal((steps, ranks))


def interrupted(draw, steps, ranks):
    """One step of twenty takes half as long again, in the mean."""
    longer = draw.exponential(0.5, (steps, ranks))
    return even(draw, steps, ranks) * (1 + longer * (draw.random((steps, ranks)) < 0.05))


def heavy_tailed(draw, steps, ranks):
    return 1 + 0.01 * np.abs(draw.standard_t(2, (steps, ranks)))


def drifting(draw, steps, ranks):
    """Clocks that wander by 1 %, over some ten steps."""
    pushes, wander = draw.standard_normal((steps, ranks)), np.zeros((steps, ranks))
    for step in range(1, steps):
        wander[step] = 0.9 * wander[step - 1] + 0.0044 * pushes[step]
    return even(draw, steps, ranks) + wander


@functools.cache
def recorded_times():
    """Relative work of two ranks in each step `[steps, ranks]`."""
    times = np.array(json.loads(RECORDED.read_text()), dtype=float)
    return times / np.median(times, axis=0)


def recorded(draw, steps, ranks):
    """Stretches of the recorded times as those of the measured steps, in a drawn order."""
    assert ranks == 2
    times, stretch = recorded_times(), 50
    starts = draw.integers(0, len(times) - stretch, steps // MARKED_EVERY // stretch + 1)
    places = (starts[:, None] + np.arange(stretch)).ravel()
    return np.repeat(times[places], MARKED_EVERY, axis=0)[:steps]


JITTERS: Sequence[Jitter] = (even, noisy, interrupted, heavy_tailed, drifting)
CASES = [*((jitter, ranks) for jitter in JITTERS for ranks in (2, 3, 8)), (recorded, 2)]


def lines(work, *, phases=None):
    """What is found at each log line of steps with this work `[steps, ranks]`."""
    shares = SHARES if phases is None else phases
    times, found = RankTimes(), []
    hosts = [(f"node{rank // 8}", rank % 8) for rank in range(work.shape[1])]
    waits = work.max(axis=1)[:, None] - work + 0.1
    rows = np.concatenate([work[..., None] * shares, waits[..., None]], axis=-1)
    for line in range(LOG_INTERVAL, len(work) + 1, LOG_INTERVAL):
        steps = range(line - LOG_INTERVAL + 1, line + 1)
        measured = [step - 1 for step in steps if step % MARKED_EVERY == 0]
        found.append(times.add(rows[measured].swapaxes(0, 1).tolist(), hosts)[0])
    return found


@pytest.mark.parametrize(("jitter", "ranks"), [*CASES])
def test_no_rank_is_named_in_10_000_steps_of_equal_ones(jitter, ranks):
    work = jitter(np.random.default_rng(ranks), STEPS, ranks)
    found = [one for one in lines(work) if one is not None]
    assert len(found) == STEPS // LOG_INTERVAL - 3
    assert [one for one in found if one.is_slow] == []


@pytest.mark.parametrize(("jitter", "ranks"), [*CASES])
@pytest.mark.parametrize("onset", [0, 203])
def test_a_rank_that_is_10_percent_slower_is_named_within_50_steps(jitter, ranks, onset):
    for seed in range(4):
        draw = np.random.default_rng(seed)
        work, slow = jitter(draw, onset + 50, ranks), int(draw.integers(ranks))
        work[onset:, slow] *= 1.1
        last = lines(work)[-1]
        assert last is not None
        assert (last.rank, last.is_slow) == (slow, True)
        assert (last.host, last.local_rank) == (f"node{slow // 8}", slow % 8)


def times_of(*ranks):
    """Equal steps of ranks with these seconds of data, forward, backward, update and wait."""
    return np.array([ranks] * WINDOW)


USUAL = (0.0, 0.3, 0.6, 0.1, 0.5)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([USUAL, (0.0, 0.33, 0.6, 0.1, 0.47), USUAL], {"rank": 1, "phase": "forward"}),
        ([USUAL, (0.0, 0.33, 0.66, 0.11, 0.4), USUAL], {"rank": 1, "phase": "backward"}),
        ([USUAL, (0.0, 0.3, 0.6, 0.3, 0.3), USUAL], {"rank": 1, "phase": "update"}),
        ([USUAL, (0.2, 0.3, 0.6, 0.1, 0.3), USUAL], {"rank": 1, "phase": "data"}),
        ([USUAL, (0.2, 0.33, 0.6, 0.1, 0.3), USUAL], {"rank": 1, "phase": "data"}),
        ([(0.9, *USUAL[1:])] * 3, {"is_slow": False}),  # data that come late on all ranks
        # The limit where the times do not vary.
        ([USUAL, [1.061 * n for n in USUAL], USUAL], {"limit_fraction": 0.06, "is_slow": True}),
        ([USUAL, [1.059 * n for n in USUAL], USUAL], {"limit_fraction": 0.06, "is_slow": False}),
        # The slowest of a slow machine.
        (
            [USUAL, USUAL, (0.0, 0.4, 0.6, 0.1, 0.4), (0.0, 0.5, 0.6, 0.1, 0.3)],
            {"rank": 3, "excess_fraction": 0.2},
        ),
    ],
)
def test_the_slowest_rank_and_its_phase(ranks, expected):
    found = find_slowest(times_of(*ranks))
    assert {name: getattr(found, name) for name in expected} == expected


def test_where_they_vary_a_rank_is_slow_from_two_and_a_half_deviations_on():
    # Between two steps the ranks' ratio changes by 10 %, as of four values with 5 % each.
    for factor, is_slow in ((1.2, True), (1.17, False)):
        steps = times_of(USUAL, [factor * seconds for seconds in USUAL])
        steps[::2, 1] *= np.exp(0.1)
        found = find_slowest(steps)
        assert found is not None
        assert found.limit_fraction == pytest.approx(2.5 * 1.4826 * 0.05, abs=1e-3)
        assert found.is_slow == is_slow


def test_nothing_is_said_of_a_single_rank_or_of_few_steps():
    assert find_slowest(times_of(USUAL)) is None
    assert find_slowest(times_of(USUAL, USUAL)[1:]) is None


def test_a_rank_that_recovers_is_no_longer_slow():
    work = even(np.random.default_rng(0), 200, 4)
    work[50:100, 2] *= 1.3
    slow = [one is not None and one.is_slow for one in lines(work)]
    assert (slow[:5], slow[9], slow[14:]) == ([False] * 5, True, [False] * 6)
