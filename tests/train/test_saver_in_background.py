"""`checkpoint.async`: the loop goes on while a save is written, and nothing else changes."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from test_saver import Session
from thread_ranks import on_two_ranks

from refocused.checkpoints.step.step_directory import read_step
from refocused.system.errors import CheckpointError, TrainingError
from refocused.system.world import World
from refocused.train.step.state import TrainState


@pytest.fixture
def slow(tmp_path: Path) -> Session:
    """A session whose disk writes when `may_write` is set."""
    session = Session(tmp_path, in_background=True)
    session.owner.may_write = threading.Event()
    return session


def begin(session: Session, step: int) -> None:
    session.saver.save(TrainState(step=step), wait=False)


def let_it_write(session: Session) -> None:
    assert session.owner.may_write is not None
    session.owner.may_write.set()


def test_a_step_is_committed_at_a_later_boundary(slow: Session) -> None:
    begin(slow, 10)
    slow.saver.commit()
    assert (slow.there(), slow.log, slow.saver.saved_step) == ([], [], None)
    let_it_write(slow)
    slow.saver.commit(wait=True)
    assert (slow.there(), slow.saver.saved_step) == ([10], 10)
    (line,) = slow.log
    assert re.fullmatch(r"save: save      10 local [\d.]+ s, stall 0 s", line)
    slow.saver.commit(wait=True)
    assert len(slow.log) == 1


def test_the_stall_is_the_copy_and_the_commit_and_not_the_writing(slow: Session) -> None:
    copy = slow.owner.copy_shards

    def slowly(folder: Path) -> object:
        slow.clock.now += 3.0
        return copy(folder)

    slow.owner.copy_shards = slowly  # type: ignore[method-assign, assignment]
    begin(slow, 10)
    slow.clock.now += 60.0
    slow.throughput.lap("step")
    let_it_write(slow)
    slow.clock.now += 1.0  # in which the loop waits
    slow.saver.commit(wait=True)
    (line,) = slow.log
    assert re.fullmatch(r"save: save      10 local [\d.]+ s, stall 4 s", line)
    assert slow.reporter.figures[0]["save_stall_seconds"] == 4.0
    assert slow.throughput.seconds_left({"save": 2}) == 8.0


def test_a_save_that_is_due_too_early_waits_and_says_so(slow: Session) -> None:
    begin(slow, 10)
    threading.Timer(0.05, lambda: let_it_write(slow)).start()
    begin(slow, 20)
    assert slow.there() == [10]
    assert slow.log[0].startswith(
        "save_late: save      10 is still being written, and step 20 waits for it"
    )
    slow.saver.commit(wait=True)
    assert slow.there() == [10, 20]


@pytest.mark.parametrize(("step", "there"), [(10, [10]), (20, [10, 20])])
def test_a_save_that_is_waited_for_finishes_the_one_before(
    slow: Session, step: int, there: list[int]
) -> None:
    begin(slow, 10)
    let_it_write(slow)
    slow.saver.save(TrainState(step=step))
    assert slow.there() == there
    # A stop at a step that is being written saves it once.
    assert sum(line.startswith("save:") for line in slow.log) == len(there)
    assert slow.saver.saved_step == step


def test_failures_are_found_later_and_counted_all_the_same(tmp_path: Path) -> None:
    def action(world: World) -> None:
        session = Session(tmp_path, world=world, max_failed_saves=2, in_background=True)
        session.owner.disk_is_full = world.rank == 1
        begin(session, 10)
        session.saver.commit(wait=True)
        assert session.saver.last_save_failed
        begin(session, 20)
        session.saver.commit(wait=True)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert str(ended.error).startswith("2 saves in a row have failed; the run stops")


@pytest.mark.parametrize("shared", [True, False])
def test_an_error_that_all_ranks_share_leaves_a_whole_step(slow: Session, shared: bool) -> None:
    error = TrainingError("the loss is not finite")
    error.on_every_rank = shared
    with pytest.raises(TrainingError), slow.saver.finishing():
        begin(slow, 10)
        let_it_write(slow)
        raise error
    assert slow.there() == ([10] if shared else [])  # the other ranks may be gone


def test_what_was_saved_in_the_background_comes_back(slow: Session) -> None:
    let_it_write(slow)
    slow.owner.content = b"of step 10"
    begin(slow, 10)
    slow.owner.content = b"of step 11"
    slow.saver.commit(wait=True)
    slow.saver.load(read_step(slow.folder / "checkpoint_step_10"))
    assert slow.owner.loaded == b"of step 10"
