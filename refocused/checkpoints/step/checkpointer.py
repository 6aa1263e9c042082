"""Saving the whole state of a run as one step directory, and bringing it back."""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    SaveReason,
)
from refocused.checkpoints.step.shard_exchange import assembled, require_readable
from refocused.checkpoints.step.shard_owner import ShardOwner, Written
from refocused.checkpoints.step.staging import Staging, lack_of_room, prepare_folder
from refocused.checkpoints.step.step_directory import Part, StepDirectory, read_mapping
from refocused.metrics.history import HISTORY, bring_back, end_of
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.world import World

FREE_SPACE_FACTOR = 1.2  # of the last save's size
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that was saved, and what it took.

    Attributes:
        step: The step directory.
        write_seconds: Time in which the slowest rank hashed, wrote and flushed its files.
    """

    step: StepDirectory
    write_seconds: float

    @property
    def path(self) -> Path:
        """The step directory's path."""
        return self.step.path


@dataclasses.dataclass(frozen=True, slots=True)
class _BeingSaved:
    """A step between its staging directory's creation and its commit."""

    staging: Staging
    trainer: Mapping[str, Any]
    files_done: int
    tiers: Sequence[SaveReason]

    @property
    def step(self) -> int:
        return int(self.trainer["step"])


@dataclasses.dataclass(frozen=True, slots=True)
class _WrittenPart:
    """What one rank wrote of a step, by path below it, its first error and the time it took."""

    files: Mapping[str, FileRecord]
    error: CheckpointError | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunFacts:
    """What every manifest of a run says alike.

    Attributes:
        run: The run's name.
        zero_stage: ZeRO stage.
        dtype: `bf16`, `fp16` or `fp32`.
        versions: Version of each package whose files these are.
        data_fingerprint: Fingerprint of the data set.
        data_order: What else decides which window comes when.
        parameters: Parameters of the model.
        run_yaml: The resolved run file.
        model_json: The model's shape in the transformers form.
        data_mixture: Shares of the sources of a mixture; empty for a single source.
        tokenizer_json: The data's tokenizer as a `tokenizers` file; None: it does not travel.
        data_fingerprint_by_size: What earlier versions called the same data, of which they knew
            the names and sizes; None: they knew the content too.
    """

    run: str
    zero_stage: int
    dtype: str
    versions: Mapping[str, str]
    data_fingerprint: str
    data_order: str
    parameters: int
    run_yaml: str
    model_json: str
    data_mixture: str = ""
    tokenizer_json: bytes | None = None
    data_fingerprint_by_size: str | None = None

    def files(self) -> dict[str, bytes]:
        """Return the files that describe the run in every step, by name."""
        files = {"run.yaml": self.run_yaml.encode(), "model.json": self.model_json.encode()}
        tokenizer = self.tokenizer_json
        return files if tokenizer is None else {**files, "tokenizer.json": tokenizer}


class Checkpointer:
    """Saves and loads the step directories of one run; all ranks call every method together."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        facts: RunFacts,
        branch: Branch = FIRST_BRANCH,
        history: Path | None = None,
        least_bytes: int = 0,
    ) -> None:
        """Save below a folder.

        Args:
            folder: Of all step directories, on the shared disk or on each storage rank's own.
            world: The ranks.
            facts: What every manifest says alike.
            branch: The branch that what is saved is on.
            history: Rank 0's file of metrics, of which every step keeps the end; None: nothing.
            least_bytes: What a save takes of this disk at least, by an estimate; 0: unknown.
        """
        self._folder = folder
        self._world = world
        self._part = (
            Part(node=world.storage_rank, nodes=world.storage_ranks)
            if world.storage_ranks > 1
            else None
        )
        self._facts = facts
        self._branch = branch
        self._history = history
        self._least_bytes = least_bytes
        self._last_bytes = 0
        self._begun: tuple[_BeingSaved, Future[_WrittenPart]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        owner: ShardOwner,
        trainer: Mapping[str, Any],
        *,
        files_done: int,
        tiers: Sequence[SaveReason] = (SaveReason.ROLLING,),
    ) -> SavedStep:
        """Write and commit one step directory.

        Args:
            owner: What is saved.
            trainer: The training state for `trainer.json`; its step, position, tokens and losses
                go into the manifest too.
            files_done: Token files of this epoch that are consumed.
            tiers: Why it is saved.

        Raises:
            CheckpointError: On every rank; nothing is left behind, and training may go on.
        """
        being_saved = self._start(trainer, files_done, tiers)
        part = self._write(being_saved, lambda: owner.save_shards(being_saved.staging.path))
        return self._complete(being_saved, part)

    def begin(
        self,
        owner: ShardOwner,
        trainer: Mapping[str, Any],
        *,
        files_done: int,
        tiers: Sequence[SaveReason] = (SaveReason.ROLLING,),
    ) -> None:
        """Copy the state and let a thread write it; `finish` commits it. Arguments as of `save`.

        Raises:
            CheckpointError: On every rank; nothing is left behind, and training may go on.
        """
        assert self._begun is None, "one save at a time: the copy's memory is used again"
        being_saved = self._start(trainer, files_done, tiers)
        write = owner.copy_shards(being_saved.staging.path)
        self._begun = being_saved, self._writer.submit(self._write, being_saved, write)

    @property
    def begun_step(self) -> int | None:
        """The step that is being written in the background; None: there is none."""
        return None if self._begun is None else self._begun[0].step

    def finish(self, *, wait: bool) -> SavedStep | None:
        """Commit the step that was begun, once every rank has written its part.

        Without a step that was begun the ranks exchange nothing.

        Args:
            wait: Wait for the files; otherwise return when a rank is still writing.

        Returns:
            None when there was nothing to commit yet.

        Raises:
            CheckpointError: On every rank; nothing is left behind, and training may go on.
        """
        if self._begun is None:
            return None
        being_saved, writing = self._begun
        if not wait and any(self._world.largest([not writing.done()])):
            return None
        self._begun = None
        return self._complete(being_saved, writing.result())

    def load(self, owner: ShardOwner, step: StepDirectory, *, exact: bool) -> dict[str, Any]:
        """Bring a verified step back; return the content of its `trainer.json`.

        Args:
            owner: What is brought back.
            step: The step.
            exact: Every rank reads its own file; otherwise the states are divided anew.

        Raises:
            CheckpointError: On every rank: a file is not what the manifest says it is.
        """
        rank = self._world.rank
        with assembled(step, self._world, exact=exact) as folder:
            self._world.on_all_ranks(lambda: require_readable(step, folder, rank=rank, exact=exact))
            self._world.on_all_ranks(lambda: self._load(owner, step, folder, exact=exact))
        return read_mapping(step.trainer)

    def bring_back_history(self, step: StepDirectory) -> None:
        """Give a machine without a history of the run's losses the one that a step of it keeps.

        Apart from `load`, after which a resume may still be refused: that changes nothing.
        """
        own = self._history if step.manifest.run == self._facts.run else None
        if own is not None and self._world.is_rank_0 and HISTORY in step.manifest.files:
            bring_back(step.path / HISTORY, own, step=step.step)

    def prepare(self) -> None:
        """Clean the folder, and make sure that it can be written and has room for a first save.

        Raises:
            ConfigError: On every rank: nothing that is trained could be saved.
        """
        self._world.on_storage_ranks(
            lambda: prepare_folder(self._folder, least_bytes=self._least_bytes)
        )

    def _start(
        self, trainer: Mapping[str, Any], files_done: int, tiers: Sequence[SaveReason]
    ) -> _BeingSaved:
        """Make the staging directory of a step, one on each storage rank's disk."""
        token = self._world.broadcast(secrets.token_hex(4))
        name = self._branch.name_of(int(trainer["step"]))
        staging = Staging(self._folder, name=name, token=token, part=self._part)
        self._on_storage_ranks(lambda: self._prepare(staging), staging)
        return _BeingSaved(staging, trainer, files_done, tiers)

    def _write(self, being_saved: _BeingSaved, write: Callable[[], Written]) -> _WrittenPart:
        """Write this rank's part; a storage rank also writes the description. Failures are kept."""
        staging, began = being_saved.staging, time.monotonic()
        written = write()
        files = {
            str(file.path.relative_to(staging.path)): FileRecord(
                size=file.size, crc32c=file.crc32c, node=self._world.storage_rank
            )
            for file in written.files
        }
        errors = list(written.errors)
        if self._world.is_storage_rank:
            try:
                files |= self._describe(being_saved)
            except OSError as error:
                errors.append(error)
        failure: CheckpointError | None = staging.failure(errors[0]) if errors else None
        try:
            staging.read_back(() if errors else files, rank=self._world.rank)
        except CheckpointError as error:
            failure = error
        return _WrittenPart(files, failure, time.monotonic() - began)

    def _complete(self, being_saved: _BeingSaved, part: _WrittenPart) -> SavedStep:
        """Gather what every rank wrote, and commit it or remove it."""
        parts = self._world.gather(part)
        failed = next((part.error for part in parts if part.error is not None), None)
        if failed is not None:
            self._world.on_storage_ranks(being_saved.staging.discard)
            raise failed
        files: dict[str, FileRecord] = {}
        for part in reversed(parts):  # the first storage rank answers for what all of them have
            files |= part.files
        return SavedStep(self._commit(being_saved, files), max(part.seconds for part in parts))

    @staticmethod
    def _load(owner: ShardOwner, step: StepDirectory, folder: Path, *, exact: bool) -> None:
        if exact:
            owner.load_shards(folder)
        else:
            owner.load_resharded(folder, ranks=step.manifest.world_size)
        if owner.steps_made != step.step:
            raise CheckpointError(
                f"{step.path} is of step {step.step:,}, and what was loaded from it has made "
                f"{owner.steps_made:,} updates. Resume from another step."
            )

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

    def _prepare(self, staging: Staging) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = round(self._last_bytes * FREE_SPACE_FACTOR) or self._least_bytes
        if lack := lack_of_room(self._folder, needed=needed):
            raise CheckpointError(f"{staging.final.name} was not saved: {lack}")
        staging.create()

    def _commit(self, being_saved: _BeingSaved, files: dict[str, FileRecord]) -> StepDirectory:
        """Let the step exist on every storage rank's disk, under one manifest, or on none."""
        staging, node = being_saved.staging, self._world.storage_rank
        found = self._on_storage_ranks(lambda: staging.unlisted(files, node=node), staging)
        for records in reversed(found):
            files = files | records
        manifest = self._world.broadcast(self._manifest(being_saved, files))
        self._on_storage_ranks(lambda: staging.seal(manifest), staging)
        self._on_storage_ranks(lambda: staging.publish(manifest), staging)
        step = StepDirectory(staging.final, manifest, self._part)
        self._last_bytes = step.bytes
        return step

    def _describe(self, being_saved: _BeingSaved) -> dict[str, FileRecord]:
        """Write what says what the step is; return what lies beside the folders of the ranks."""
        trainer = json.dumps(dict(being_saved.trainer), indent=1).encode()
        contents = {"trainer.json": trainer, **self._facts.files()}
        if self._history is not None and (history := end_of(self._history)) is not None:
            contents[HISTORY] = history
        return being_saved.staging.describe(contents, node=self._world.storage_rank)

    def _manifest(
        self, being_saved: _BeingSaved, files: dict[str, FileRecord]
    ) -> CheckpointManifest:
        facts, trainer = self._facts, being_saved.trainer
        is_own = trainer["validation_step"] == being_saved.step
        return CheckpointManifest(
            run=facts.run,
            run_id=self._branch.run_id,
            branch=self._branch.number,
            ancestry=self._branch.ancestry,
            name=self._branch.name_of(being_saved.step),
            step=being_saved.step,
            epoch=int(trainer["position"]["epoch"]),
            files_done=being_saved.files_done,
            created=datetime.datetime.now(datetime.UTC),
            tiers=tuple(being_saved.tiers),
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
