"""Two machines with own disks, as two threads with a folder each."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.fake_owner import FACTS, FakeOwner
from checkpoints.step_samples import copied, state_file
from thread_ranks import Ended, on_two_ranks

from refocused.bucket.bucket import crc32c_of
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.step.checkpoint_directory import Checkpoint, read_checkpoint
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.data.order.sequences import Position
from refocused.engine.engine import ShardsWritten
from refocused.engine.state_files import WrittenFile, read_state
from refocused.system.world import World
from refocused.train.step.state import TrainState

OF_ALL = "zero/mp_rank_00_model_states.pt"


@dataclasses.dataclass
class PartOwner(FakeOwner):
    """As under ZeRO 2: rank 0 writes the weights, and all ranks read them."""

    seen: tuple[str, ...] = ()

    def save_shards(self, folder: Path) -> ShardsWritten:
        written = super().save_shards(folder)
        if self.rank == 0 and not written.errors:
            weights = folder / OF_ALL
            step = int(re.findall(r"\d+", folder.name)[0])
            weights.write_bytes(state_file({"module": "all weights", "global_steps": step}))
            file = WrittenFile(weights, weights.stat().st_size, crc32c_of(weights))
            written = ShardsWritten((*written.files, file), ())
        return written

    def load_shards(self, folder: Path) -> None:
        assert read_state(folder / OF_ALL)["module"] == "all weights"
        self.seen = tuple(sorted(path.name for path in (folder / "zero").iterdir()))
        super().load_shards(folder)


def state(step: int) -> dict[str, Any]:
    return TrainState(step=step, tokens=step, position=Position(0, step), loss=1.0).as_record()


class Machines:
    """The disks of two machines."""

    def __init__(self, root: Path) -> None:
        self.folders = [root / "machine_0" / "checkpoints", root / "machine_1" / "checkpoints"]

    def do(self, action: Callable[[World, Path], Any]) -> list[Ended]:
        return on_two_ranks(lambda world: action(world, self.folders[world.rank]), machines=2)

    def save(self, *steps: int, full: int | None = None) -> list[Ended]:
        """Save steps; the disk of machine `full` has no room."""

        def action(world: World, folder: Path) -> Path:
            owner = PartOwner(
                world.rank,
                content=f"weights of {world.rank}".encode(),
                disk_is_full=world.rank == full,
            )
            checkpointer = Checkpointer(folder, world=world, metadata=FACTS)
            saved = [checkpointer.save(owner, state(step), files_done=0) for step in steps][-1]
            assert saved is not None
            return saved.path

        return self.do(action)

    def part(self, node: int, step: int) -> Checkpoint:
        return read_checkpoint(self.folders[node] / f"checkpoint_step_{step}")

    def mirror(self, remote: RemoteCheckpoints, *steps: int) -> None:
        for step in steps:
            outcomes = [copied(remote, self.part(node, step)) for node in (0, 1, 0)]
            assert outcomes == [False, False, True]
