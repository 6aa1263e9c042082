from __future__ import annotations

import threading
import time

import pytest

from refocused.metrics.trackers import Record, Trackers, TrackerThread, scalars


class Listener:
    """A tracker that notes what it is told, and fails or waits as a test wants."""

    name = "listener"

    def __init__(self, *, fails_at: str = "", waits: bool = False) -> None:
        self.steps: list[object] = []
        self.exit_codes: list[int] = []
        self.fails_at = fails_at
        self.has_record, self.may_go_on = threading.Event(), threading.Event()
        if not waits:
            self.may_go_on.set()

    def open(self) -> str:
        self._fail("open")
        return "is told"

    def write(self, record: Record) -> None:
        self.has_record.set()
        self.may_go_on.wait(60)
        if record["step"] == 2:
            self._fail("write")
        self.steps.append(record["step"])

    def close(self, exit_code: int) -> str:
        self._fail("close")
        self.exit_codes.append(exit_code)
        return "has ended"

    def _fail(self, when: str) -> None:
        if self.fails_at == when:
            raise ConnectionResetError(f"no\n{when}")


def step(number: int) -> Record:
    return {"kind": "step", "step": number, "loss": 3.0}


def end(thread: TrackerThread, *, limit_seconds: float = 60.0) -> list[str]:
    deadline = time.monotonic() + limit_seconds
    thread.begin_end(4, deadline_seconds=deadline)
    thread.finish_end(deadline_seconds=deadline)
    return [note.text for note in thread.notes()]


def test_a_tracker_is_told_in_order_and_how_it_ended() -> None:
    listener, told = Listener(), list[tuple[str, str]]()
    trackers = Trackers([listener], tell=lambda kind, text: told.append((kind, text)))
    for number in range(1, 6):
        trackers.record(step(number))
    trackers.close(4, limit_seconds=60)
    assert (listener.steps, listener.exit_codes) == ([1, 2, 3, 4, 5], [4])
    assert told == [
        ("tracker", "  tracker  listener: is told"),
        ("tracker", "  tracker  listener: has ended"),
    ]


def test_a_slow_tracker_holds_nothing_up_and_what_it_lacks_is_counted() -> None:
    listener = Listener(waits=True)
    thread = TrackerThread(listener, room=3)
    thread.record(step(1))
    assert listener.has_record.wait(60)  # it has taken that one, and takes no other
    for number in range(2, 11):
        thread.record(step(number))  # would wait for ever if it waited
    listener.may_go_on.set()
    notes = end(thread)
    assert listener.steps == [1, 2, 3, 4]
    assert len([text for text in notes if "is too slow" in text]) == 1
    assert "lacks 6 records (6 for which it was too slow, 0 that it refused)" in notes[-1]


def test_a_tracker_that_cannot_be_opened_is_said_once_and_left_alone() -> None:
    listener, told = Listener(fails_at="open"), list[tuple[str, str]]()
    other = Listener()
    trackers = Trackers([listener, other], tell=lambda kind, text: told.append((kind, text)))
    for number in range(1, 4):
        trackers.record(step(number))
    trackers.close(0, limit_seconds=60)
    warnings = [text for kind, text in told if kind == "tracker_warning"]
    assert len(warnings) == 1
    assert "is not told of this session: ConnectionResetError: no open" in warnings[0]
    assert (listener.steps, other.steps) == ([], [1, 2, 3])


def test_a_record_that_is_refused_is_said_and_the_next_ones_are_told() -> None:
    listener = Listener(fails_at="write")
    thread = TrackerThread(listener)
    for number in range(1, 5):
        thread.record(step(number))
    notes = end(thread)
    assert listener.steps == [1, 3, 4]
    assert any("refused a record: ConnectionResetError: no write" in text for text in notes)
    assert "lacks 1 records (0 for which it was too slow, 1 that it refused)" in notes[-1]


@pytest.mark.parametrize("room", [1, 10])
def test_a_tracker_that_hangs_does_not_keep_a_run_from_ending(room: int) -> None:
    listener = Listener(waits=True)
    thread = TrackerThread(listener, room=room)
    thread.record(step(1))
    assert listener.has_record.wait(60)
    thread.record(step(2))
    assert any("did not end in time" in text for text in end(thread, limit_seconds=0.05))
    assert listener.exit_codes == []
    listener.may_go_on.set()


def test_an_end_that_fails_is_said() -> None:
    assert (
        "did not end well: ConnectionResetError: no close"
        in end(TrackerThread(Listener(fails_at="close")))[-1]
    )


@pytest.mark.parametrize(
    ("record", "numbers"),
    [
        (
            {"kind": "step", "step": 7, "loss": 2.5, "tokens": 9, "mfu_fraction": None},
            {"train/loss": 2.5, "train/tokens": 9.0},
        ),
        (
            {"kind": "step", "step": 7, "mfu_refused": True, "sources": {"web": {"tokens": 3}}},
            {"train/sources/web/tokens": 3.0},
        ),
        (
            {
                "kind": "validation",
                "step": 7,
                "validation_loss": 2.0,
                "perplexity": 7.4,
                "sources": {"web": {"validation_loss": 1.5}},
            },
            {
                "validation/loss": 2.0,
                "validation/perplexity": 7.4,
                "validation/sources/web/loss": 1.5,
            },
        ),
        (
            {
                "kind": "tasks",
                "step": 7,
                "tasks": {"piqa": {"items": 3, "acc": {"value": 0.5, "standard_error": None}}},
            },
            {"tasks/piqa/items": 3.0, "tasks/piqa/acc/value": 0.5},
        ),
        ({"kind": "sample", "step": 7, "sample": "text"}, {}),
    ],
)
def test_numbers_have_constant_names(record: Record, numbers: dict[str, float]) -> None:
    assert scalars(record) == numbers
