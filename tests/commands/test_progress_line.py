from __future__ import annotations

import io

from refocused.commands.output import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_and_the_time_left_are_those_of_this_start() -> None:
    clock = Clock()
    line = ProgressLine("sync", stream=io.StringIO(), clock=clock)
    line.show(40_000_000, 100_000_000)
    clock.now += 10
    assert line.text(60_000_000, 100_000_000, "3 of 5 objects") == (
        "sync  60.0 % | 60.0 MB of 100.0 MB | 2.0 MB/s | left 20 s | 3 of 5 objects"
    )


def test_nothing_moved_yet_is_no_rate() -> None:
    clock = Clock()
    line = ProgressLine("sync", stream=io.StringIO(), clock=clock)
    assert "| 0 B/s | left unknown" in line.text(0, 100)
    assert "100.0 %" in line.text(0, 0)


def test_a_log_gets_a_line_now_and_then() -> None:
    clock, stream = Clock(), io.StringIO()
    line = ProgressLine("sync", stream=stream, clock=clock)
    for _ in range(25):
        clock.now += 1
        line.show(1, 2)
    line.end()
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_gets_one_line_that_moves() -> None:
    clock, stream = Clock(), Terminal()
    line = ProgressLine("sync", stream=stream, clock=clock)
    line.show(1, 10, "a long note")
    line.show(2, 10)  # too soon
    clock.now += 1
    line.show(10, 10)
    line.end()
    first, second = stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert len(second) == len(first)
    assert "10.0 %" in first and "100.0 %" in second
