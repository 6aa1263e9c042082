"""The parts of a checkpoint without an engine: one small file per rank."""

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from checkpoints.step_samples import state_file

from refocused.bucket.bucket import crc32c_of
from refocused.checkpoints.step.checkpoint_directory import rank_file
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.engine.engine import ShardsWritten
from refocused.engine.state_files import WrittenFile, read_state

FACTS = RunMetadata(
    run="sample",
    zero_stage=3,
    dtype="bf16",
    versions={"torch": "2.13"},
    data_fingerprint="f00d",
    data_order="seed 1",
    parameters=1000,
    run_yaml="run: {name: sample}\n",
    model_json='{"model_type": "gpt2"}',
)


@dataclasses.dataclass
class FakeOwner:
    """One rank's part of the state; its disk may be full or slow, or lose a file."""

    rank: int = 0
    content: bytes = b"weights"
    disk_is_full: bool = False
    tells_too_much: bool = False
    writes_an_object: bool = False  # which no reader may unpickle
    loaded: bytes | None = None
    may_write: threading.Event | None = None
    resharded_from: int | None = None
    steps_made: int = 0

    def save_shards(self, folder: Path) -> ShardsWritten:
        shard, state = folder / f"zero/rank_{self.rank}.pt", folder / rank_file(self.rank)
        if self.disk_is_full:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(shard))
            return ShardsWritten((), (full,))
        weights = Path() if self.writes_an_object else self.content.decode()
        shard.write_bytes(state_file({"weights": weights}))
        state.write_bytes(state_file({"random": 1}))
        (folder / f"zero/notes_{self.rank}.txt").write_bytes(b"written by no hasher")
        size = shard.stat().st_size + self.tells_too_much
        files = (
            WrittenFile(shard, size, crc32c_of(shard)),
            WrittenFile(state, state.stat().st_size, crc32c_of(state)),
        )
        return ShardsWritten(files, ())

    def copy_shards(self, folder: Path) -> Callable[[], ShardsWritten]:
        copy = dataclasses.replace(self)

        def write() -> ShardsWritten:
            assert copy.may_write is None or copy.may_write.wait(20)
            return copy.save_shards(folder)

        return write

    def load_shards(self, folder: Path) -> None:
        shard = read_state(folder / "zero" / f"rank_{self.rank}.pt")
        self.loaded = shard["weights"].encode()
        self.steps_made = int(json.loads((folder / "trainer.json").read_text())["step"])

    def load_resharded(self, folder: Path, *, ranks: int) -> None:
        self.resharded_from = ranks
        self.load_shards(folder)
