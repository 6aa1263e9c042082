"""Kill -9 at random moments of saves and uploads: no visible checkpoint is ever broken."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.fake_owner import FACTS
from checkpoints.step_samples import PREFIX, START, make_step
from fakes import Emulator, Fault
from kills import Victim, report_of
from thread_ranks import on_two_ranks

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copies import verify_remote
from refocused.checkpoints.mirror.mirror import MirrorSettings
from refocused.checkpoints.mirror.mirror_loop import MirrorLoop
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import decide_together, select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import (
    name_of,
    rank_file,
    read_checkpoint,
    step_paths,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, SaveReason
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.retention import prune
from refocused.checkpoints.step.staging import clean_leftovers, leftovers, remove_checkpoint
from refocused.checkpoints.step.verify import describe, verify
from refocused.data.order.sequences import Position
from refocused.engine.engine import ShardsWritten
from refocused.engine.shard_files import HashingCheckpointEngine
from refocused.metrics.history import HISTORY
from refocused.system.processes import this_process
from refocused.system.world import World
from refocused.train.step.state import TrainState

pytestmark = pytest.mark.slow

HERE = "checkpoints.test_checkpoint_kills"
PATIENCE_S = 60.0
AGAIN_EVERY = 4  # kills after which a step whose upload is not complete is saved once more


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


class Saves(Victim):
    """Two ranks (threads of one process) save, on one disk or on those of two machines.

    They use the real Checkpointer and writer, every other step in the background, and remove what
    is old. The report's `broken` are visible but incomplete, `lost` were reported as saved but are
    not resumed; both must stay empty.
    """

    def __init__(self, *folders: str) -> None:
        super().__init__()
        self.folders = [Path(folder) for folder in folders]
        self.report |= {"saved": 0, "broken": [], "lost": []}

    def on_ranks(self, action: Callable[[World, Path], object]) -> list[Any]:
        machines = len(self.folders)
        return on_two_ranks(
            lambda world: action(world, self.folders[world.storage_rank]), machines=machines
        )

    def work(self) -> None:
        self.on_ranks(self.save_forever)
        os._exit(1)  # it never exits by itself

    def save_forever(self, world: World, folder: Path) -> None:
        history = folder.parent / "training_metrics.jsonl"
        history.parent.mkdir(parents=True, exist_ok=True)
        checkpointer = Checkpointer(folder, world=world, metadata=FACTS, history=history)
        owner = SmallShards(world.rank)
        for step in itertools.count(self.report["saved"] + 1):
            state = TrainState(step=step, tokens=step, position=Position(0, step), loss=1.0)
            if world.is_rank_0:
                with history.open("a") as lines:
                    lines.write(f"{json.dumps({'kind': 'step', **state.as_record()})}\n")
            in_background = step % 2 == 0
            checkpointer.save(owner, state.as_record(), files_done=0, in_background=in_background)
            while in_background and checkpointer.finish(wait=False) is None:
                time.sleep(0.001)
            if world.is_rank_0:
                self.tell(step)
            prune(folder, world, keep=2)

    def check(self) -> None:
        saved = max([self.report["saved"], *self.told])
        if not saved:
            self.longest_s *= 1.3  # on a busy machine a save takes longer
        paths = (step_paths(folder).values() for folder in self.folders)
        for path in itertools.chain.from_iterable(paths):
            if problems := verify(read_checkpoint(path), deep=True):
                self.report["broken"].append(f"{path.name}: {describe(problems)}")
        resumed = self.resume()
        if resumed < saved:
            self.report["lost"].append(f"{saved} was saved, {resumed} is resumed")
        self.report["saved"] = max(saved, resumed)  # committed, but killed before it was told
        self.report["interrupted"] += any(leftovers(folder) for folder in self.folders)
        for folder in self.folders:
            clean_leftovers(folder)

    def resume(self) -> int:
        """Return the step that a resume selects, 0 if none; remove later ones."""

        def select(world: World, folder: Path) -> int:
            selected = decide_together(
                world, lambda: Catalog(folder), lambda whole: select_checkpoint(whole, "auto")
            )
            return selected.checkpoint.step if selected.checkpoint is not None else 0

        selected = self.on_ranks(select)[0]
        if selected.error is not None:  # killed during the very first save
            assert "all 1 are corrupt" in str(selected.error)
        step = 0 if selected.error is not None else int(selected.result)
        for folder in self.folders:
            for number, path in step_paths(folder).items():
                if number > step:
                    remove_checkpoint(path)
        return step

    def finish(self) -> None:
        for folder in self.folders:  # the end of the metrics is in each
            steps = [read_checkpoint(path) for path in step_paths(folder).values()]
            assert steps and all(HISTORY in step.manifest.files for step in steps)


class Uploads(Victim):
    """The mirror's own loop uploads a new step in each life.

    Now and then a step is saved again, as by a run that went back, so that its copy is replaced.
    The report's `broken` are committed but incomplete; `committed` equal the disk in the end.
    """

    longest_s = 0.6  # about one step's upload

    def __init__(self, folder: str, bucket: str) -> None:
        super().__init__()
        self.settings = MirrorSettings(
            run=Path(folder), bucket=bucket, prefix=PREFIX, training=this_process(),
            scan_seconds=0.01,
        )  # fmt: skip
        self.checkpoints = self.settings.files.checkpoints
        self.checkpoints.mkdir(parents=True)
        self.remote = RemoteCheckpoints(open_bucket(bucket), PREFIX)
        self.report |= {"broken": [], "committed": 0}

    @property
    def number(self) -> int:
        """Of the present life."""
        return int(self.report["kills"]) + 1

    def save(self, step: int, **changes: object) -> None:
        reasons = [SaveReason.EPOCH]  # none is skipped
        make_step(self.checkpoints, step, size=200_000, tiers=reasons, **changes)

    def start(self) -> int:
        self.save(self.number)
        if self.number % AGAIN_EVERY == 0:  # the oldest without a marker; others are never replaced
            marked = self.remote.scan()
            steps = range(1, self.number)
            again = next(
                s for s in (*steps, self.number) if COMMITTED not in marked.get(name_of(s), {})
            )
            remove_checkpoint(self.checkpoints / name_of(again))
            created = START.replace(year=START.year + 1 + self.number)
            self.save(again, seed=1000 + self.number, token="again", created=created)
        return super().start()

    def work(self) -> None:
        log = os.open(self.settings.run / "mirror.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        MirrorLoop(self.settings).run()

    def await_moment(self, chance: random.Random) -> None:
        if self.number % 3:
            super().await_moment(chance)
            return
        deadline = time.monotonic() + PATIENCE_S  # on a slow machine too some uploads have begun
        while not self.remote.objects(name_of(self.number)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        unmarked = False
        for name, objects in self.remote.scan().items():
            if COMMITTED not in objects:
                unmarked = True
            elif problems := verify_remote(self.remote, name, deep=True):
                self.report["broken"].append(f"{name}: {describe(problems)}")
        self.report["interrupted"] += unmarked

    def finish(self) -> None:
        self.settings.files.drain.write_text("finish")
        mirror = Victim.start(self)
        deadline = time.monotonic() + PATIENCE_S
        while os.waitpid(mirror, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "the mirror did not finish its queue"
            time.sleep(0.01)
        for name in map(name_of, range(1, self.number)):
            objects = self.remote.objects(name)
            whole = COMMITTED in objects and verify_remote(self.remote, name, deep=True) == []
            local = (self.checkpoints / name / MANIFEST).read_bytes()
            same = whole and self.remote.bucket.read(objects[MANIFEST].name) == local
            self.report["committed"] += same


@pytest.mark.parametrize(("machines", "kills"), [(1, 100), (2, 40)])
def test_saving(tmp_path: Path, machines: int, kills: int) -> None:
    """Also on two machines that share no disk."""
    folders = [tmp_path / f"machine_{node}" / "checkpoints" for node in range(machines)]
    report = report_of(f"{HERE}:Saves", *folders, kills=kills)
    assert report["interrupted"] > 0  # some kills interrupted a write or a removal
    assert report["saved"] > 0
    assert (report["broken"], report["lost"]) == ([], [])


@pytest.mark.bucket
def test_uploading(tmp_path: Path, emulator: Emulator) -> None:
    emulator.proxy.script(lambda request: request.is_upload, Fault(lose_reply=True), times=3)
    report = report_of(f"{HERE}:Uploads", tmp_path / "run", emulator.url, kills=30)
    assert report["interrupted"] > 0
    assert (report["broken"], report["committed"]) == ([], 30)
