"""Saves and loads of all ranks: synchronous and in the background, all or nothing."""

import dataclasses
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner
from checkpoints.step_samples import reseal
from thread_ranks import Ended, on_two_ranks, results

from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.checkpoint_directory import read_checkpoint, step_paths
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.staging import Staging
from refocused.checkpoints.step.verify import verify
from refocused.data.order.sequences import Position
from refocused.engine.engine import ShardsWritten
from refocused.engine.state_files import UnreadableFileError, read_state
from refocused.system.errors import CheckpointError
from refocused.system.world import World
from refocused.train.step.state import TrainState

NAME = "checkpoint_step_10"
STATE = TrainState(
    step=10,
    tokens=1234,
    position=Position(1, 6),
    loss=2.5,
    validation_loss=2.75,
    bits_per_byte=1.25,
    best_loss=2.75,
    best_step=10,
    seconds=9.0,
    validation_step=10,
)
SAVED_HOW = pytest.mark.parametrize("in_background", [False, True], ids=["at once", "behind"])


def save(
    folder: Path,
    *,
    owner: FakeOwner | None = None,
    metadata: RunMetadata = FACTS,
    world: World | None = None,
    in_background: bool = False,
    **changes: Any,
) -> Path:
    checkpointer = Checkpointer(folder, world=world or World(), metadata=metadata)
    record = dataclasses.replace(STATE, **changes).as_record()
    saved = checkpointer.save(
        owner or FakeOwner(), record, files_done=4, in_background=in_background
    )
    try:
        saved = checkpointer.finish(wait=True) or saved
    finally:
        assert checkpointer.pending_step is None  # the next save may begin
    assert saved is not None and checkpointer.write_seconds > 0
    return saved.path


def save_on_two(folder: Path, *owners: FakeOwner, in_background: bool = False) -> list[Ended]:
    def action(world: World) -> Path:
        owner = owners[world.rank] if owners else FakeOwner(world.rank)
        return save(folder, owner=owner, world=world, in_background=in_background)

    return on_two_ranks(action)


def load(folder: Path, *, owner: FakeOwner | None = None, metadata: RunMetadata = FACTS) -> Any:
    owner = owner or FakeOwner()
    checkpointer = Checkpointer(folder, world=World(), metadata=metadata)
    step = read_checkpoint(folder / NAME)
    exact = changes_since(step, metadata=metadata, world_size=1, allowed=()).load_mode == "exact"
    record = checkpointer.load(owner, step, exact=exact)
    return TrainState.from_record(record), owner.loaded


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_and_its_manifest_round_trip(tmp_path: Path) -> None:
    metadata = dataclasses.replace(FACTS, tokenizer={"tokenizer.json": b"{}"})
    path = save(tmp_path, owner=FakeOwner(content=b"trained"), metadata=metadata)
    assert path == tmp_path / NAME
    step = read_checkpoint(path)
    manifest = step.manifest
    assert manifest.model_dump(exclude={"files", "created"}) == {
        "schema_version": 2,
        "run": "sample",
        "run_id": "",
        "branch": 1,
        "ancestry": (),
        "name": NAME,
        "step": 10,
        "epoch": 1,
        "files_done": 4,
        "world_size": 1,
        "zero_stage": 3,
        "dtype": "bf16",
        "versions": {"torch": "2.13"},
        "tiers": ("rolling",),
        "data_fingerprint": "f00d",
        "data_order": "seed 1",
        "data_mixture": "",
        "parameters": 1000,
        "validation_loss": 2.75,
        "validation_set": "",
        "bits_per_byte": 1.25,
        "loss": 2.5,
        "tokens": 1234,
    }
    assert abs(manifest.created.timestamp() - time.time()) < 60
    assert set(manifest.files) == {
        *("trainer.json", "run.yaml", "model.json", "tokenizer.json"),
        *("zero/rank_0.pt", "zero/notes_0.txt", "ranks/rank_00000.pt"),
    }
    assert verify(step, deep=True) == []
    described = {name: (path / name).read_bytes() for name in metadata.files()}
    assert described == metadata.files()
    other = dataclasses.replace(FACTS, run="other", versions={"torch": "2.99"})
    assert load(tmp_path, metadata=other) == (STATE, b"trained")


def test_a_non_finite_loss_is_saved_as_none(tmp_path: Path) -> None:
    save(tmp_path, validation_loss=float("nan"), bits_per_byte=float("nan"))
    manifest = read_checkpoint(tmp_path / NAME).manifest
    assert (manifest.validation_loss, manifest.bits_per_byte) == (None, None)


@SAVED_HOW
@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_both_and_leaves_nothing(
    tmp_path: Path, failing: int, in_background: bool
) -> None:
    owners = [FakeOwner(rank, disk_is_full=rank == failing) for rank in range(2)]
    for ended in save_on_two(tmp_path, *owners, in_background=in_background):
        assert isinstance(ended.error, CheckpointError)
        message = str(ended.error)
        assert message.startswith(f"{NAME} was not saved: No space left on device (")
        assert re.search(rf"zero/rank_{failing}\.pt; \S+ GB free\).* Make room on that", message)
    assert left_in(tmp_path) == []


def test_a_truncated_file_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not saved completely: .*zero/rank_0\.pt"):
        save(tmp_path, owner=FakeOwner(tells_too_much=True))
    assert left_in(tmp_path) == []


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, owner=FakeOwner(content=b"first"))
    with pytest.raises(CheckpointError, match=f"{NAME} already exists"):
        save(tmp_path, owner=FakeOwner(content=b"second"))
    assert left_in(tmp_path) == [NAME]
    assert load(tmp_path)[1] == b"first"


def test_a_save_without_room_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, world=World(), metadata=FACTS)
    checkpointer.save(FakeOwner(content=b"x" * 100_000), STATE.as_record(), files_done=0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=110_000))
    later = dataclasses.replace(STATE, step=20).as_record()
    with pytest.raises(CheckpointError, match=r"_step_20 was not saved: .* lower") as told:
        checkpointer.save(FakeOwner(), later, files_done=0)
    assert str(tmp_path) in str(told.value)
    assert left_in(tmp_path) == [NAME]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=130_000))
    saved = checkpointer.save(FakeOwner(), later, files_done=0)
    assert saved is not None and saved.path.exists()


def test_an_uncreatable_folder_fails_the_save_on_both_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for ended in save_on_two(tmp_path / "file" / "checkpoints"):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert f"{NAME} was not saved: Not a directory" in str(ended.error)


def test_a_failing_clean_up_fails_the_save_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)
    for ended in save_on_two(tmp_path, FakeOwner(0), FakeOwner(1, disk_is_full=True)):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert "No space left on device" in str(ended.error)
    assert [name[:5] for name in left_in(tmp_path)] == [".tmp-"]  # the next start removes it


def test_a_failing_description_fails_the_save_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "describe", lambda *_, **__: (tmp_path / "none").stat())
    for ended in save_on_two(tmp_path):
        assert isinstance(ended.error, CheckpointError), ended.error
    assert left_in(tmp_path) == []


@SAVED_HOW
def test_a_file_that_cannot_be_read_back_fails_the_save_on_both_ranks(
    tmp_path: Path, in_background: bool
) -> None:
    owners = FakeOwner(0), FakeOwner(1, writes_an_object=True)
    for ended in save_on_two(tmp_path, *owners, in_background=in_background):
        assert isinstance(ended.error, UnreadableFileError), ended.error
        text = str(ended.error)
        assert f"{NAME} was not saved: files of rank 1 cannot be read back" in text
        assert "zero/rank_1.pt cannot be loaded: it contains pathlib" in text
    assert left_in(tmp_path) == []


@dataclasses.dataclass
class UnevenOwner(FakeOwner):
    """Let rank 1 write after rank 0 has finished, and see what is visible then."""

    first_is_done: threading.Event = dataclasses.field(default_factory=threading.Event)
    visible: list[Path] = dataclasses.field(default_factory=list)
    fails: bool = False

    def save_shards(self, folder: Path) -> ShardsWritten:
        if self.rank == 1:
            assert self.first_is_done.wait(20)
            self.visible += step_paths(folder.parent).values()
            if self.fails:
                raise ZeroDivisionError("a defect on one rank")
        written = super().save_shards(folder)
        if self.rank == 0:
            self.first_is_done.set()
        return written


def test_the_commit_waits_for_a_slow_rank(tmp_path: Path) -> None:
    first = UnevenOwner(0)
    second = UnevenOwner(1, first_is_done=first.first_is_done)
    (path, _) = results(save_on_two(tmp_path, first, second))
    assert second.visible == []
    assert verify(read_checkpoint(path), deep=True) == []


def test_an_exception_on_one_rank_ends_both_without_a_checkpoint(tmp_path: Path) -> None:
    first = UnevenOwner(0)
    second = UnevenOwner(1, first_is_done=first.first_is_done, fails=True)
    one, other = save_on_two(tmp_path, first, second)
    assert isinstance(other.error, ZeroDivisionError)
    assert isinstance(one.error, threading.BrokenBarrierError)  # stands for a lost connection
    assert step_paths(tmp_path) == {}


def test_without_a_save_ranks_do_not_communicate(tmp_path: Path) -> None:
    alone = World(world_size=2)  # cannot communicate
    checkpointer = Checkpointer(tmp_path, world=alone, metadata=FACTS)
    assert [checkpointer.finish(wait=wait) for wait in (False, True)] == [None, None]


def test_a_checkpoint_appears_once_the_slowest_rank_has_written(tmp_path: Path) -> None:
    may_write = threading.Event()

    def action(world: World) -> None:
        owner = FakeOwner(world.rank, may_write=may_write if world.rank == 1 else None)
        checkpointer = Checkpointer(tmp_path, world=world, metadata=FACTS)
        checkpointer.save(owner, STATE.as_record(), files_done=0, in_background=True)
        owner.content = b"step 11"  # the state at the copy is saved
        assert checkpointer.pending_step == 10
        assert checkpointer.finish(wait=False) is None
        assert step_paths(tmp_path) == {}
        world.barrier()
        may_write.set()
        assert checkpointer.finish(wait=True) is not None

    results(on_two_ranks(action))
    assert verify(read_checkpoint(tmp_path / NAME), deep=True) == []
    for rank in range(2):
        assert read_state(tmp_path / NAME / f"zero/rank_{rank}.pt")["weights"] == "weights"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "resharded"])
def test_an_unloadable_file_is_reported_before_any_rank_loads(tmp_path: Path, exact: bool) -> None:
    shard = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    results(save_on_two(tmp_path))
    reseal(tmp_path / NAME, shard, b"no such file")
    owners = [FakeOwner(0), FakeOwner(1)]

    def action(world: World) -> object:
        checkpointer = Checkpointer(tmp_path, world=world, metadata=FACTS)
        return checkpointer.load(owners[world.rank], read_checkpoint(tmp_path / NAME), exact=exact)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert f"{NAME} cannot be loaded: {shard} cannot be" in str(ended.error)
        assert str(ended.error).startswith("rank 1: ") is exact
    assert [owner.loaded for owner in owners] == [None, None]


def test_loaded_states_must_match_the_manifests_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(FakeOwner, "load_shards", lambda *_: None)
    with pytest.raises(
        CheckpointError, match=r"step 10, but the states loaded from it are of step 9"
    ):
        load(tmp_path, owner=FakeOwner(steps_made=9))
