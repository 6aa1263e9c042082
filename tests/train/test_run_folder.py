"""The folder of a run: shared by all machines, or one on each."""

import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from run_fakes import Log, trainer_of
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.resume.resume_selection import Selection
from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH
from refocused.checkpoints.step.checkpoint_manifest import Origin
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.config.outputs import CheckpointConfig
from refocused.metrics.expected_loss import curve_from_record
from refocused.system.errors import CheckpointError, ConfigError, TrainingError
from refocused.system.locks import FileLock
from refocused.system.processes import identify, is_running
from refocused.system.world import World
from refocused.train.lifecycle import resume
from refocused.train.lifecycle.resume import Start, select
from refocused.train.lifecycle.run_folder import (
    StartNotice,
    claim_run,
    find_storage_ranks,
    has_newer_stop,
    require_one_mirror,
    write_run_files,
)
from refocused.train.lifecycle.trainer import Request


def on_two_nodes(world):
    return dataclasses.replace(world, local_rank=0, local_world_size=1, node=world.rank)


@pytest.mark.parametrize(("machines", "shared"), [(1, True), (2, True), (2, False)])
def test_storage_ranks_are_rank_0_or_the_first_of_each_machine(tmp_path, machines, shared):
    folders = [tmp_path / "one", tmp_path / ("one" if shared else "other")]

    def action(world):
        if machines == 2:
            world = on_two_nodes(world)
        return dataclasses.replace(find_storage_ranks(folders[world.rank], world), _control=None)

    found = results(on_two_ranks(action))
    apart = machines == 2 and not shared
    assert [world.storage_ranks for world in found] == [2 if apart else 1] * 2
    assert [world.is_storage_rank for world in found] == [True, apart]
    assert [world.storage_rank for world in found] == [0, int(apart)]
    assert not any(folder.exists() for folder in folders)  # made for the question alone


def test_ranks_of_one_machine_see_one_folder(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    for rank in on_two_ranks(lambda world: find_storage_ranks(folders[world.rank], world)):
        assert isinstance(rank.error, ConfigError)
        assert "rank 1: The run's folder" in str(rank.error)
        assert "a disk that all machines share" in str(rank.error)
        assert rank.error.on_every_rank
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_machines_are_numbered_by_their_first_ranks(tmp_path):
    def action(world):
        world = dataclasses.replace(on_two_nodes(world), node=(7, 3)[world.rank])
        return find_storage_ranks(tmp_path / str(world.rank), world).node

    assert results(on_two_ranks(action)) == [0, 1]


@pytest.mark.parametrize("shared", [True, False])
def test_a_mirror_folder_not_shared_by_the_machines_is_rejected(tmp_path, shared):
    folders = [tmp_path / "one", tmp_path / ("one" if shared else "other")]

    def action(world):
        world = dataclasses.replace(on_two_nodes(world), storage_ranks=2)
        require_one_mirror(None, world)
        require_one_mirror("gs://bucket/prefix", world)
        require_one_mirror(str(folders[world.rank]), world)

    for rank in on_two_ranks(action):
        assert (rank.error is None) == shared
        assert shared or "another one on each machine" in str(rank.error)


def selected(folder, world, resume, *, parent=None):
    """Select for the run `run` of a folder, without a mirror."""
    run, checkpoint = SimpleNamespace(directory=str(folder), name="run"), CheckpointConfig()
    config = cast("Any", SimpleNamespace(run=run, checkpoint=checkpoint))
    request = Request(resume, dry_run=False, command="", trusts_others=True, parent=parent)
    return select(config, request, world)


def test_machines_with_own_disks_cannot_import(tmp_path):
    def action(world):
        world = dataclasses.replace(on_two_nodes(world), storage_ranks=2)
        selected(tmp_path / str(world.rank), world, "gs://other/run/checkpoint_step_5")

    for rank in on_two_ranks(action):
        assert isinstance(rank.error, CheckpointError)
        assert "resume from this run's steps alone" in str(rank.error)


def test_a_new_run_must_not_exist(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.json").touch()
    with pytest.raises(CheckpointError, match=r"exists in .*To continue that run, give --run"):
        selected(tmp_path, World(), "5", parent="first")


def test_only_a_stop_that_is_older_than_the_launch_is_cleared(tmp_path):
    now, stop = time.monotonic(), tmp_path / "STOP"
    assert not has_newer_stop(tmp_path, now - 100)
    stop.touch()
    for age, is_newer in ((50, True), (150, False)):
        made = time.time() - age
        os.utime(stop, (made, made))
        assert has_newer_stop(tmp_path, now - 100) == is_newer
    assert list(tmp_path.iterdir()) == [stop]


def test_a_start_is_shown_and_leaves_no_trace_if_it_does_not_train(tmp_path):
    run = tmp_path / "run"
    first = StartNotice(run)
    first.show("starts its ranks")
    first.withdraw()
    assert not run.exists()
    before = b'{"status": "finished", "run": "run", "step": 9, "exit_code": 0, "pid": 1}'
    run.mkdir()
    file = run / "state.json"
    file.write_bytes(before)
    os.utime(file, (1_000_000, 1_000_000))
    notice = StartNotice(run)
    notice.show("opens the data")
    shown = json.loads(file.read_bytes())
    assert [shown[name] for name in ("status", "phase", "step", "pid")] == [
        *("starting", "opens the data", 9),
        os.getpid(),
    ]
    assert "exit_code" not in shown and is_running(shown)
    notice.withdraw()
    assert file.read_bytes() == before and file.stat().st_mtime == 1_000_000
    file.write_bytes(b'{"status": "training"}')  # by this session
    notice.withdraw()
    assert file.read_bytes() == b'{"status": "training"}'


@pytest.mark.parametrize("is_here", [True, False])
def test_a_start_leaves_the_state_of_a_run_that_trains(tmp_path, is_here):
    parent = identify(os.getppid())
    assert parent is not None
    host = {} if is_here else {"host": "node-7"}
    theirs = {"status": "training", "pid": parent.pid, "pid_started": parent.started, **host}
    file = tmp_path / "state.json"
    file.write_text(json.dumps(theirs))
    waiting, claimed = StartNotice(tmp_path), StartNotice(tmp_path, is_claimed=True)
    waiting.show("starts its ranks")
    assert json.loads(file.read_text()) == theirs
    claimed.show("reads the checkpoint")
    assert json.loads(file.read_text())["status"] == "starting"


def test_a_second_start_is_rejected_during_training(tmp_path):
    first = claim_run(tmp_path / "run")
    claim_run(tmp_path / "other", timeout_seconds=0.0).release()  # another name, another lock
    with pytest.raises(TrainingError, match="is being trained by another process") as told:
        claim_run(tmp_path / "run", timeout_seconds=0.0)
    assert "launch/stop.py" in str(told.value)
    first.release()
    claim_run(tmp_path / "run", timeout_seconds=0.0).release()


def test_a_start_waits_for_a_run_that_is_stopping(tmp_path, monkeypatch):
    first = claim_run(tmp_path)
    asked = []

    class Watched(FileLock):
        def acquire(self):
            asked.append(super().acquire())
            if len(asked) == 2:  # refused twice: now the other one ends
                threading.Thread(target=first.release).start()
            return asked[-1]

    monkeypatch.setattr("refocused.train.lifecycle.run_folder.FileLock", Watched)
    claim_run(tmp_path).release()
    assert asked[:2] == [False, False] and asked[-1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"new_ids": range(469, 512)}, ", ids 469 to 511 untrained"),
        ({"cut_ids": range(469, 512)}, ", its ids 469 to 511 cut"),
        ({}, ""),
    ],
)
def test_a_start_names_the_ids_that_it_adds_or_cuts(changed, said, monkeypatch):
    monkeypatch.setattr(resume, "loss_on_random_tokens", lambda _trainer, ids: 6.25)
    log: Log = []
    engine = SimpleNamespace(load_weights=lambda _fill: None)
    reporter = SimpleNamespace(
        begin=lambda state: None, event=lambda kind, text: log.append(text.strip())
    )
    trainer = trainer_of([], engine=engine, reporter=reporter)
    origin = Origin(address="out", revision="", weights="0f")
    start = Start(origin, {}, lambda *_given: None, **changed)
    resume.start_or_resume(trainer, Selection(None, FIRST_BRANCH), start)
    words = f"weights of {origin}{said}, loss 6.2500 on random tokens"
    assert log == [f"start    from step 0, {words}"]


@pytest.mark.parametrize(("sequences", "key"), [(10_000_000, "curve"), (2_000_000, "reason")])
def test_the_run_file_and_the_expected_loss_are_written(
    tmp_path: Path, sequences: int, key: str
) -> None:
    loaded, plan = load_run("llama_1b_8xh100"), BatchPlan(16, 4, 8, 2048)  # 9,984,000 sequences
    data: Any = SimpleNamespace(sources=[SimpleNamespace(sequences=sequences)])
    write_run_files(tmp_path, loaded, plan, data)
    assert load_run(tmp_path / "run.yaml").config == loaded.config
    record = json.loads((tmp_path / "expected_loss.json").read_text())
    assert list(record) == [key]
    curve = curve_from_record(record)
    assert (curve is None) is (key == "reason")
    assert curve is None or curve[-1][0] == 19_500 * plan.tokens
