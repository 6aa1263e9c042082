"""Save checkpoints in the loop; only several failures in a row stop training."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.checkpoints.step.checkpoint_directory import Branch, Checkpoint, in_use
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, SaveReason, add_validation
from refocused.checkpoints.step.checkpointer import FREE_SPACE_FACTOR, Checkpointer
from refocused.checkpoints.step.retention import MIN_KEPT, disk_is_low, prune
from refocused.checkpoints.step.staging import clean_leftovers, set_aside
from refocused.engine.state_files import UnreadableFileError
from refocused.system.atomic_files import replace_file
from refocused.system.errors import CheckpointError, RefocusedError
from refocused.system.number_text import duration
from refocused.train.step.spikes import JudgedStep
from refocused.train.step.state import TrainState, read_part

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.mirror import Mirroring
    from refocused.checkpoints.resume.changes import Changes
    from refocused.train.step.loop import Trainer

logger = logging.getLogger(__name__)


class Saver:
    """Saves the state, keeps the mirror running and removes old steps; all ranks call together.

    Attributes:
        folder: Of the checkpoints.
        saved_step: The newest that this run saved or resumed from.
        failures: Saves in a row that failed, so steps since the newest are not saved.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpointer: Checkpointer,
        *,
        mirror: Mirroring,
        compare: Callable[[Checkpoint], Changes],
    ) -> None:
        """Prepare; `compare` raises if a checkpoint cannot be resumed under the run's settings."""
        self._trainer, self._world, self._meter = trainer, trainer.world, trainer.meter
        self._settings, self._reporter = trainer.config.checkpoint, trainer.reporter
        self.checkpointer, self.mirror, self._compare = checkpointer, mirror, compare
        self.folder = trainer.folder / "checkpoints"
        self.saved_step: int | None = None
        self.failures = 0
        self._stall_seconds = 0.0

    def save(
        self,
        state: TrainState,
        reasons: Sequence[SaveReason] = (SaveReason.ROLLING,),
        *,
        wait: bool = True,
    ) -> TrainState:
        """Save a state besides the engine's own; return it with its time and money booked.

        With `wait`, return only once it is on disk, even with `checkpoint.async`.

        Raises:
            CheckpointError: On every rank, after `checkpoint.max_failed_saves` failures in a row.
        """
        self.commit()
        unfinished = self.checkpointer.pending_step
        if unfinished is not None and unfinished != state.step:
            self._reporter.event(
                "save_late",
                f"save {unfinished:>7,} is still being written; step {state.step:,} waits for it. "
                "A longer checkpoint.interval or a faster disk avoids that",
                step=unfinished,
            )
        self.commit(wait=True)  # its copy of the state takes the memory that this one needs
        if self.saved_step == state.step:
            return state

        def clean_a_low_disk() -> bool:
            with contextlib.suppress(OSError):  # the save that follows reports what is wrong
                if disk_is_low(self.folder, self.checkpointer.branch, saves=FREE_SPACE_FACTOR):
                    clean_leftovers(self.folder)
                    return True
            return False

        if any(self._world.on_storage_ranks(clean_a_low_disk)):
            self._thin_out(keep=MIN_KEPT, disk_low=True)
        state = self._world.broadcast(self._reporter.booked(state))
        with self._world.progress.doing("save"):
            try:
                saved = self.checkpointer.save(
                    self._trainer.engine,
                    {**state.as_record(), "spikes": list(self._trainer.spikes.steps)},
                    files_done=self._trainer.data.files_done(state.position),
                    reasons=reasons,
                    in_background=self._settings.in_background and not wait,
                )
            except CheckpointError as error:
                self._meter.lap("save")
                self._bear(error)
                return state
        self._stall_seconds = self._meter.lap("save")
        if saved is not None:
            self._complete(saved)
        return state

    def commit(self, *, wait: bool = False) -> None:
        """Commit the background save once all ranks have written it; `wait` for their files.

        Without such a save nothing is done, and nothing exchanged. Raises as `save`.
        """
        if self.checkpointer.pending_step is None:
            return
        with self._world.progress.doing("save"):
            try:
                saved = self.checkpointer.finish(wait=wait)
            except CheckpointError as error:
                self._meter.lap("save", continued=True)
                self._bear(error)
                return
            if saved is not None:
                self._complete(saved)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Complete a pending save, even if training ends with an error on all ranks."""
        try:
            yield
        except RefocusedError as error:
            if error.on_every_rank:
                with contextlib.suppress(CheckpointError):
                    self.commit(wait=True)
            raise
        self.commit(wait=True)

    def load(self, step: Checkpoint) -> TrainState:
        """Restore the engine from a verified step; return the state that belongs to it.

        Raises:
            CheckpointError: On every rank: it cannot be resumed under this run's settings.
        """
        with in_use(step.path):
            changes = self._world.on_all_ranks(lambda: self._compare(step))
            for line in changes.lines():
                self._reporter.event("differs", f"  differs  {line}")
            for text in changes.allowed:
                logger.warning("%s", text)
            is_exact = changes.load_mode == "exact"
            record = self.checkpointer.load(self._trainer.engine, step, exact=is_exact)
            judged, state = self._world.on_all_ranks(
                lambda: (
                    read_part(record, "spikes", tuple[JudgedStep, ...]),
                    TrainState.from_record(record),
                )
            )
        if changes.new_data:
            state = dataclasses.replace(state, position=changes.restart, left_out=())
            judged = None  # its sequences have other numbers now
        self._trainer.spikes.restore(judged or ())
        if step.path.resolve() == (self.folder / step.name).resolve():
            self.saved_step = state.step
        return state

    def head(self) -> tuple[Branch, int]:
        """Return the branch that is trained, and its newest checkpoint; 0: none yet."""
        return self.checkpointer.branch, self.saved_step or 0

    def record_validation(self, state: TrainState) -> None:
        """Add a validation of the checkpoint that was loaded to its marker."""
        path = self.folder / self.checkpointer.branch.name_of(state.step)
        loss, bits = state.validation_loss, state.bits_per_byte
        was_cut_short = not (state.validation_step == self.saved_step == state.step)
        if was_cut_short or loss is None or not math.isfinite(loss):
            return

        def record() -> None:
            try:
                committed = (path / COMMITTED).read_bytes()
                changed = add_validation(committed, loss, state.validation_set or "", bits)
                replace_file(path / COMMITTED, changed, durable=True)
            except OSError as error:
                logger.warning("%s is not listed with its validation: %s", path, error)

        self._world.on_storage_ranks(record)

    def set_aside(self, corrupt: Collection[Path]) -> None:
        """Rename unusable checkpoints, because new ones will need their names."""

        def rename() -> None:
            for path in corrupt:
                if path.exists():  # on this disk
                    self._reporter.event(
                        "set_aside",
                        f"  aside    {path.name} is unusable and is now {set_aside(path).name}; "
                        "remove it when you do not need it",
                    )

        self._world.on_storage_ranks(rename)

    def _bear(self, error: CheckpointError) -> None:
        self.failures += 1
        # The next save could not be loaded either.
        is_unreadable = isinstance(error, UnreadableFileError)
        given_up = is_unreadable or self.failures >= self._settings.max_failed_saves
        text = "" if given_up else f"{error} Training goes on."
        self._reporter.event("save_failed", text, error=str(error))
        if given_up:
            raise CheckpointError(
                f"The run stops, since its checkpoints cannot be loaded. {error}"
                if is_unreadable
                else f"{self.failures} saves in a row have failed; the run stops rather than "
                f"train on unsaved. The last one: {error}"
            ).agreed() from error

    def _complete(self, saved: Checkpoint) -> None:
        """Keep the mirrors running, remove old steps, and report the cost of the save."""
        step, size = saved.step, saved.manifest.total_bytes
        writing = self.checkpointer.write_seconds
        self.failures, self.saved_step = 0, step
        seen = self._world.on_storage_ranks(
            lambda: (
                self.mirror.ensure_alive(self.folder, self.checkpointer.branch),
                disk_is_low(self.folder, self.checkpointer.branch),
            )
        )
        self._thin_out(keep=self._settings.keep, disk_low=any(low for _, low in seen))
        upload, *others = (text for text, _ in seen)
        for node, text in enumerate(others, 1):
            if "last error" in text:
                upload += f" | node {node}: {text.removeprefix(' | ')}"
        stall = self._stall_seconds + self._meter.lap("save", continued=True)
        local = duration(stall)
        if self._settings.in_background:
            local = f"{duration(writing)}, stall {local}"
        self._reporter.event(
            "save",
            f"save {step:>7,} local {local}{upload}",
            step=step,
            stall_seconds=stall,
            write_seconds=writing,
            bytes=size,
        )
        self._reporter.performance(
            "save",
            step,
            save_stall_seconds=stall,  # for which training stood still
            save_write_seconds=writing,  # of the slowest rank
            save_bytes=size,  # of the whole checkpoint
            save_bytes_per_second=size / writing if writing else None,  # of that writing
        )

    def _thin_out(self, *, keep: int, disk_low: bool) -> None:
        prune(
            self.folder,
            self._world,
            branch=self.checkpointer.branch,
            keep=keep,
            copies=self.mirror.copies(),
            disk_low=disk_low,
        )
