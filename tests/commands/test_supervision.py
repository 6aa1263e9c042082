from __future__ import annotations

from typing import Any

import pytest

from refocused.commands.supervision import (
    HURRIED_SECONDS,
    LAST_RANKS_SECONDS,
    Sight,
    Verdict,
    alarm_line,
    judge,
    may_restart,
    patience_ends,
)
from refocused.system.errors import ExitCode
from refocused.system.processes import ProcessIdentity
from refocused.train.lifecycle.launch_session import RankNote


@pytest.mark.parametrize(
    ("sight", "ends"),
    [
        (Sight(), None),
        (Sight(signals=(100.0,)), 400.0),
        (Sight(signals=(100.0, 110.0)), 110.0 + HURRIED_SECONDS),
        (Sight(signals=(100.0, 395.0)), 400.0),  # a second one never gives more time
        (Sight(signals=(100.0, 110.0, 111.0)), 111.0),
        (Sight(abandoned=50.0), 350.0),
        (Sight(rank_ended=50.0), 50.0 + LAST_RANKS_SECONDS),
        (Sight(signals=(100.0,), rank_ended=120.0), 120.0 + LAST_RANKS_SECONDS),
    ],
)
def test_patience_ends_with_what_was_seen(sight: Sight, ends: float | None) -> None:
    assert patience_ends(sight, grace_seconds=300.0) == ends


def note(rank: int, **facts: Any) -> RankNote:
    process = ProcessIdentity(pid=1, started=1)
    return RankNote(**{"rank": rank, "process": process, "run": "r", "training": True} | facts)


def judged(
    *notes: RankNote, launcher: int = 1, signals: int = 0, killed: bool = False
) -> tuple[int, bool, str]:
    verdict = judge(notes, launcher_code=launcher, signals=signals, killed=killed)
    return verdict.code, verdict.crashed, verdict.text


@pytest.mark.parametrize("code", [0, 2, 4, 5, 130])
def test_what_rank_0_ended_with_is_the_truth(code: int) -> None:
    notes = note(0, exit_code=code), note(1, exit_code=code)
    for launcher in (0, 1, code):
        assert judged(*notes, launcher=launcher) == (code, False, "")
    assert judged(*notes, signals=1, killed=True) == (code, False, "")


def test_a_failure_that_was_said_needs_no_more_words() -> None:
    assert judged(note(0, exit_code=1), note(1, exit_code=1)) == (1, True, "")


def test_ranks_that_said_nothing_were_killed() -> None:
    code, crashed, text = judged(note(0, exit_code=1), note(1), launcher=256 - 9)
    assert (code, crashed) == (1, True)
    assert text.startswith("Rank 1 was killed by SIGKILL, most often for want of memory")
    *_, text = judged(note(0), note(1), launcher=256 - 11)
    assert text.startswith("Ranks 0, 1 were killed by SIGSEGV; what it said")
    *_, text = judged(note(0), note(1, exit_code=1), launcher=1)
    assert text.startswith("Rank 0 was killed, most often")


def test_the_end_of_the_launcher_is_a_crash_that_was_saved() -> None:
    gone = note(0, exit_code=130, reason="PARENT_GONE"), note(1, exit_code=130)
    assert judged(*gone, launcher=-9) == (130, True, "")
    assert judged(*gone, launcher=-15, signals=1) == (130, False, "")


def test_before_training_a_stop_loses_nothing() -> None:
    code, crashed, text = judged(note(0, training=False), note(1, training=False), signals=1)
    assert (code, crashed) == (130, False)
    assert "before training began" in text
    assert judged(signals=1)[0] == 130


def test_a_stop_that_was_not_saved_is_a_failure_and_no_crash() -> None:
    code, crashed, text = judged(note(0), note(1), signals=1, killed=True)
    assert (code, crashed) == (1, False)
    assert text.startswith("Ranks 0, 1 ended unsaved")


@pytest.mark.parametrize(("launcher", "code"), [(0, 0), (2, 2), (1, 1), (-9, 1)])
def test_without_ranks_the_launcher_is_believed(launcher: int, code: int) -> None:
    found, crashed, text = judged(launcher=launcher)
    assert (found, crashed) == (code, False)
    assert bool(text) is (code == 1)


@pytest.mark.parametrize(
    ("crashed", "allowed", "fruitless", "again"),
    [
        (True, 0, 0, False),
        (True, 2, 0, True),
        (True, 2, 2, True),
        (True, 2, 3, False),
        (False, 2, 0, False),
    ],
)
def test_only_a_crash_starts_again_and_not_forever(
    crashed: bool, allowed: int, fruitless: int, again: bool
) -> None:
    verdict = Verdict(ExitCode.FAILED, crashed=crashed)
    assert may_restart(verdict, allowed=allowed, fruitless=fruitless) is again


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "WARN  GPU 5 is hot"),
        ({"severity": "critical"}, "ALARM GPU 5 is hot"),
        ({"raised": False}, None),
        ({"kind": "save"}, None),
        ({"alarm": "budget_80"}, None),
    ],
)
def test_alarms_that_begin_are_told(changes: dict[str, Any], line: str | None) -> None:
    alarm = {"kind": "alarm", "alarm": "gpu_temperature", "raised": True, "severity": "warning"}
    assert alarm_line({**alarm, "text": "GPU 5 is hot", **changes}) == line
