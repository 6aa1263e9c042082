import dataclasses
import errno
import json
import math
import os
import re
import shutil
import threading

import pytest
from checkpoints.fake_owner import FACTS
from run_fakes import FakeMirror, Saving, on_machines, status_of_mirror
from thread_ranks import on_two_ranks

from refocused.checkpoints.step.checkpoint_directory import (
    Branch,
    checkpoint_paths,
    read_checkpoint,
)
from refocused.data.order.sequences import Position
from refocused.system.errors import CheckpointError, ConfigError, TrainingError
from refocused.system.locks import FileLock
from refocused.train.step.state import TrainState


def test_a_saved_state_includes_time_and_cost(tmp_path):
    session = Saving(tmp_path)
    state = session.save(10, loss=2.0)
    assert state == TrainState(step=10, loss=2.0, seconds=7.0)
    step = read_checkpoint(tmp_path / "checkpoint_step_10")
    assert step.manifest.files_done == 1
    assert Saving(tmp_path).saver.load(step) == state
    assert session.saver.saved_step == 10
    assert session.saver.failures == 0


def take(session, name, *, seconds):
    """Let a method of the owner take some time."""
    act = getattr(session.owner, name)

    def slowly(folder):
        session.clock.now += seconds
        return act(folder)

    setattr(session.owner, name, slowly)


def test_a_save_is_reported_with_its_time(tmp_path):
    session = Saving(tmp_path)
    take(session, "save_shards", seconds=4.0)
    session.save(1500)
    assert session.log == ["save: save   1,500 local 4 s"]
    (record,) = session.reporter.figures
    size = read_checkpoint(tmp_path / "checkpoint_step_1500").manifest.total_bytes
    seconds = record["save_write_seconds"]
    assert isinstance(seconds, float) and seconds > 0  # measured where it is written
    assert record == {
        "kind": "save",
        "step": 1500,
        "save_stall_seconds": 4.0,
        "save_write_seconds": seconds,
        "save_bytes": size,
        "save_bytes_per_second": size / seconds,
    }
    session.clock.now += 1.0
    session.meter.lap("step")
    assert session.meter.seconds_left({"step": 1, "save": 1}) == 5.0


def test_a_resumed_step_is_not_saved_again_unless_imported(tmp_path):
    session = Saving(tmp_path)
    session.save(10, 10)
    assert session.log == ["save:" + " save      10 local 0 s"]
    resumed = Saving(tmp_path)
    state = resumed.saver.load(read_checkpoint(tmp_path / "checkpoint_step_10"))
    resumed.saver.save(state)
    assert resumed.log == []
    other = Saving(tmp_path / "other")
    other.saver.save(other.saver.load(read_checkpoint(tmp_path / "checkpoint_step_10")))
    assert other.there() == [10]


def disk_with(free):
    return lambda _: shutil._ntuple_diskusage(10**12, 10**12 - free, free)  # type: ignore[attr-defined]


def test_a_start_removes_leftovers_of_killed_saves(tmp_path, monkeypatch):
    left, download, removal = (
        tmp_path / name
        for name in (".tmp-checkpoint_step_9-1a2b3c4d", ".tmp-checkpoint_step_7-fetch", ".del-x")
    )
    for folder in (left, download, removal):
        (folder / "zero").mkdir(parents=True)
        (folder / "zero" / "part").write_bytes(b"x" * 20_000_000)
    session, lock = Saving(tmp_path), FileLock(tmp_path / ".fetch.lock")
    assert lock.acquire()
    session.saver.checkpointer.prepare()
    assert (left.exists(), removal.exists(), download.exists()) == (False, False, True)
    monkeypatch.setattr(shutil, "disk_usage", disk_with(1000))
    session.owner.disk_is_full = True
    session.save(10)  # its message names what is still there
    assert "; 0.02 GB are used by killed saves and removals" in session.log[-1]
    assert f"could not be cleaned up: {download.name}). Its files are removed" in session.log[-1]
    lock.release()
    session.saver.checkpointer.prepare()
    assert not download.exists()


def test_without_room_or_rights_neither_a_start_nor_a_save_begins(tmp_path, monkeypatch):
    session = Saving(tmp_path / "checkpoints", least_bytes=14_400_000_000)
    way_out = "set run.directory to a folder on another disk"
    lacks = "has 10.00 GB free, and a save needs about 14.40 GB"
    monkeypatch.setattr(shutil, "disk_usage", disk_with(10_000_000_000))
    with pytest.raises(ConfigError, match=f"No checkpoint could be saved.*{lacks}.*{way_out}"):
        session.saver.checkpointer.prepare()
    session.save(10)
    assert session.log[-1].startswith("save_failed: checkpoint_step_10 was not saved: ")
    assert lacks in session.log[-1] and session.there() == []

    def refuse(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    read_only = r"is not writable \(Read-only file system\)\. Training has not started"
    with pytest.raises(ConfigError, match=f"No checkpoint could be saved.*{read_only}.*{way_out}"):
        session.saver.checkpointer.prepare()


def test_a_low_disk_is_cleaned_before_a_save(tmp_path, monkeypatch):
    session = Saving(tmp_path, keep=5)
    session.save(10, 20, 30, 40)
    (tmp_path / ".del-x").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", disk_with(1000))
    session.save(50)
    assert not (tmp_path / ".del-x").exists()
    assert session.there() == [30, 40]  # and even so there is no room for another


def test_other_data_start_a_new_pass(tmp_path):
    Saving(tmp_path).save(10, position=Position(sequences=32))
    other = dataclasses.replace(FACTS, data_fingerprint="beef")
    saver = Saving(tmp_path, facts=other, allowed=("data",)).saver
    state = saver.load(read_checkpoint(tmp_path / "checkpoint_step_10"))
    assert (state.step, state.position) == (10, Position())


@pytest.mark.parametrize("in_background", [False, True])
def test_repeated_save_failures_stop_the_run_on_both_ranks(tmp_path, in_background):
    def action(world):
        session = Saving(tmp_path, world=world, max_failed_saves=2, in_background=in_background)

        def save(step, *, full):
            session.owner.disk_is_full = full and world.rank == 1
            session.saver.save(TrainState(step=step), wait=not in_background)
            session.saver.commit(wait=True)
            assert session.saver.failures == full

        save(10, full=True)
        save(20, full=False)  # a good one in between: the count starts anew
        save(30, full=True)
        save(40, full=True)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert ended.error.on_every_rank
        assert str(ended.error).startswith("2 saves in a row have failed; the run stops")
        assert "checkpoint_step_40 was not saved: No space left" in str(ended.error)


def test_an_unloadable_save_stops_the_run(tmp_path):
    session = Saving(tmp_path, max_failed_saves=3)
    session.owner.writes_an_object = True
    with pytest.raises(CheckpointError, match=r"its checkpoints cannot be loaded\. .*_step_10 was"):
        session.save(10)
    assert session.there() == []


def test_only_the_newest_and_the_best_are_kept(tmp_path):
    session = Saving(tmp_path)
    session.save(10)
    session.save(20, validation_loss=1.0, validation_step=20)
    session.save(30, 40, 50, validation_loss=0.5, validation_step=25)  # not their own
    assert session.there() == [20, 40, 50]
    session.save(60, validation_loss=0.75, validation_step=60)
    assert session.there() == [50, 60]


def test_a_step_that_is_not_mirrored_is_kept(tmp_path):
    mirror = FakeMirror([], status_of_mirror(mirrored=(20,)))
    session = Saving(tmp_path, mirror=mirror)
    session.save(10, 20, 30, 40)
    assert session.there() == [10, 30, 40]
    mirror.said = None  # it has not said anything yet: nothing may go
    session.save(50)
    assert session.there() == [10, 30, 40, 50]


def test_what_cannot_be_removed_fails_no_save(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError("busy")

    monkeypatch.setattr("refocused.checkpoints.step.retention.remove_checkpoint", refuse)
    session = Saving(tmp_path)
    session.save(10, 20, 30)
    assert (session.there(), session.saver.failures) == ([10, 20, 30], 0)


def test_resuming_an_earlier_step_saves_on_a_new_branch(tmp_path):
    Saving(tmp_path, keep=5).save(10, 20, 30)
    branch = Branch(run_id="a", number=2, ancestry=((1, 20),))
    session = Saving(tmp_path, keep=3, branch=branch)
    session.saver.load(read_checkpoint(tmp_path / "checkpoint_step_20"))
    session.save(30)
    first = ["checkpoint_step_10", "checkpoint_step_20", "checkpoint_step_30"]
    assert list(checkpoint_paths(tmp_path)) == [*first, "branch-2/checkpoint_step_30"]
    manifest = read_checkpoint(tmp_path / "branch-2" / "checkpoint_step_30").manifest
    assert (manifest.run_id, manifest.branch, manifest.ancestry) == ("a", 2, ((1, 20),))
    session.save(40, 50)
    assert list(checkpoint_paths(tmp_path)) == [  # the only copies of the first branch stay
        "checkpoint_step_30",
        *(f"branch-2/checkpoint_step_{step}" for step in (30, 40, 50)),
    ]


def test_a_step_missing_on_one_machine_is_set_aside_on_the_others(tmp_path):
    on_machines(tmp_path, lambda session: session.save(10, 20))
    (tmp_path / "machine_1" / "checkpoint_step_20").rename(
        tmp_path / "machine_1" / ".tmp-checkpoint_step_20-killed"
    )

    def go_on(session):
        session.saver.load(read_checkpoint(session.folder / "checkpoint_step_10"))
        session.saver.set_aside([session.folder / "checkpoint_step_20"])
        there = session.there()
        session.save(20)
        return [*there, *session.there()]

    assert on_machines(tmp_path, go_on) == [[10, 10, 20]] * 2
    assert list((tmp_path / "machine_0").glob(".bad-checkpoint_step_20-*"))


# `checkpoint.async`: the loop goes on while a save is written, and nothing else changes.


@pytest.fixture
def slow(tmp_path):
    """A session whose disk writes when `may_write` is set."""
    session = Saving(tmp_path, in_background=True)
    session.owner.may_write = threading.Event()
    return session


def begin(session, step):
    session.saver.save(TrainState(step=step), wait=False)


def let_it_write(session):
    assert session.owner.may_write is not None
    session.owner.may_write.set()


def test_the_stall_is_copy_and_commit_without_writing(slow):
    take(slow, "copy_shards", seconds=3.0)
    begin(slow, 10)
    slow.saver.commit()
    assert (slow.there(), slow.log, slow.saver.saved_step) == ([], [], None)
    slow.clock.now += 60.0
    slow.meter.lap("step")
    let_it_write(slow)
    slow.clock.now += 1.0  # in which the loop waits
    slow.saver.commit(wait=True)
    slow.saver.commit(wait=True)
    assert (slow.there(), slow.saver.saved_step) == ([10], 10)
    (line,) = slow.log
    assert re.fullmatch(r"save: save      10 local [\d.]+ s, stall 4 s", line)
    assert slow.reporter.figures[0]["save_stall_seconds"] == 4.0
    assert slow.meter.seconds_left({"save": 2}) == 8.0


def test_a_save_due_too_early_waits_with_a_warning(slow):
    begin(slow, 10)
    threading.Timer(0.05, lambda: let_it_write(slow)).start()
    begin(slow, 20)
    assert slow.there() == [10]
    assert slow.log[0].startswith(
        "save_late: save      10 is still being written; step 20 waits for it"
    )
    slow.saver.commit(wait=True)
    assert slow.there() == [10, 20]


@pytest.mark.parametrize(("step", "there"), [(10, [10]), (20, [10, 20])])
def test_a_synchronous_save_finishes_the_one_before(slow, step, there):
    begin(slow, 10)
    let_it_write(slow)
    slow.saver.save(TrainState(step=step))
    assert slow.there() == there
    # A stop at a step that is being written saves it once.
    assert sum(line.startswith("save:") for line in slow.log) == len(there)
    assert slow.saver.saved_step == step


@pytest.mark.parametrize("shared", [True, False])
def test_an_error_on_all_ranks_leaves_a_complete_checkpoint(slow, shared):
    error = TrainingError("the loss is not finite")
    error.on_every_rank = shared
    with pytest.raises(TrainingError), slow.saver.finishing():
        begin(slow, 10)
        let_it_write(slow)
        raise error
    assert slow.there() == ([10] if shared else [])  # the other ranks may be gone


STATE = TrainState(
    step=12,
    tokens=98_304,
    position=Position(epoch=1, sequences=34),
    loss=3.25,
    validation_loss=3.5,
    bits_per_byte=1.1,
    validation_set="",
    best_loss=3.4,
    best_bits_per_byte=1.05,
    best_step=10,
    seconds=60.5,
    cost_usd=1.25,
    wandb_id="tiny",
)


def through_json(state):
    return TrainState.from_record(json.loads(json.dumps(state.as_record(), allow_nan=False)))


def test_a_state_round_trips_through_json():
    assert through_json(STATE) == STATE
    assert through_json(TrainState()) == TrainState()
    for value in (math.nan, math.inf):  # which other parsers refuse
        odd = dataclasses.replace(STATE, loss=value, validation_loss=value)
        assert through_json(odd) == dataclasses.replace(STATE, loss=None, validation_loss=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best_loss": ...}, r"trainer.json differs .* in: best_loss\. Resume with"),
        ({"step": ..., "cost_usd": ...}, "in: cost_usd, step"),
        ({"momentum": 1}, "in: momentum"),
        ({"position": {"epoch": 0, "sequences": -1}}, "data position"),
        ({"position": 3}, "values of another kind"),
        ({"step": "many"}, "values of another kind"),
    ],
)
def test_a_record_of_another_form_is_rejected(changes, said):
    changed = (STATE.as_record() | changes).items()
    record = {name: value for name, value in changed if value is not ...}
    with pytest.raises(CheckpointError, match=said):
        TrainState.from_record(record)


def test_losses_of_other_validation_sets_are_not_compared():
    """Regression: `best` stayed the easy set's to the end of the run."""
    easy = TrainState(step=10).after_validation(1.0, of="easy")
    assert (easy.after_validation(0.5, of="easy").best_loss, easy.validation_set) == (0.5, "easy")
    hard = dataclasses.replace(easy, step=20).after_validation(3.0, of="hard")
    assert (hard.best_loss, hard.best_step, hard.validation_set) == (3.0, 20, "hard")
    nothing = easy.after_validation(math.nan, of="hard")
    assert (nothing.best_loss, nothing.best_step) == (None, None)


@pytest.mark.parametrize(
    ("before", "loss", "best"),
    [
        (STATE, 3.3, (3.3, 12)),
        (STATE, 3.45, (3.4, 10)),
        (TrainState(step=1), 9.0, (9.0, 1)),
        (TrainState(step=1), math.nan, (None, None)),
        (TrainState(step=1), math.inf, (None, None)),
        (TrainState(step=1).after_validation(math.nan), 5.0, (5.0, 1)),
    ],
)
def test_only_a_finite_loss_can_be_the_best(before, loss, best):
    after = before.after_validation(loss)
    assert str(after.validation_loss) == str(loss)
    assert after.validation_step == before.step
    assert (after.best_loss, after.best_step) == best
