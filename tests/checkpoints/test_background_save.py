"""Saves whose files are written while training goes on: committed by all ranks, or by none."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

from checkpoints.fake_owner import FACTS, FakeOwner
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.step.branches import step_paths
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.data.order.position import Position
from refocused.engine.engine import ShardsWritten
from refocused.engine.state_files import read_state
from refocused.system.errors import CheckpointError
from refocused.system.world import World
from refocused.train.step.state import TrainState

STATE = TrainState(step=10, tokens=1, position=Position(0, 1), loss=1.0)


@dataclasses.dataclass(frozen=True)
class Silent(World):
    """Ranks that may not exchange anything."""

    def gather(self, value: Any) -> list[Any]:
        raise AssertionError("something was exchanged")

    def largest(self, numbers: Any) -> list[float]:
        raise AssertionError("something was exchanged")


def test_without_a_save_nothing_is_exchanged(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, world=Silent(world_size=2), facts=FACTS)
    assert checkpointer.begun_step is None
    assert checkpointer.finish(wait=False) is None
    assert checkpointer.finish(wait=True) is None


def test_a_step_is_there_when_the_slowest_rank_has_written(tmp_path: Path) -> None:
    may_write = threading.Event()

    def action(world: World) -> None:
        owner = FakeOwner(world.rank, may_write=may_write if world.rank == 1 else None)
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        checkpointer.begin(owner, STATE.as_record(), files_done=0)
        assert checkpointer.begun_step == 10
        assert checkpointer.finish(wait=False) is None
        assert step_paths(tmp_path) == {}
        world.barrier()
        may_write.set()
        saved = checkpointer.finish(wait=True)
        assert saved is not None and saved.step.path == tmp_path / "checkpoint_step_10"
        assert saved.write_seconds > 0
        assert checkpointer.begun_step is None

    results(on_two_ranks(action))
    assert verify(read_step(tmp_path / "checkpoint_step_10"), deep=True) == []


def test_what_is_saved_is_the_state_at_the_time_of_the_copy(tmp_path: Path) -> None:
    owner = FakeOwner(content=b"step 10")
    checkpointer = Checkpointer(tmp_path, world=World(), facts=FACTS)
    checkpointer.begin(owner, STATE.as_record(), files_done=0)
    owner.content = b"step 11"
    saved = checkpointer.finish(wait=True)
    assert saved is not None
    assert read_state(saved.step.path / "zero" / "rank_0.pt")["weights"] == "step 10"


def test_a_full_disk_on_one_rank_fails_the_save_on_both_and_leaves_nothing(tmp_path: Path) -> None:
    def action(world: World) -> None:
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        owner = FakeOwner(world.rank, disk_is_full=world.rank == 1)
        checkpointer.begin(owner, STATE.as_record(), files_done=0)
        try:
            checkpointer.finish(wait=True)
        finally:
            assert checkpointer.begun_step is None  # the next save may begin

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError)
        assert "No space left on device" in str(ended.error)
    assert list(tmp_path.iterdir()) == []


def test_all_but_the_manifest_is_written_before_the_commit(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, world=World(), facts=FACTS)
    checkpointer.begin(FakeOwner(), STATE.as_record(), files_done=0)
    assert checkpointer._begun is not None
    checkpointer._begun[1].result()
    (staging,) = tmp_path.iterdir()
    written = {path.name for path in staging.iterdir() if path.is_file()}
    assert written == {"trainer.json", "run.yaml", "model.json"}
    assert checkpointer.finish(wait=False) is not None


def test_a_step_that_cannot_be_described_fails_on_both_ranks(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Destroyer(FakeOwner):
        def save_shards(self, folder: Path) -> ShardsWritten:
            written = super().save_shards(folder)
            if self.rank == 0:
                (folder / "trainer.json").mkdir()
            return written

    def action(world: World) -> None:
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        checkpointer.save(Destroyer(world.rank), STATE.as_record(), files_done=0)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError)
        assert "Is a directory" in str(ended.error)
    assert list(tmp_path.iterdir()) == []
