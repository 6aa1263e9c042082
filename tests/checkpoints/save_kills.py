"""Saving killed at random moments, again and again: what it leaves, and what a resume finds.

    .venv/bin/python tests/checkpoints/save_kills.py FOLDER [FOLDER] --kills 100

Two ranks (threads of one process) save through the real Checkpointer and writer, every other step
in the background, and thin out what is old. A process that has imported everything forks each life,
so that it takes milliseconds.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoints.fake_owner import FACTS
from thread_ranks import on_two_ranks

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import decide_together, select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import rank_file, read_checkpoint, step_paths
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.retention import prune
from refocused.checkpoints.step.staging import clean_leftovers, leftovers, remove_checkpoint
from refocused.checkpoints.step.verify import describe, verify
from refocused.data.order.sequences import Position
from refocused.engine.engine import ShardsWritten
from refocused.engine.shard_files import HashingCheckpointEngine
from refocused.system.world import World
from refocused.train.step.state import TrainState

LONGEST_LIFE_S = 0.15  # a few saves


@dataclasses.dataclass
class Report:
    """The results; the two lists must be empty."""

    kills: int = 0
    interrupted: int = 0  # kills during a write or a removal
    saved: int = 0  # steps reported as saved
    broken: list[str] = dataclasses.field(default_factory=list)  # visible, but incomplete
    lost: list[str] = dataclasses.field(
        default_factory=list
    )  # resumes from an earlier step than reported


class SmallShards:
    """One rank's part of the state, written as the engine writes its files."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensors = {"masters": torch.full((3000,), float(rank)), "moments": torch.rand(6000)}

    def save_shards(self, folder: Path) -> ShardsWritten:
        return self.copy_shards(folder)()

    def copy_shards(self, folder: Path) -> Callable[[], ShardsWritten]:
        return lambda: self._write(folder)

    def _write(self, folder: Path) -> ShardsWritten:
        writer = HashingCheckpointEngine()
        writer.save(self._tensors, str(folder / f"zero/rank_{self._rank}_optim_states.pt"))
        writer.save({"random": torch.rand(8)}, str(folder / rank_file(self._rank)))
        return ShardsWritten(tuple(writer.written), tuple(writer.errors))


def run_kills(folders: list[Path], *, kills: int, seed: int) -> Report:
    """Kill `kills` processes that save, on one disk or on those of two machines."""
    chance, report = random.Random(seed), Report(kills=kills)
    told, longest = 0, LONGEST_LIFE_S
    for _ in range(kills):
        told = max(told, _one_life(folders, told + 1, chance.uniform(0.0, longest)))
        longest *= 1.0 if told else 1.3  # on a busy machine a save takes longer
        paths = (step_paths(folder).values() for folder in folders)
        for path in itertools.chain.from_iterable(paths):
            if problems := verify(read_checkpoint(path), deep=True):
                report.broken.append(f"{path.name}: {describe(problems)}")
        resumed = _resume(folders)
        if resumed < told:
            report.lost.append(f"{told} was saved, {resumed} is found")
        told = max(told, resumed)  # committed, but killed before it was reported
        report.interrupted += any(leftovers(folder) for folder in folders)
        for folder in folders:
            clean_leftovers(folder)
    report.saved = told
    return report


def _resume(folders: list[Path]) -> int:
    """Return the step that a resume selects, 0 if none; set later ones aside."""

    def action(world: World) -> int:
        folder = folders[world.storage_rank]
        found = decide_together(
            world, lambda: Catalog(folder), lambda whole: select_checkpoint(whole, "auto")
        )
        return found.step.step if found.step is not None else 0

    chosen = on_two_ranks(action, machines=len(folders))[0]
    if chosen.error is not None:  # killed during the very first save
        assert "all 1 are corrupt" in str(chosen.error)
    step = 0 if chosen.error is not None else int(chosen.result)
    for folder in folders:
        for number, path in step_paths(folder).items():
            if number > step:
                remove_checkpoint(path)
    return step


def _one_life(folders: list[Path], first: int, seconds: float) -> int:
    """Fork a process that saves, and kill it; return the last step it reported as saved."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        on_two_ranks(
            lambda world: _save_forever(world, folders, first, writing), machines=len(folders)
        )
        os._exit(1)  # it never exits by itself
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return max(map(int, pipe.read().split()), default=0)


def _save_forever(world: World, folders: list[Path], first: int, told: int) -> None:
    folder = folders[world.storage_rank]
    history = folder.parent / "training_metrics.jsonl"
    history.parent.mkdir(parents=True, exist_ok=True)
    checkpointer = Checkpointer(folder, world=world, facts=FACTS, history=history)
    owner = SmallShards(world.rank)
    for step in itertools.count(first):
        state = TrainState(step=step, tokens=step, position=Position(0, step), loss=1.0)
        if world.is_rank_0:
            with history.open("a") as lines:
                lines.write(f"{json.dumps({'kind': 'step', **state.as_record()})}\n")
        in_background = step % 2 == 0
        checkpointer.save(owner, state.as_record(), files_done=0, in_background=in_background)
        while in_background and checkpointer.finish(wait=False) is None:
            time.sleep(0.001)
        if world.is_rank_0:
            os.write(told, f"{step}\n".encode())
        prune(folder, world, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+", help="one disk, or those of two machines")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    report = run_kills(chosen.folders, kills=chosen.kills, seed=chosen.seed)
    print(json.dumps(dataclasses.asdict(report)))
