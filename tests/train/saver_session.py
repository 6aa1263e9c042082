"""A saver with a real folder and fakes of the parts around it."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from checkpoints.fake_owner import FACTS, FakeOwner
from thread_ranks import on_two_ranks, results
from train.run_fakes import Clock, FakeReporter, Log, watch_of

from refocused.checkpoints.mirror.mirror import Mirroring, MirrorStatus
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH, Branch, saved_steps
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.config.outputs import CheckpointConfig
from refocused.metrics.throughput import Throughput
from refocused.system.processes import this_process
from refocused.system.world import World
from refocused.train.step.saver import Saver
from refocused.train.step.state import TrainState


def said_by_mirror(**facts: Any) -> MirrorStatus:
    return MirrorStatus(bucket="b", prefix="p", process=this_process(), heartbeat=0.0, **facts)


@dataclasses.dataclass
class FakeMirror:
    """A fake mirror that a test controls."""

    log: Log
    said: MirrorStatus | None = None
    drains: bool | None = True  # None: it never finishes

    def start(self, branch: Branch | None = None) -> None:
        self.log.append("mirror started")

    def ensure_alive(self) -> bool:
        self.log.append("mirror looked after")
        return False

    def status(self) -> MirrorStatus | None:
        return self.said

    def request_drain(self, timeout_s: float) -> None:
        self.log.append(f"drain {timeout_s:.0f}")

    def await_drain(self, slice_s: float, progress: Callable[[Any], None]) -> bool | None:
        return self.drains


class Session:
    """A saver with a real folder, on a disk that a test can fill."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        mirror: FakeMirror | None = None,
        keep: int = 2,
        max_failed_saves: int = 3,
        in_background: bool = False,
        branch: Branch = FIRST_BRANCH,
        least_bytes: int = 0,
        facts: RunMetadata = FACTS,
        allowed: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.log: Log = []
        self.clock = Clock()
        world = world or World()
        self.owner = FakeOwner(world.rank)
        self.throughput = Throughput(self.clock)
        self.reporter = FakeReporter(self.log)
        self.saver = Saver(
            checkpointer=Checkpointer(
                folder, world=world, facts=facts, branch=branch, least_bytes=least_bytes
            ),
            compare=functools.partial(
                changes_since, facts=facts, world_size=world.world_size, allowed=allowed
            ),
            folder=folder,
            engine=cast("Any", self.owner),
            mirror=Mirroring(cast("Any", mirror), report=self.reporter.event, world=world),
            settings=CheckpointConfig.model_validate(
                {"keep": keep, "max_failed_saves": max_failed_saves, "async": in_background}
            ),
            reporter=cast("Any", self.reporter),
            spikes=watch_of(self.log),
            throughput=self.throughput,
            world=world,
            files_done=lambda state: state.step // 10,
        )

    def save(self, *steps: int, **changes: Any) -> TrainState:
        for step in steps:
            state = self.saver.save(TrainState(step=step, **changes))
        return state

    def there(self) -> list[int]:
        return saved_steps(self.folder)


def on_machines(root: Path, action: Callable[[Session], Any], **settings: Any) -> list[Any]:
    """Run the same action on two machines with a folder each."""

    def on_one(world: World) -> Any:
        mirror = FakeMirror([], **settings) if settings else None
        folder = root / f"machine_{world.rank}"
        folder.mkdir(exist_ok=True)
        return action(Session(folder, world=world, mirror=mirror))

    return results(on_two_ranks(on_one, machines=2))
