"""Save the whole state of a run as one step directory, and load it again."""

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
    RunFacts,
    SaveReason,
)
from refocused.checkpoints.step.shard_exchange import assembled, require_readable
from refocused.checkpoints.step.staging import Staging, lack_of_room, prepare_folder
from refocused.checkpoints.step.step_directory import Part, StepDirectory, read_mapping
from refocused.metrics.history import HISTORY, bring_back, end_of
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

if TYPE_CHECKING:
    from refocused.engine.engine import Engine, ShardsWritten

FREE_SPACE_FACTOR = 1.2  # of the last save's size
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStep:
    """A saved step."""

    step: StepDirectory
    write_seconds: float  # in which the slowest rank hashed, wrote and flushed it


@dataclasses.dataclass(frozen=True, slots=True)
class _BeingSaved:
    staging: Staging
    step: int
    trainer: Mapping[str, Any]
    files_done: int
    reasons: Sequence[SaveReason]


@dataclasses.dataclass(frozen=True, slots=True)
class _WrittenPart:
    files: Mapping[str, FileRecord]  # that this rank wrote, by path below the step
    error: CheckpointError | None
    seconds: float


class Checkpointer:
    """Saves and loads the step directories of one run; all ranks call every method together.

    A CheckpointError is raised on every rank. After one from a save nothing of it is left, and
    training may go on.
    """

    def __init__(
        self,
        folder: Path,  # on the shared disk, or on each storage rank's own
        *,
        world: World,
        facts: RunFacts,
        branch: Branch = FIRST_BRANCH,
        history: Path | None = None,  # rank 0's file of metrics, of which every step keeps the end
        least_bytes: int = 0,  # estimate of the smallest save on this disk; 0: unknown
    ) -> None:
        self._folder = folder
        self._world = world
        nodes = world.storage_ranks
        self._part = Part(node=world.storage_rank, nodes=nodes) if nodes > 1 else None
        self._facts = facts
        self._branch = branch
        self._history = history
        self._least_bytes = least_bytes
        self._last_bytes = 0
        self._begun: tuple[_BeingSaved, Future[_WrittenPart]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def prepare(self) -> None:
        """Clean the folder; ConfigError on every rank: no save could succeed."""
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
    ) -> SavedStep:
        """Write and commit one step directory.

        Args:
            engine: What is saved.
            trainer: The content of `trainer.json`, of which some goes into the manifest too.
            files_done: Token files of this epoch that are consumed.
        """
        being_saved = self._start(trainer, files_done, reasons)
        part = self._write(being_saved, lambda: engine.save_shards(being_saved.staging.path))
        return self._complete(being_saved, part)

    def begin(
        self,
        engine: Engine,
        trainer: Mapping[str, Any],
        *,
        files_done: int,
        reasons: Sequence[SaveReason] = (SaveReason.ROLLING,),
    ) -> None:
        """Copy the state and write it in a thread; `finish` commits it. Arguments as of `save`."""
        assert self._begun is None, "one save at a time: the copy's memory is used again"
        being_saved = self._start(trainer, files_done, reasons)
        write = engine.copy_shards(being_saved.staging.path)
        self._begun = being_saved, self._writer.submit(self._write, being_saved, write)

    @property
    def begun_step(self) -> int | None:
        """The step that is being written in the background; None: there is none."""
        return None if self._begun is None else self._begun[0].step

    def finish(self, *, wait: bool) -> SavedStep | None:
        """Commit the step that was begun; unless `wait`, None while a rank is still writing.

        Without such a step the ranks exchange nothing.
        """
        if self._begun is None:
            return None
        being_saved, writing = self._begun
        if not wait and any(self._world.largest([not writing.done()])):
            return None
        self._begun = None
        return self._complete(being_saved, writing.result())

    def load(self, engine: Engine, step: StepDirectory, *, exact: bool) -> dict[str, Any]:
        """Load a verified step; return the content of its `trainer.json`.

        If `exact`, every rank reads its own file; otherwise the states are divided anew.
        """
        rank = self._world.rank
        with assembled(step, self._world, exact=exact) as folder:
            self._world.on_all_ranks(lambda: require_readable(step, folder, rank=rank, exact=exact))
            self._world.on_all_ranks(lambda: _load(engine, step, folder, exact=exact))
        return read_mapping(step.path / "trainer.json")

    def bring_back_history(self, step: StepDirectory) -> None:
        """Restore the run's metrics from a step of it on a machine that has none.

        Not a part of `load`, after which a resume may still be refused: that changes nothing.
        """
        own = self._history if step.manifest.run == self._facts.run else None
        if own is not None and self._world.is_rank_0 and HISTORY in step.manifest.files:
            bring_back(step.path / HISTORY, own, step=step.step)

    def _start(
        self, trainer: Mapping[str, Any], files_done: int, reasons: Sequence[SaveReason]
    ) -> _BeingSaved:
        """Make the staging directory of a step, one on each storage rank's disk."""
        token, step = self._world.broadcast(secrets.token_hex(4)), int(trainer["step"])
        staging = Staging(
            self._folder, name=self._branch.name_of(step), token=token, part=self._part
        )
        self._on_storage_ranks(lambda: self._create(staging), staging)
        return _BeingSaved(staging, step, trainer, files_done, reasons)

    def _create(self, staging: Staging) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = round(self._last_bytes * FREE_SPACE_FACTOR) or self._least_bytes
        if lack := lack_of_room(self._folder, needed=needed):
            raise CheckpointError(f"{staging.final.name} was not saved: {lack}")
        staging.create()

    def _write(self, being_saved: _BeingSaved, write: Callable[[], ShardsWritten]) -> _WrittenPart:
        """Write this rank's part, and on a storage rank the descriptions; failures are returned."""
        staging, node, began = being_saved.staging, self._world.storage_rank, time.monotonic()
        written = write()
        files = {
            str(file.path.relative_to(staging.path)): FileRecord(
                size=file.size, crc32c=file.crc32c, node=node
            )
            for file in written.files
        }
        errors = list(written.errors)
        if self._world.is_storage_rank:
            try:
                files |= self._describe(being_saved)
            except OSError as error:
                errors.append(error)
        failure: CheckpointError | None = None
        if errors:
            failure = staging.failure(errors[0])
        else:
            failure = staging.read_back(files, rank=self._world.rank)
        return _WrittenPart(files, failure, time.monotonic() - began)

    def _describe(self, being_saved: _BeingSaved) -> dict[str, FileRecord]:
        trainer = json.dumps(dict(being_saved.trainer), indent=1).encode()
        contents = {"trainer.json": trainer, **self._facts.files()}
        if self._history is not None and (history := end_of(self._history)) is not None:
            contents[HISTORY] = history
        return being_saved.staging.describe(contents, node=self._world.storage_rank)

    def _complete(self, being_saved: _BeingSaved, part: _WrittenPart) -> SavedStep:
        """Gather what every rank wrote, and commit it or remove it."""
        parts, staging = self._world.gather(part), being_saved.staging
        if errors := [part.error for part in parts if part.error is not None]:
            self._world.on_storage_ranks(staging.discard)
            raise errors[0]
        node = self._world.storage_rank
        written: dict[str, FileRecord] = {}
        for part in reversed(parts):  # the first storage rank's record counts for common files
            written |= part.files
        unlisted = self._on_storage_ranks(lambda: staging.unlisted(written, node=node), staging)
        for records in reversed(unlisted):
            written |= records
        manifest = self._world.broadcast(self._manifest(being_saved, written))
        self._on_storage_ranks(lambda: staging.seal(manifest), staging)
        self._on_storage_ranks(lambda: staging.publish(manifest), staging)
        step = StepDirectory(staging.final, manifest, self._part)
        self._last_bytes = step.bytes
        return SavedStep(step, max(part.seconds for part in parts))

    def _on_storage_ranks(self, action: Callable[[], T], staging: Staging) -> list[T]:
        """Work on each storage rank's staging directory; a failure of one removes all of them."""

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

    def _manifest(
        self, being_saved: _BeingSaved, files: dict[str, FileRecord]
    ) -> CheckpointManifest:
        facts, branch, trainer = self._facts, self._branch, being_saved.trainer
        is_own = trainer["validation_step"] == being_saved.step
        return CheckpointManifest(
            run=facts.run,
            run_id=branch.run_id,
            branch=branch.number,
            ancestry=branch.ancestry,
            name=branch.name_of(being_saved.step),
            step=being_saved.step,
            epoch=int(trainer["position"]["epoch"]),
            files_done=being_saved.files_done,
            created=datetime.datetime.now(datetime.UTC),
            tiers=tuple(being_saved.reasons),
            world_size=self._world.world_size,
            zero_stage=facts.zero_stage,
            dtype=facts.dtype,
            versions=dict(facts.versions),
            data_fingerprint=facts.data_fingerprint,
            data_order=facts.data_order,
            data_mixture=facts.data_mixture,
            parameters=facts.parameters,
            validation_loss=trainer["validation_loss"] if is_own else None,
            loss=trainer["loss"],
            tokens=int(trainer["tokens"]),
            files=files,
        )


def _load(engine: Engine, step: StepDirectory, folder: Path, *, exact: bool) -> None:
    if exact:
        engine.load_shards(folder)
    else:
        engine.load_resharded(folder, ranks=step.manifest.world_size)
    if engine.steps_made != step.step:
        raise CheckpointError(
            f"{step.path} is of step {step.step:,}, and what was loaded from it has made "
            f"{engine.steps_made:,} updates. Resume from another step."
        )
