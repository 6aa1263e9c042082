import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from metrics.session_records import step, tracked_run
from thread_ranks import on_two_ranks, results

from refocused.metrics.trackers import Record, Trackers, scalars, start_tracking
from refocused.metrics.wandb import WandbTracker
from refocused.system.world import World


class Listener:
    """A tracker that notes its records, and fails or waits as a test wants."""

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
        return "is open"

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


class Session:
    """Trackers and what they report."""

    def __init__(self, *listeners: Listener, room: int = 1000) -> None:
        self.reports: list[tuple[str, str]] = []
        self.trackers = Trackers(
            listeners, report=lambda kind, text: self.reports.append((kind, text)), room=room
        )

    def record(self, *steps: int) -> None:
        for number in steps:
            self.trackers.record(step(number))

    def close(self, limit_seconds: float = 60.0) -> list[str]:
        """End the trackers; return the warnings."""
        self.trackers.close(4, limit_seconds=limit_seconds)
        return [text for kind, text in self.reports if kind == "tracker_warning"]


def test_a_tracker_gets_records_in_order_and_the_exit_code() -> None:
    listener = Listener()
    session = Session(listener)
    session.record(*range(1, 6))
    assert session.close() == []
    assert (listener.steps, listener.exit_codes) == ([1, 2, 3, 4, 5], [4])
    assert session.reports == [
        ("tracker", "  tracker  listener: is open"),
        ("tracker", "  tracker  listener: has ended"),
    ]


def test_a_slow_tracker_delays_nothing_and_what_it_lacks_is_counted() -> None:
    listener = Listener(waits=True)
    session = Session(listener, room=3)
    session.record(1)
    assert listener.has_record.wait(60)  # it has taken that one, and takes no other
    session.record(*range(2, 11))  # would wait for ever if it waited
    listener.may_go_on.set()
    too_slow, lacks = session.close()
    assert listener.steps == [1, 2, 3, 4]
    assert "is too slow" in too_slow
    assert "lacks 6 records: 6 dropped while it was too slow, 0 refused" in lacks


def test_a_tracker_that_cannot_be_opened_is_reported_once_and_left_alone() -> None:
    listener, other = Listener(fails_at="open"), Listener(fails_at="close")
    session = Session(listener, other)
    session.record(1, 3)
    warnings = sorted(session.close())
    assert "failed to close: ConnectionResetError: no close" in warnings[0]
    assert "records nothing in this session: ConnectionResetError: no open" in warnings[1]
    assert (len(warnings), listener.steps, other.steps) == (2, [], [1, 3])


def test_a_refused_record_is_reported_and_later_ones_are_written() -> None:
    listener = Listener(fails_at="write")
    session = Session(listener)
    session.record(1, 2, 3, 4)
    refused, lacks = session.close()
    assert listener.steps == [1, 3, 4]
    assert "refused a record: ConnectionResetError: no write" in refused
    assert "lacks 1 records: 0 dropped while it was too slow, 1 refused" in lacks


@pytest.mark.parametrize("room", [1, 10])
def test_a_tracker_that_hangs_does_not_keep_a_run_from_ending(room: int) -> None:
    listener = Listener(waits=True)
    session = Session(listener, room=room)
    session.record(1)
    assert listener.has_record.wait(60)
    session.record(2)
    assert any("did not finish in time" in text for text in session.close(limit_seconds=0.05))
    assert listener.exit_codes == []
    listener.may_go_on.set()


def test_a_tracker_that_is_off_is_not_imported() -> None:
    program = (
        "import sys, pathlib, refocused.metrics.trackers as trackers\n"
        "from refocused.config.outputs import TrackingConfig\n"
        "run = trackers.TrackedRun(pathlib.Path(), 'x', 0, {}, TrackingConfig())\n"
        "from refocused.system.world import World\n"
        "assert trackers.start_tracking(run, World(), track=print, report=print) is None\n"
        "ours = {f'refocused.metrics.{one}' for one in trackers.TRACKERS}\n"
        "assert not {'wandb', 'tensorboard', 'prometheus_client', *ours} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("kind", "fields", "numbers"),
    [
        (
            "step",
            {"loss": 2.5, "mfu_fraction": None, "mfu_refused": True, "sources": {"web": {"n": 3}}},
            {"train/loss": 2.5, "train/sources/web/n": 3.0},
        ),
        (
            "validation",
            {"validation_loss": 2.0, "ppl": 7.4, "sources": {"web": {"validation_loss": 1.5}}},
            {"validation/loss": 2.0, "validation/ppl": 7.4, "validation/sources/web/loss": 1.5},
        ),
        (
            "tasks",
            {"tasks": {"piqa": {"items": 3, "acc": {"value": 0.5, "standard_error": None}}}},
            {"tasks/piqa/items": 3.0, "tasks/piqa/acc/value": 0.5},
        ),
        ("sample", {"sample": "text"}, {}),
    ],
)
def test_numbers_have_constant_names(
    kind: str, fields: dict[str, object], numbers: dict[str, float]
) -> None:
    assert scalars({"kind": kind, "step": 7, **fields}) == numbers


@pytest.mark.parametrize(("project", "wandb_id"), [("demo", None), (None, "tiny-1")])
def test_rank_0_alone_tracks_and_every_rank_knows_the_wandb_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str | None, wandb_id: str | None
) -> None:
    monkeypatch.setattr(WandbTracker, "open", lambda self: "")
    monkeypatch.setattr(WandbTracker, "close", lambda self, exit_code: "")
    run = dataclasses.replace(tracked_run(tmp_path, at=10, wandb=project), wandb_id=wandb_id)
    tracked: dict[int, Trackers] = {}

    def action(world: World) -> str | None:
        return start_tracking(
            run,
            world,
            track=lambda trackers: tracked.update({world.rank: trackers}),
            report=lambda kind, text: None,
        )

    first, second = results(on_two_ranks(action))
    assert first is not None
    assert first.startswith("tiny-")
    assert second == first
    if project is None:
        assert (first, tracked) == ("tiny-1", {})  # the id of the checkpoint stays
    else:
        assert list(tracked) == [0]
        tracked[0].close(0, limit_seconds=60)
