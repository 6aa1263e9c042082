"""Save the state of a run as a checkpoint, committed on all ranks together, and load it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    Checkpoint,
    Part,
    read_mapping,
)
from refocused.checkpoints.step.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    RunMetadata,
    SaveReason,
)
from refocused.checkpoints.step.shard_exchange import assembled, require_readable
from refocused.checkpoints.step.staging import Staging, prepare_folder, require_room
from refocused.metrics.history import HISTORY, bring_back, end_of
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

if TYPE_CHECKING:
    from refocused.engine.engine import Engine, ShardsWritten

FREE_SPACE_FACTOR = 1.2  # of the last save's size
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _WrittenPart:
    files: Mapping[str, FileRecord]  # written by this rank, by path below the checkpoint
    error: CheckpointError | None
    seconds: float


class Checkpointer:
    """Saves and loads the checkpoints of one run; all ranks call every method together.

    A CheckpointError is raised on every rank. A failed save leaves no files, and training may go
    on.
    """

    def __init__(
        self,
        folder: Path,  # on a shared disk, or on each storage rank's own disk
        *,
        world: World,
        metadata: RunMetadata,
        branch: Branch = FIRST_BRANCH,
        history: Path | None = None,  # rank 0's metrics; each checkpoint keeps the end of it
        least_bytes: int = 0,  # estimate of the smallest save on this disk; 0: unknown
    ) -> None:
        self._folder = folder
        self._world = world
        nodes = world.storage_ranks
        self._part = Part(node=world.storage_rank, nodes=nodes) if nodes > 1 else None
        self._metadata = metadata
        self.branch = branch  # that checkpoints are saved on
        self.write_seconds = 0.0  # to hash, write and flush the last save, on the slowest rank
        self._history = history
        self._least_bytes = least_bytes
        self._last_bytes = 0
        # The save that is written in the background; its manifest lists no files yet.
        self._pending: tuple[Staging, CheckpointManifest, Future[_WrittenPart]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def prepare(self) -> None:
        """Clean the folder; raises ConfigError on every rank if no save could succeed."""
        self._world.on_storage_ranks(
            lambda: prepare_folder(self._folder, least_bytes=self._least_bytes)
        )

    def save(
        self,
        engine: Engine,
        trainer: Mapping[str, Any],
        *,
        files_done: int,
        reasons: Sequence[SaveReason] = (SaveReason.ROLLING,),
        in_background: bool = False,
    ) -> Checkpoint | None:
        """Write and commit a checkpoint.

        Args:
            engine: Holds the model and optimizer states.
            trainer: The content of `trainer.json`; some of it is repeated in the manifest.
            files_done: Token files consumed in this epoch.
            reasons: Why it is saved.
            in_background: Copy the state, write it in a thread and return None; `finish` commits.
        """
        assert self._pending is None, "one save at a time: saves share the copy's memory"
        token, step = self._world.broadcast(secrets.token_hex(4)), int(trainer["step"])
        is_validated = trainer["validation_step"] == step
        metadata, branch = self._metadata, self.branch
        fields = [name for name in metadata.__slots__ if name in CheckpointManifest.model_fields]
        manifest = CheckpointManifest(
            **{name: getattr(metadata, name) for name in fields},
            **branch.as_record(),
            name=branch.name_of(step),
            step=step,
            epoch=int(trainer["position"]["epoch"]),
            files_done=files_done,
            created=datetime.datetime.now(datetime.UTC),
            tiers=tuple(reasons),
            world_size=self._world.world_size,
            validation_loss=trainer["validation_loss"] if is_validated else None,
            validation_set=(trainer["validation_set"] or "") if is_validated else "",
            bits_per_byte=trainer["bits_per_byte"] if is_validated else None,
            loss=trainer["loss"],
            tokens=int(trainer["tokens"]),
            files={},
        )
        staging = Staging(self._folder, name=manifest.name, token=token, part=self._part)

        def create() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            needed = round(self._last_bytes * FREE_SPACE_FACTOR) or self._least_bytes
            require_room(self._folder, needed=needed, outcome=f"{manifest.name} was not saved")
            staging.create()

        self._on_storage_ranks(create, staging)
        if in_background:
            write = engine.copy_shards(staging.path)
            writing = self._writer.submit(self._write, staging, trainer, write)
            self._pending = staging, manifest, writing
            return None
        part = self._write(staging, trainer, lambda: engine.save_shards(staging.path))
        return self._complete(staging, manifest, part)

    @property
    def pending_step(self) -> int | None:
        """The step being written in the background, if any."""
        return None if self._pending is None else self._pending[1].step

    def finish(self, *, wait: bool) -> Checkpoint | None:
        """Commit the checkpoint begun last; None if there is none.

        Unless `wait`, also None while a rank is still writing. Communicates only if a save was
        begun.
        """
        if self._pending is None:
            return None
        staging, manifest, writing = self._pending
        if not wait and any(self._world.largest([not writing.done()])):
            return None
        self._pending = None
        return self._complete(staging, manifest, writing.result())

    def load(self, engine: Engine, checkpoint: Checkpoint, *, exact: bool) -> dict[str, Any]:
        """Load a verified checkpoint; return the content of its `trainer.json`.

        If `exact`, every rank reads its own file; otherwise the states are resharded.
        """
        world, ranks = self._world, checkpoint.manifest.world_size

        def load(folder: Path) -> None:
            engine.load_shards(folder) if exact else engine.load_resharded(folder, ranks=ranks)
            if engine.steps_made != checkpoint.step:
                raise CheckpointError(
                    f"{checkpoint.path} is of step {checkpoint.step:,}, but the states loaded from "
                    f"it are of step {engine.steps_made:,}. Resume from another checkpoint."
                )

        with assembled(checkpoint, world, exact=exact) as folder:
            world.on_all_ranks(
                lambda: require_readable(checkpoint, folder, rank=world.rank, exact=exact)
            )
            world.on_all_ranks(lambda: load(folder))
        return read_mapping(checkpoint.path / "trainer.json")

    def restore_history(self, checkpoint: Checkpoint, *, parent: str | None = None) -> None:
        """Restore the run's metrics from a checkpoint of it, or of its parent, if it has none.

        Separate from `load`, because a resume that is rejected after loading must change nothing.
        """
        of_run = checkpoint.manifest.run in (self._metadata.run, parent)
        history = self._history if of_run else None
        if history is not None and self._world.is_rank_0 and HISTORY in checkpoint.manifest.files:
            bring_back(checkpoint.path / HISTORY, history, step=checkpoint.step)

    def _write(
        self, staging: Staging, trainer: Mapping[str, Any], write: Callable[[], ShardsWritten]
    ) -> _WrittenPart:
        """Write this rank's files, and the descriptions on a storage rank; return any failure."""
        node, began = self._world.storage_rank, time.monotonic()
        written = write()
        files = {}
        for file in written.files:
            record = FileRecord(size=file.size, crc32c=file.crc32c, node=node)
            files[str(file.path.relative_to(staging.path))] = record
        failure: CheckpointError | None = None
        try:
            if written.errors:
                raise written.errors[0]
            if self._world.is_storage_rank:
                content = json.dumps(dict(trainer), indent=1).encode()
                contents = {"trainer.json": content, **self._metadata.files()}
                if self._history is not None and (history := end_of(self._history)) is not None:
                    contents[HISTORY] = history
                files |= staging.describe(contents, node=node)
            staging.read_back(files, rank=self._world.rank)
        except OSError as error:
            failure = staging.failure(error)
        except CheckpointError as error:
            failure = error
        return _WrittenPart(files, failure, time.monotonic() - began)

    def _complete(
        self, staging: Staging, manifest: CheckpointManifest, part: _WrittenPart
    ) -> Checkpoint:
        """Gather every rank's files; commit them, or remove them if a rank failed."""
        parts = self._world.gather(part)
        if errors := [part.error for part in parts if part.error is not None]:
            self._world.on_storage_ranks(staging.discard)
            raise errors[0]
        node = self._world.storage_rank
        written: dict[str, FileRecord] = {}
        for part in reversed(parts):  # shared files: keep the first storage rank's record
            written |= part.files
        unlisted = self._on_storage_ranks(lambda: staging.unlisted(written, node=node), staging)
        for records in reversed(unlisted):
            written |= records
        manifest = self._world.broadcast(manifest.model_copy(update={"files": written}))
        self._on_storage_ranks(lambda: staging.seal(manifest), staging)
        self._on_storage_ranks(lambda: staging.publish(manifest), staging)
        checkpoint = Checkpoint(staging.final, manifest, self._part)
        self._last_bytes = checkpoint.bytes
        self.write_seconds = max(part.seconds for part in parts)
        return checkpoint

    def _on_storage_ranks(self, action: Callable[[], T], staging: Staging) -> list[T]:
        """Run `action` on each storage rank; if one fails, remove all staging directories."""

        def guarded() -> T:
            try:
                return action()
            except OSError as error:
                raise staging.failure(error) from error

        try:
            return self._world.on_storage_ranks(guarded)
        except RefocusedError:
            if self._world.is_storage_rank:
                staging.discard()
            raise
