"""The phases of a session's start."""

from refocused.metrics.start_up import StartUpClock


def test_phases_add_up_and_may_have_parts() -> None:
    start = StartUpClock(100.0)
    start.end("exit", at_seconds=101.5)
    start.end("launch", at_seconds=104.0)
    start.end("launch", at_seconds=103.9)  # clocks of other processes may differ a little
    for at, phase in ((107.0, "imports"), (107.25, "join"), (109.0, "imports")):
        start.end(phase, at_seconds=at)
    start.spent.first_batch_seconds = 0.5
    assert start.spent.as_record() == {
        "exit_seconds": 1.5,
        "launch_seconds": 2.5,
        "imports_seconds": 3.1 + 1.75,
        "join_seconds": 0.25,
        "first_batch_seconds": 0.5,
    }
    assert start.spent.as_line(1001) == (
        "  start-up 9.6 s from a crash to step 1,001: exit 1.5 | launch 2.5 | imports 4.8 | "
        "join 0.2 | first batch 0.5 s"
    )


def test_without_a_crash_the_start_is_counted_from_the_command() -> None:
    start = StartUpClock(0.0)
    start.end("imports", at_seconds=3.0)
    assert start.spent.as_line(1) == "  start-up 3.0 s from the start to step 1: imports 3.0 s"
