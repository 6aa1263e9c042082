"""When a run hangs and which rank is missing: pure functions of recorded progress."""

import dataclasses
from typing import Any

import pytest

from refocused.monitor.sampler.hangs import Seen, Watch, explain, report
from refocused.monitor.sampler.watchdog import main_frames
from refocused.system.progress import LEAST_SECONDS, OTHER_SECONDS, Moment, longest_wait

STARTED = Moment(0, 0, 0, "start-up", 0, "", 0.0)


class Rank:
    """Progress of a rank, as it would note it."""

    def __init__(self):
        self.moment = STARTED

    def change(self, **facts):
        self.moment = dataclasses.replace(self.moment, changes=self.moment.changes + 1, **facts)

    def step(self):
        self.change(step=self.moment.step + 1, taken=self.moment.taken + 1, activity="step")


def training(minutes, *, steps=30, seconds=2.0):
    """A run of two ranks that has made some steps."""
    run = Run(minutes)
    for _ in range(steps):
        for rank in run.ranks.values():
            rank.step()
        run.wait(seconds)
    return run


class Run:
    def __init__(self, minutes):
        self.ranks, self.watch, self.now = {0: Rank(), 1: Rank()}, Watch(minutes), 1000.0
        self.idle = 0.0

    def wait(self, seconds, *, poll=1.0):
        """Let time pass without a change; return after how many seconds a hang is seen, else 0."""
        end = self.now + seconds
        while self.now < end:
            moments = {rank: one.moment for rank, one in self.ranks.items()}
            self.idle = self.watch.observe(moments, self.now)
            if self.idle:
                return seconds - (end - self.now)
            self.now += min(poll, end - self.now)
        return 0.0


def test_a_hang_is_seen_when_the_limit_is_over():
    assert training(None).wait(2 * LEAST_SECONDS) == pytest.approx(LEAST_SECONDS, abs=5)
    assert training(1.0).wait(100) == pytest.approx(60, abs=5)
    slow = training(None, seconds=60.0)
    assert slow.wait(1135) == 0.0  # after the 60 s of the last step
    assert slow.wait(15) > 0.0


@pytest.mark.parametrize(
    ("activity", "steps", "allowed"),
    [
        *(("step", 30, 60.0), ("step", 3, 60.0), ("step", 2, OTHER_SECONDS)),
        *(("validation", 30, 180.0), ("save", 30, OTHER_SECONDS), ("ending", 30, OTHER_SECONDS)),
    ],
)
def test_every_activity_has_its_limit(activity, steps, allowed):
    run = training(1.0, steps=steps)  # the first ones may compile
    for rank in run.ranks.values():
        rank.change(activity=activity)
    assert run.wait(allowed - 2) == 0.0
    assert 0 < run.wait(20) < 10
    for minutes in (1.0, 15.0, 600.0):  # no group of ranks gives up before the watchdog
        limits = [Watch(minutes)._limit(rank.moment) for rank in run.ranks.values()]
        assert longest_wait(minutes) > max(limits)


def test_a_rank_that_does_not_beat_is_given_no_more_time_in_a_save():
    run = training(1.0)
    for rank in run.ranks.values():
        rank.change(activity="save")
    run.ranks[1].moment = dataclasses.replace(run.ranks[1].moment, beat_seconds=1000.0)
    assert run.wait(100) == pytest.approx(60, abs=5)


def test_the_limit_is_that_of_the_rank_for_which_the_others_wait():
    run = training(1.0)
    run.ranks[1].change(activity="save", call="gather")
    assert 0 < run.wait(100) < 65
    run = training(1.0)
    run.ranks[0].change(activity="save")
    run.ranks[1].change(activity="save", call="gather")
    assert run.wait(OTHER_SECONDS - 10) == 0.0


def test_one_rank_that_goes_on_is_progress():
    run = training(1.0)
    for _ in range(200):
        run.ranks[0].change()
        assert run.wait(5) == 0.0


def test_a_machine_that_was_suspended_as_a_whole_does_not_hang():
    run = training(1.0)
    run.now += 24 * 3600
    assert run.wait(50) == 0.0
    assert run.wait(20) > 0.0


def test_batches_that_never_come_are_a_hang():
    run, began = training(1.0), 1060.0
    while not run.idle:
        for rank in run.ranks.values():
            rank.change(activity="data")  # ranks call each other meanwhile
        run.wait(2, poll=2)
    assert run.idle == pytest.approx(OTHER_SECONDS, abs=5) and run.now - began - run.idle < 5


def a_run_of_10_000_steps(chance):
    """Yield activities, for how long they last, and whether control calls go on meanwhile."""
    for step in range(1, 10_001):
        yield "data", 0.001, False
        if chance.random() < 0.002:
            yield "data", chance.uniform(1, 1800), True  # the bucket is slow, or down for a while
        yield "step", chance.lognormvariate(0, 1) if step > 2 else chance.uniform(1, 600), False
        if step % 100 == 0:
            for _ in range(20):
                yield "validation", chance.uniform(0.1, 20 if step > 100 else 300), False
        if step % 250 == 0:
            yield "save", chance.uniform(1, 1500), False


def test_ten_thousand_steps_with_validations_saves_and_slow_data_raise_no_alarm(chance):
    run, number = Run(None), 0
    for activity, seconds, calls_go_on in a_run_of_10_000_steps(chance):
        for rank in run.ranks.values():
            if activity == "step":
                rank.step()
            else:
                rank.change(activity=activity)
        for _ in range(int(seconds / 2) if calls_go_on else 0):
            run.ranks[0].change()
            assert run.wait(2, poll=2) == 0.0
        # Polls as rare as they count: the same for the policy, and ten times as fast.
        assert calls_go_on or run.wait(seconds, poll=2) == 0.0, (activity, seconds)
        number = run.ranks[0].moment.step
    assert number == 10_000


def seen(rank, *, beat=0.0, **facts):
    """A rank that waits in the same collective as the others, unless other facts are given."""
    known: dict[str, Any] = {
        **{"rank": rank, "host": f"host{rank // 4}", "pid": 100 + rank},
        "moment": Moment(20, 8, 8, "step", 5, "", beat),
        "collectives": ("gloo:all_reduce number 7 of group 0, sizes [[1]]",),
    }
    return Seen(**{**known, **facts})


BUSY: dict[str, Any] = {"collectives": ()}
OTHER: dict[str, Any] = {"collectives": ("gloo:broadcast number 6 of group 0, sizes [[1]]",)}


@pytest.mark.parametrize(
    ("odd", "cause", "missing"),
    [
        ({2: {"state": "T", **BUSY}}, "stopped", (2,)),
        ({2: {"state": "T"}, 3: BUSY}, "stopped", (2,)),  # also if it was stopped while it waited
        ({1: {"state": "D", **BUSY}, 2: {"state": "D"}}, "disk", (1, 2)),
        ({1: {"kernel": "request_wait_answer"}}, "disk", (1,)),
        ({1: {"kernel": "rpc_wait_bit_killable"}}, "disk", (1,)),
        ({3: {"beat": 5.1, **BUSY}}, "interpreter", (3,)),
        ({3: {"beat": 4.9, **BUSY}}, "busy", (3,)),
        ({3: BUSY}, "busy", (3,)),
        ({0: OTHER}, "collective", (0,)),
        ({0: OTHER, 1: OTHER, 2: OTHER}, "collective", (0, 1, 2)),
        (dict.fromkeys(range(4), OTHER), "collective", tuple(range(8))),  # nobody can tell
        ({3: {"unanswered": ("10.0.0.7",)}}, "network", ()),
        ({3: {"unanswered": ("10.0.0.7",)}, 2: BUSY}, "network", ()),  # in what is not recorded
        ({1: {"state": "T"}, 3: {"unanswered": ("10.0.0.7",)}}, "stopped", (1,)),
        ({}, "none", ()),
    ],
)
def test_the_missing_rank_is_named(odd, cause, missing):
    found = explain([seen(rank, **odd.get(rank, {})) for rank in range(8)])
    assert (found.cause, tuple(one.rank for one in found.missing)) == (cause, missing)
    assert all(f"ank {rank}" in found.text for rank in missing[:1])
    assert (cause == "network") == ("between host0 and 10.0.0.7" in found.text)


def test_the_report_groups_the_ranks_that_wait():
    ranks = [seen(rank, **({"state": "T"} if rank == 700 else {})) for rank in range(1024)]
    lines = report(ranks, explain(ranks), 62, 60, 6, "F").splitlines()
    assert "Rank 700 on host175 (process 800) is missing: it is stopped (state T" in lines[1]
    assert "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1015 more: waiting in gloo:all_reduce" in lines[2]
    assert len(lines) == 5 and len("\n".join(lines)) < 1500
    for count, words in ((9, "Ranks 0, 1, 2, 3, 4, 5, 6, 7: waiting"), (2, "Rank 0: waiting")):
        few = [seen(rank, **({"state": "T"} if rank == count - 1 else {})) for rank in range(count)]
        assert words in report(few, explain(few), 62, 60, 6, "F")


STACKS = """Current thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 331 in wait

Thread 0x00007f0000000002 (most recent call first):
  File "/venv/lib/python3.12/site-packages/torch/distributed/c10d.py", line 9 in all_reduce
  File "/home/me/refocused/train/step/loop.py", line 145 in take_step
"""


def test_frames_of_the_main_thread_are_found_in_the_stacks():
    frames = main_frames(STACKS, 0x7F0000000002)
    expected = "torch/distributed/c10d.py:9 in all_reduce", "refocused/train/step/loop.py:145"
    assert frames == (expected[0], f"{expected[1]} in take_step")
    assert ", called by ".join(frames) in seen(0, frames=frames).doing
    assert main_frames(STACKS, 1) == () and main_frames("", 1) == ()
