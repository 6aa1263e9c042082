import json
from pathlib import Path
from typing import Any

import pytest

from refocused.metrics.run_time import PERFORMANCE_FILE, RunTime, RunTimeReader


def line(kind: str, step: int, at: str, *, first: int = 0, **uses: float) -> dict[str, Any]:
    seconds = {f"{name}_seconds": value for name, value in uses.items()}
    return {"kind": kind, "step": step, "first_step": first, "time": f"{at}.000Z", **seconds}


def added(records: list[dict[str, Any]]) -> RunTime:
    reader = RunTimeReader()
    for record in records:
        reader.add(record)
    return reader.read()


# Started at 08:00:00; a minute of start-up, 100 steps, a save, 50 more; killed after 08:05:20.
FIRST = [
    line("session", 0, "2026-11-22T08:01:00", start_up=60.0),
    line("time", 100, "2026-11-22T08:04:00", forward_backward=150, update=20, data_wait=10),
    line("save", 100, "2026-11-22T08:04:10", save_stall=10),
    line(
        "time", 150, "2026-11-22T08:05:20", first=100, forward_backward=50, update=10, save_stall=20
    ),
]
# Started again at 08:10:20 from step 120: 30 of the 50 steps were lost.
SECOND = [
    line("session", 120, "2026-11-22T08:11:00", start_up=40.0),
    line("time", 200, "2026-11-22T08:13:00", first=120, forward_backward=90, validation=30),
    line("time", 200, "2026-11-22T08:13:10", first=200, ending=10.0),
]


def test_a_session_and_a_resume_with_a_rewind_by_hand() -> None:
    found = added(FIRST)
    assert found.elapsed_seconds == 320.0  # 08:00:00 to 08:05:20
    assert (found.productive_seconds, found.goodput_fraction) == (230.0, 230.0 / 320.0)
    assert (found.sessions, found.redone_seconds) == (1, 0.0)
    found = added(FIRST + SECOND)
    assert found.elapsed_seconds == 790.0  # 08:00:00 to 08:13:10
    assert found.away_seconds == 300.0  # 08:05:20 to 08:10:20
    assert found.redone_seconds == 60.0 * 30 / 50
    assert found.productive_seconds == 230.0 + 90.0 - 36.0
    assert found.goodput_fraction == pytest.approx(284.0 / 790.0)
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    seconds = {name: round(share * 790, 6) for name, share in shares.items() if share}
    assert seconds == {
        **{"steps": 284.0, "redone steps": 36.0, "start-up": 100.0, "saves": 20.0},
        **{"validation": 30.0, "data": 10.0, "down": 300.0, "ending": 10.0},
    }
    text = found.as_line()
    assert text.startswith("goodput 35.9%: steps 35.9% | redone steps 4.6% | start-up 12.7% | ")
    assert "down 38.0%" in text and "other" not in text and "hang" not in text


def test_a_hang_lasts_from_the_last_line_to_the_stop_of_the_watchdog(tmp_path: Path) -> None:
    # As the watchdog writes it.
    alarm = {"kind": "alarm", "alarm": "hang", "raised": True}
    stopped, late, early = (
        {**alarm, "time": f"2026-11-22T{clock}Z"} for clock in ("08:08:20", "09:08:20", "07:48:20")
    )
    found = added([stopped, *FIRST, *SECOND])
    assert (found.hang_seconds, found.away_seconds, found.elapsed_seconds) == (180.0, 120.0, 790.0)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    assert added([early, *FIRST, *SECOND]).hang_seconds == 0.0  # of an earlier life
    assert added([late, *FIRST, *SECOND]).hang_seconds == 3310.0  # after the last line
    reader, logs = RunTimeReader(tmp_path), tmp_path / PERFORMANCE_FILE  # while the run goes on
    logs.parent.mkdir()
    logs.write_text("".join(json.dumps(one) + "\n" for one in FIRST))
    assert reader.read() == added(FIRST)
    (logs.parent / "events.jsonl").write_text(json.dumps(stopped) + "\n")
    assert reader.read() == added([stopped, *FIRST])
    with logs.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in SECOND)
    assert reader.read() == found


@pytest.mark.parametrize(
    ("later", "redone", "away"),
    [
        # A rewind behind a rewind loses nothing twice.
        ([line("session", 120, "2026-11-22T08:14:00")] * 2, 36.0 + 90.0, 300.0 + 50.0),
        # A start from scratch loses everything.
        ([line("session", 0, "2026-11-22T08:13:10")], 230.0 + 90.0, 300.0),
        # A clock that was set back makes no negative time.
        ([line("session", 200, "2026-11-22T07:00:00")], 36.0, 300.0),
    ],
)
def test_later_sessions(later: list[dict[str, Any]], redone: float, away: float) -> None:
    found = added([*FIRST, *SECOND, *later])
    assert (found.redone_seconds, found.away_seconds) == (pytest.approx(redone), away)


def test_the_time_after_a_finished_run_is_not_away() -> None:
    ended = [*FIRST, *SECOND[:-1], {**SECOND[-1], "finished": True}]
    again = [*ended, line("session", 200, "2026-11-22T20:00:00", start_up=9.0)]
    found = added(again)
    assert (found.away_seconds, found.elapsed_seconds) == (300.0, 790.0 + 9.0)
    longer = line("time", 300, "2026-11-22T20:01:00", first=200, forward_backward=60)
    killed = line("session", 300, "2026-11-22T21:01:00", start_up=60.0)  # an hour before
    assert added([*again, longer, killed]).away_seconds == 3840.0


def test_a_file_with_torn_and_foreign_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / PERFORMANCE_FILE
    assert RunTimeReader(tmp_path).read() == RunTime()
    file.parent.mkdir()
    lines = [json.dumps(record) for record in FIRST]
    lines[2:2] = ['{"kind": "time", "step": 1', "[]", '{"kind": "session"}', "\xff"]
    file.write_bytes("\n".join([*lines, "torn"]).encode("latin-1"))
    assert RunTimeReader(tmp_path).read() == added(FIRST)
    assert added([]).goodput_fraction is None
