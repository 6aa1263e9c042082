"""Ranks that do not do alike during a save: one is slow, one fails."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from checkpoints.fake_owner import FACTS, FakeOwner
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.step.branches import step_paths
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.data.order.position import Position
from refocused.engine.engine import ShardsWritten
from refocused.system.world import World
from refocused.train.step.state import TrainState

STATE = TrainState(step=10, tokens=1, position=Position(0, 1), loss=1.0)


@dataclasses.dataclass
class UnevenOwner(FakeOwner):
    """Rank 1 writes only after rank 0 has written everything, and looks what is visible then."""

    folder: Path = Path()
    first_is_done: threading.Event = dataclasses.field(default_factory=threading.Event)
    visible: list[Path] = dataclasses.field(default_factory=list)
    fails: bool = False

    def save_shards(self, folder: Path) -> ShardsWritten:
        if self.rank == 1:
            assert self.first_is_done.wait(20)
            self.visible += step_paths(self.folder).values()
            if self.fails:
                raise ZeroDivisionError("a defect on one rank")
        written = super().save_shards(folder)
        if self.rank == 0:
            self.first_is_done.set()
        return written


def test_the_commit_waits_for_a_slow_rank(tmp_path: Path) -> None:
    done, visible = threading.Event(), list[Path]()

    def action(world: World) -> Path:
        owner = UnevenOwner(world.rank, folder=tmp_path, first_is_done=done, visible=visible)
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        return checkpointer.save(owner, STATE.as_record(), files_done=0).step.path

    (path, _) = results(on_two_ranks(action))
    assert visible == []
    assert verify(read_step(path), deep=True) == []


def test_a_defect_on_one_rank_ends_both_and_shows_no_step(tmp_path: Path) -> None:
    done = threading.Event()

    def action(world: World) -> Path:
        owner = UnevenOwner(world.rank, folder=tmp_path, first_is_done=done, fails=True)
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        return checkpointer.save(owner, STATE.as_record(), files_done=0).step.path

    first, second = on_two_ranks(action)
    assert isinstance(second.error, ZeroDivisionError)
    assert isinstance(first.error, threading.BrokenBarrierError)  # the lost connection's stand-in
    assert step_paths(tmp_path) == {}
