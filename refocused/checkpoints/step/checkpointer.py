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

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    RunMetadata,
    SaveReason,
)
from refocused.checkpoints.step.shard_exchange import assembled, require_readable
from refocused.checkpoints.step.staging import Staging, lack_of_room, prepare_folder
from refocused.checkpoints.step.step_directory import Checkpoint, Part, read_mapping
from refocused.metrics.history import HISTORY, bring_back, end_of
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

if TYPE_CHECKING:
    from refocused.engine.engine import Engine, ShardsWritten

FREE_SPACE_FACTOR = 1.2  # of the last save's size
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed checkpoint."""

    step: Checkpoint
    write_seconds: float  # hash, write and flush on the slowest rank


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingSave:
    staging: Staging
    step: int
    trainer: Mapping[str, Any]
    files_done: int
    reasons: Sequence[SaveReason]


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
        facts: RunMetadata,
        branch: Branch = FIRST_BRANCH,
        history: Path | None = None,  # rank 0's metrics; each checkpoint keeps the end of it
        least_bytes: int = 0,  # estimate of the smallest save on this disk; 0: unknown
    ) -> None:
        self._folder = folder
        self._world = world
        nodes = world.storage_ranks
        self._part = Part(node=world.storage_rank, nodes=nodes) if nodes > 1 else None
        self._facts = facts
        self.branch = branch  # that steps are saved on
        self._history = history
        self._least_bytes = least_bytes
        self._last_bytes = 0
        self._pending: tuple[_PendingSave, Future[_WrittenPart]] | None = None
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
    ) -> SavedStep | None:
        """Write and commit a checkpoint.

        Args:
            engine: Holds the model and optimizer states.
            trainer: The content of `trainer.json`; some of it is repeated in the manifest.
            files_done: Token files consumed in this epoch.
            reasons: Why it is saved.
            in_background: Copy the state, write it in a thread and return None; `finish` commits.
        """
        assert self._pending is None, "one save at a time: saves share the copy's memory"
        pending = self._start(trainer, files_done, reasons)
        if in_background:
            write = engine.copy_shards(pending.staging.path)
            self._pending = pending, self._writer.submit(self._write, pending, write)
            return None
        part = self._write(pending, lambda: engine.save_shards(pending.staging.path))
        return self._complete(pending, part)

    @property
    def pending_step(self) -> int | None:
        """The step being written in the background, if any."""
        return None if self._pending is None else self._pending[0].step

    def finish(self, *, wait: bool) -> SavedStep | None:
        """Commit the checkpoint begun last; None if there is none.

        Unless `wait`, also None while a rank is still writing. Communicates only if a save was
        begun.
        """
        if self._pending is None:
            return None
        pending, writing = self._pending
        if not wait and any(self._world.largest([not writing.done()])):
            return None
        self._pending = None
        return self._complete(pending, writing.result())

    def load(self, engine: Engine, step: Checkpoint, *, exact: bool) -> dict[str, Any]:
        """Load a verified checkpoint; return the content of its `trainer.json`.

        If `exact`, every rank reads its own file; otherwise the states are resharded.
        """
        rank = self._world.rank
        with assembled(step, self._world, exact=exact) as folder:
            self._world.on_all_ranks(lambda: require_readable(step, folder, rank=rank, exact=exact))
            self._world.on_all_ranks(lambda: _load(engine, step, folder, exact=exact))
        return read_mapping(step.path / "trainer.json")

    def restore_history(self, step: Checkpoint, *, parent: str | None = None) -> None:
        """Restore the run's metrics from a checkpoint of it, or of its parent, if it has none.

        Separate from `load`, because a resume that is rejected after loading must change nothing.
        """
        own = self._history if step.manifest.run in (self._facts.run, parent) else None
        if own is not None and self._world.is_rank_0 and HISTORY in step.manifest.files:
            bring_back(step.path / HISTORY, own, step=step.step)

    def _start(
        self, trainer: Mapping[str, Any], files_done: int, reasons: Sequence[SaveReason]
    ) -> _PendingSave:
        """Create the staging directory on each storage rank's disk."""
        token, step = self._world.broadcast(secrets.token_hex(4)), int(trainer["step"])
        name = self.branch.name_of(step)
        staging = Staging(self._folder, name=name, token=token, part=self._part)
        self._on_storage_ranks(lambda: self._create(staging), staging)
        return _PendingSave(staging, step, trainer, files_done, reasons)

    def _create(self, staging: Staging) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = round(self._last_bytes * FREE_SPACE_FACTOR) or self._least_bytes
        if lack := lack_of_room(self._folder, needed=needed):
            raise CheckpointError(f"{staging.final.name} was not saved: {lack}")
        staging.create()

    def _write(self, pending: _PendingSave, write: Callable[[], ShardsWritten]) -> _WrittenPart:
        """Write this rank's files, and the descriptions on a storage rank; return any failure."""
        staging, node, began = pending.staging, self._world.storage_rank, time.monotonic()
        written = write()
        files = {}
        for file in written.files:
            record = FileRecord(size=file.size, crc32c=file.crc32c, node=node)
            files[str(file.path.relative_to(staging.path))] = record
        errors = list(written.errors)
        if self._world.is_storage_rank:
            try:
                trainer = json.dumps(dict(pending.trainer), indent=1).encode()
                contents = {"trainer.json": trainer, **self._facts.files()}
                if self._history is not None and (history := end_of(self._history)) is not None:
                    contents[HISTORY] = history
                files |= staging.describe(contents, node=node)
            except OSError as error:
                errors.append(error)
        failure = staging.failure(errors[0]) if errors else None
        failure = failure or staging.read_back(files, rank=self._world.rank)
        return _WrittenPart(files, failure, time.monotonic() - began)

    def _complete(self, pending: _PendingSave, part: _WrittenPart) -> SavedStep:
        """Gather every rank's files; commit them, or remove them if a rank failed."""
        parts, staging = self._world.gather(part), pending.staging
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
        manifest = self._world.broadcast(self._manifest(pending, written))
        self._on_storage_ranks(lambda: staging.seal(manifest), staging)
        self._on_storage_ranks(lambda: staging.publish(manifest), staging)
        step = Checkpoint(staging.final, manifest, self._part)
        self._last_bytes = step.bytes
        return SavedStep(step, max(part.seconds for part in parts))

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

    def _manifest(self, pending: _PendingSave, files: dict[str, FileRecord]) -> CheckpointManifest:
        facts, branch, trainer = self._facts, self.branch, pending.trainer
        listed, names = CheckpointManifest.model_fields, facts.__slots__
        of_run: dict[str, Any] = {name: getattr(facts, name) for name in names if name in listed}
        is_own = trainer["validation_step"] == pending.step
        return CheckpointManifest(
            **of_run,
            run_id=branch.run_id,
            branch=branch.number,
            ancestry=branch.ancestry,
            parent=branch.parent,
            name=branch.name_of(pending.step),
            step=pending.step,
            epoch=int(trainer["position"]["epoch"]),
            files_done=pending.files_done,
            created=datetime.datetime.now(datetime.UTC),
            tiers=tuple(pending.reasons),
            world_size=self._world.world_size,
            validation_loss=trainer["validation_loss"] if is_own else None,
            validation_set=(trainer["validation_set"] or "") if is_own else "",
            loss=trainer["loss"],
            tokens=int(trainer["tokens"]),
            files=files,
        )


def _load(engine: Engine, step: Checkpoint, folder: Path, *, exact: bool) -> None:
    if exact:
        engine.load_shards(folder)
    else:
        engine.load_resharded(folder, ranks=step.manifest.world_size)
    if engine.steps_made != step.step:
        raise CheckpointError(
            f"{step.path} is of step {step.step:,}, but the states loaded from it are of step "
            f"{engine.steps_made:,}. Resume from another checkpoint."
        )
