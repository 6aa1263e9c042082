"""Compare our saving and verifying of a checkpoint with that of others, in one run.

    .venv/bin/python benchmarks/checkpoint.py [--parameters 100e6] [--repeats 5] [--json FILE]

Two ranks save a real ZeRO-3 state by `torch.save`, by DeepSpeed, by us, and in the background, and
verify it. Everything is measured in turns, and the medians are compared. Downloads are those of
sync.py, and step_whole.py trains with a mirror.
"""

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from measuring import (
    ROOT,
    WORK,
    Column,
    Record,
    medians,
    parser_of,
    say,
    seconds,
    table,
    write_report,
)
from step_contenders import OPTIMIZER, Setup, engine_of

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.verify import unreadable, verify
from refocused.config.optimization import PrecisionConfig
from refocused.data.order.sequences import Position
from refocused.engine.engine import Engine
from refocused.engine.shard_files import HostMemory
from refocused.system.atomic_files import fsync_path
from refocused.system.world import World, join_world
from refocused.train.step.state import TrainState

sys.path.insert(0, str(ROOT / "tests"))

RANKS = 2
WIDTH = 768
# Each row: its reference and the maximum ratio.
TARGETS = {
    "ours": ("DeepSpeed, then fsync", 1.1),  # which waits for the disk, as ours does
    "async, stall": ("memory copy", 2.0),
    "verified": ("read", 1.1),
}
COLUMNS = (
    Column("wall_s", "seconds", "{:.3f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("target", "at most", "{:.2f}"),
)
FACTS = RunMetadata(
    run="benchmark",
    zero_stage=3,
    dtype="bf16",
    versions={},
    data_fingerprint="",
    data_order="",
    parameters=0,
    run_yaml="",
    model_json="{}",
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__, repeats=5)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        save_in_every_way(chosen.rank, int(chosen.parameters), chosen.repeats)
    chosen.work.mkdir(parents=True, exist_ok=True)
    say(f"{RANKS} ranks with {chosen.parameters / 1e6:.0f} M parameters")
    with tempfile.TemporaryDirectory(dir=chosen.work) as folder:
        saves = measure_saves(Path(folder))
    found = medians(saves)
    rows = {name: compared(name, found) for name in found}
    # DeepSpeed's own save does not wait for the disk.
    rows["ours, to DeepSpeed alone"] = {
        "wall_s": found["ours"],
        "ratio": found["ours"] / found["DeepSpeed"],
    }
    title = f"{chosen.parameters / 1e6:.0f} M parameters on {RANKS} ranks, of {chosen.repeats}"
    print(table(rows, COLUMNS, title=title))
    write_report(chosen, {"saves": saves, "rows": rows})


def compared(name: str, found: Record) -> Record:
    """Return the row of a measurement, with its ratio to the reference."""
    if name not in TARGETS:
        return {"wall_s": found[name]}
    other, target = TARGETS[name]
    return {"wall_s": found[name], "ratio": found[name] / found[other], "target": target}


def measure_saves(folder: Path) -> list[Record]:
    """Start the ranks with the same arguments; return the seconds of the slowest one, by row."""
    from ranks import Ranks

    place = folder / "saves"
    place.mkdir()
    command = [__file__, *sys.argv[1:], "--rank", str(place)]
    ended = Ranks(RANKS, command, folder=folder).wait(3600)
    if any(ended.codes):
        raise SystemExit(f"a rank has failed:\n{ended.everything[-2000:]}")
    records: list[Record] = json.loads(ended.out[0].splitlines()[-1])
    return records


def save_in_every_way(folder: Path, parameters: int, repeats: int) -> None:
    """Run one rank: save by every method several times; rank 0 prints the seconds."""
    world = join_world("cpu")
    ways = Ways(start_engine(parameters, world), world, folder)
    records = []
    for _ in range(repeats + 1):
        record: dict[str, float] = {}
        for way in (
            ways.torch_save,
            ways.deepspeed_save,
            ways.ours,
            ways.memory_copy,
            ways.in_background,
        ):
            if world.is_rank_0:
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                os.sync()
            world.barrier()
            found = way()
            record |= dict(zip(found, world.largest(list(found.values())), strict=True))
        records.append(record)
    if world.is_rank_0:
        print(json.dumps(records[1:]), flush=True)  # the first one allocates
    world.barrier()
    os._exit(0)


def start_engine(parameters: int, world: World) -> Engine:
    """Build a GPT-2 of about the given size, and take one step to create the moments."""
    layers = max(1, round(parameters / (12 * WIDTH**2)))
    setup = Setup(layers, WIDTH, 512, 32, 1, 1, precision=PrecisionConfig(dtype="bf16"))
    engine = engine_of(setup, setup.model(), 3, world)
    engine.accumulate(*setup.batch())
    engine.update(OPTIMIZER.lr)
    return engine


class Ways:
    """Methods to save one state; each returns seconds by row name."""

    def __init__(self, engine: Engine, world: World, folder: Path) -> None:
        self._engine, self._world, self._folder = engine, world, folder
        self._step = 0
        self._memory = HostMemory()

    def torch_save(self) -> dict[str, float]:
        """`torch.save` of each rank's optimizer state: no hash, no fsync, no commit."""
        content = self._engine._engine.optimizer.state_dict()
        path = self._folder / f"plain-{self._world.rank}.pt"
        return {"torch.save": seconds(lambda: torch.save(content, path))}

    def deepspeed_save(self) -> dict[str, float]:
        """DeepSpeed's own `save_checkpoint` with its own writer: no hash; with fsync besides."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        engine = self._engine._engine
        ours, engine.checkpoint_engine = engine.checkpoint_engine, TorchCheckpointEngine()
        engine.checkpoint_engine.zipfile_serialization = True
        folder = self._folder / "theirs"
        try:
            saving = seconds(lambda: engine.save_checkpoint(str(folder), tag="zero"))
            paths = list((folder / "zero").glob(f"*_rank_{self._world.rank}_*"))
            syncing = seconds(lambda: list(map(fsync_path, paths)))
            return {"DeepSpeed": saving, "DeepSpeed, then fsync": saving + syncing}
        finally:
            engine.checkpoint_engine = ours

    def ours(self) -> dict[str, float]:
        """A complete checkpoint: hashed, flushed, with its manifest, renamed."""
        checkpointer, state = self._checkpointer()
        return {
            "ours": seconds(lambda: checkpointer.save(self._engine, state, files_done=0)),
            **self._verified(),
        }

    def in_background(self) -> dict[str, float]:
        """The same with `checkpoint.async`; what the loop waits for at the copy and the commit."""
        checkpointer, state = self._checkpointer()
        begin = functools.partial(checkpointer.save, files_done=0, in_background=True)
        copy = seconds(lambda: begin(self._engine, state))
        assert checkpointer._pending is not None
        written = checkpointer._pending[-1].result
        writing = seconds(written)
        self._world.barrier()
        commit = seconds(lambda: checkpointer.finish(wait=True))
        return {"async, stall": copy + commit, "async, until written": copy + writing + commit}

    def memory_copy(self) -> dict[str, float]:
        """A copy of the tensors' bytes alone, into memory that is there."""
        state = self._engine._engine.optimizer.state_dict()
        return {"memory copy": seconds(lambda: self._memory.copy(state))}

    def _checkpointer(self) -> tuple[Checkpointer, dict[str, Any]]:
        self._step += 1
        self._engine._engine.global_steps = self._step  # checked by a save
        checkpointer = Checkpointer(self._folder / "steps", world=self._world, metadata=FACTS)
        return checkpointer, TrainState(step=self._step, position=Position(0, 0)).as_record()

    def _verified(self) -> dict[str, float]:
        """Verify this rank's part of the checkpoint, and also only read it, from the disk."""
        step = read_checkpoint(self._folder / "steps" / f"checkpoint_step_{self._step}")
        names = [name for name in step.manifest.files if f"_rank_{self._world.rank}_" in name]
        paths = [step.path / name for name in names]
        found = {}
        ways: list[tuple[str, Callable[[], object]]] = [
            ("read", lambda: list(map(read_whole, paths))),
            ("verified", lambda: verify(step, deep=True, files=names)),
            ("opened", lambda: unreadable(step, names)),  # as every save does, but from the disk
        ]
        if (
            self._step % 4 == 1
        ):  # alternate: the second of two reads finds the disk in another state
            ways.reverse()
        for row, action in ways:
            for path in paths:
                forget(path)
            self._world.barrier()
            found[row] = seconds(action)
        return found


def read_whole(path: Path) -> None:
    """Read a file in large blocks and do nothing with it."""
    with path.open("rb", buffering=0) as file:
        block = bytearray(4 << 20)
        while file.readinto(block):
            pass


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache, so that the next read is one of the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    main()
