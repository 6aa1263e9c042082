"""One rank of the checkpoint benchmark: saves a real ZeRO-3 state in every way, in turns.

    checkpoint_ranks.py FOLDER --parameters 100e6 --repeats 5

Started by checkpoint.py with a launcher's variables; rank 0 prints the records as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from refocused.checkpoints.step.checkpoint_manifest import RunFacts
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import unreadable, verify
from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.data.order.position import Position
from refocused.engine.build_engine import build_engine
from refocused.engine.engine import Engine
from refocused.engine.shard_files import HostMemory
from refocused.models.causal_lm import counted_parameters
from refocused.models.families import build_model
from refocused.system.atomic_files import fsync_path
from refocused.system.world import World, join_world
from refocused.train.step.state import TrainState

WIDTH, VOCABULARY, LENGTH = 768, 512, 32
OPTIMIZER = OptimizerConfig(lr=1e-3)
FACTS = RunFacts(
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


def start_engine(parameters: int, world: World) -> Engine:
    """Build a GPT-2 of about so many parameters and make one step, which makes the moments."""
    torch.manual_seed(0)
    shape = {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_layer": max(1, round(parameters / (12 * WIDTH**2))),
        "n_head": 12,
    }
    model = build_model(
        shape,
        vocabulary=VOCABULARY,
        dropout=0.0,
        activation_checkpointing=False,
        chunk_tokens=LENGTH,
    )
    precision = PrecisionConfig(dtype="bf16")
    settings = deepspeed_config(
        batch=BatchPlan(1, 1, world.world_size, LENGTH),
        optimizer=OPTIMIZER,
        precision=precision,
        zero=ZeroConfig(stage=3),
        parameters=counted_parameters(model),
        fragment={},
    )
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=OPTIMIZER,
        precision=precision,
        world=world,
    )
    ids = torch.randint(VOCABULARY, (1, LENGTH + 1))
    engine.accumulate(ids[:, :-1], ids[:, 1:])
    engine.update(1e-3)
    return engine


class Ways:
    """The ways to save one state; each returns seconds by the name of a row."""

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
        """A whole step: hashed, flushed, with its manifest, renamed."""
        checkpointer, state = self._checkpointer()
        return {
            "ours": seconds(lambda: checkpointer.save(self._engine, state, files_done=0)),
            **self._verified(),
        }

    def in_background(self) -> dict[str, float]:
        """The same with `checkpoint.async`; what the loop waits for at the copy and the commit."""
        checkpointer, state = self._checkpointer()
        copy = seconds(lambda: checkpointer.begin(self._engine, state, files_done=0))
        begun = checkpointer._begun
        assert begun is not None
        writing = seconds(begun[1].result)
        self._world.barrier()
        commit = seconds(lambda: checkpointer.finish(wait=True))
        return {"async, stall": copy + commit, "async, until written": copy + writing + commit}

    def memory_copy(self) -> dict[str, float]:
        """A copy of the tensors' bytes alone, into memory that is there."""
        state = self._engine._engine.optimizer.state_dict()
        return {"memory copy": seconds(lambda: self._memory.copy(state))}

    def _checkpointer(self) -> tuple[Checkpointer, dict[str, Any]]:
        self._step += 1
        self._engine._engine.global_steps = self._step  # what a save checks that it holds
        checkpointer = Checkpointer(self._folder / "steps", world=self._world, facts=FACTS)
        return checkpointer, TrainState(step=self._step, position=Position(0, 0)).as_record()

    def _verified(self) -> dict[str, float]:
        """Check this rank's own part of the step again, and only read it, from the disk."""
        step = read_step(self._folder / "steps" / f"checkpoint_step_{self._step}")
        names = [name for name in step.manifest.files if f"_rank_{self._world.rank}_" in name]
        paths = [step.path / name for name in names]
        found = {}
        ways: list[tuple[str, Callable[[], object]]] = [
            ("read", lambda: list(map(read_whole, paths))),
            ("verified", lambda: verify(step, deep=True, files=names)),
            ("opened", lambda: unreadable(step, names)),  # as every save does, but from the disk
        ]
        if self._step % 4 == 1:  # every other time: the disk is another for the second of two
            ways.reverse()
        for row, action in ways:
            for path in paths:
                forget(path)
            self._world.barrier()
            found[row] = seconds(action)
        return found


def seconds(action: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


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


def main() -> None:
    """Save in every way, so many times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    chosen = parser.parse_args()
    world = join_world("cpu")
    ways = Ways(start_engine(int(chosen.parameters), world), world, chosen.folder)
    records = []
    for _ in range(chosen.repeats + 1):
        record: dict[str, float] = {}
        for way in (
            ways.torch_save,
            ways.deepspeed_save,
            ways.ours,
            ways.memory_copy,
            ways.in_background,
        ):
            if world.is_rank_0:
                for path in chosen.folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                os.sync()
            world.barrier()
            found = way()
            slowest = world.largest(list(found.values()))
            record |= dict(zip(found, slowest, strict=True))
        records.append(record)
    if world.is_rank_0:
        print(json.dumps(records[1:]))  # the first one allocates
    world.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
