import math
import signal
import time
from typing import Any

import pytest

from refocused.commands.launch import (
    HURRIED_SECONDS,
    LAST_RANKS_SECONDS,
    StopSignals,
    deadline,
    judge,
)
from refocused.system.processes import ProcessIdentity
from refocused.train.lifecycle.launch_session import RankNote


@pytest.mark.parametrize(
    ("signals", "facts", "ends"),
    [
        ((), {}, math.inf),
        ((100.0,), {}, 400.0),
        ((100.0, 110.0), {}, 110.0 + HURRIED_SECONDS),
        ((100.0, 395.0), {}, 400.0),  # a second one never gives more time
        ((100.0, 110.0, 111.0), {}, 111.0),
        ((), {"abandoned": 50.0}, 350.0),
        ((), {"rank_ended": 50.0}, 50.0 + LAST_RANKS_SECONDS),
        ((100.0,), {"rank_ended": 120.0}, 120.0 + LAST_RANKS_SECONDS),
    ],
)
def test_the_grace_ends_with_what_was_seen(
    signals: tuple[float, ...], facts: dict[str, float], ends: float
) -> None:
    assert deadline(signals, grace_seconds=300.0, **facts) == ends


@pytest.mark.parametrize(("pause", "counted"), [(0.29, 1), (0.31, 2)])
def test_the_two_signals_of_a_closing_terminal_count_as_one(
    pause: float, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 100.0 + pause])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    signals = StopSignals()
    signals.receive(signal.SIGINT)
    signals.receive(signal.SIGHUP)
    assert (len(signals.times), signals.times[0]) == (counted, 100.0)


def note(rank: int, exit_code: int | None = None, **facts: Any) -> RankNote:
    process = ProcessIdentity(pid=1, started=1)
    told = {"run": "r", "training": True} | facts
    return RankNote(rank=rank, process=process, exit_code=exit_code, **told)


GONE = [note(0, 130, reason="PARENT_GONE"), note(1, 130)]
WAITING = [note(0, training=False), note(1, training=False)]
CASES: list[tuple[list[RankNote], dict[str, Any], int, bool, str]] = [
    # notes, launcher code and signals, then: code, crashed, text
    ([note(0, 1), note(1, 1)], {}, 1, True, ""),  # they have said why
    (
        [note(0, 1), note(1)],
        {"launcher_code": 247},
        1,
        True,
        "Rank 1 was killed by SIGKILL, usually",
    ),
    ([note(0), note(1)], {"launcher_code": 245}, 1, True, "Ranks 0, 1 were killed by SIGSEGV; it"),
    ([note(0), note(1, 1)], {"launcher_code": 1}, 1, True, "Rank 0 was killed, usually"),
    (GONE, {"launcher_code": -9}, 130, True, ""),  # the launcher's end: a crash that was saved
    (GONE, {"launcher_code": -15, "signals": 1}, 130, False, ""),
    (WAITING, {"signals": 1}, 130, False, "Stopped before training began; nothing was changed."),
    ([note(0), note(1)], {"signals": 1}, 1, False, "Ranks 0, 1 ended without saving"),
    ([], {"launcher_code": 0}, 1, True, "deepspeed exited with 0 before any rank started"),
    ([], {"launcher_code": -9}, 1, True, "deepspeed exited with -9 before any rank started"),
    ([], {"launcher_code": 2}, 2, False, ""),
    ([], {"launcher_code": 1}, 1, False, "deepspeed exited with 1 before any rank started"),
]
for code in (0, 2, 4, 5, 130):  # what rank 0 ended with is the truth
    ended = [note(0, code), note(1, code)]
    CASES += [(ended, {"launcher_code": launcher}, code, False, "") for launcher in (0, 1, code)]
    CASES.append((ended, {"signals": 1, "killed": True}, code, False, ""))


@pytest.mark.parametrize(("notes", "facts", "code", "crashed", "text"), CASES)
def test_the_end_of_a_launch(
    notes: list[RankNote], facts: dict[str, Any], code: int, crashed: bool, text: str
) -> None:
    verdict = judge(
        notes, **{"launcher_code": 1, "signals": 0, "killed": False, "hang": None, **facts}
    )
    assert (verdict.code, verdict.crashed) == (code, crashed)
    assert verdict.text.startswith(text) if text else not verdict.text
