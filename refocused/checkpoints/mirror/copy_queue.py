"""Which checkpoint the mirror copies next, of those on the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from refocused.checkpoints.mirror.remote_steps import kept_steps
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, step_paths
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST, CheckpointManifest, SaveReason
from refocused.checkpoints.step.retention import KeptStep
from refocused.checkpoints.step.step_directory import read_step
from refocused.system.errors import CheckpointError

MOST_BEHIND = 2


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """The steps that a bucket lacks.

    Attributes:
        wanted: Those to copy, the next one first.
        skipped: Rolling and emergency saves that newer ones replace: copied when nothing else is to
            be done, and not waited for at the end.
    """

    wanted: tuple[int, ...]
    skipped: tuple[int, ...]


def copy_order(
    lacking: Sequence[KeptStep], *, there: Collection[int] = (), copying: int | None = None
) -> CopyOrder:
    """Put the newest first, since a resume needs it, and skip what two newer ones replace.

    Args:
        lacking: The local steps that the bucket does not hold, in any order.
        there: The local steps that it holds.
        copying: The step that is being copied, which is finished: otherwise a mirror that is slower
            than the saves would never finish one.
    """
    newest_first = sorted(lacking, key=lambda step: -step.step)
    newest = sorted({*there, *(step.step for step in lacking)}, reverse=True)[:MOST_BEHIND]
    skipped = {
        step.step
        for step in newest_first
        if step.step not in (*newest, copying)
        and not (step.best or step.tiers & {SaveReason.EPOCH, SaveReason.FINAL})
    }
    first = [step.step for step in newest_first if step.step == copying]
    return CopyOrder(
        wanted=(*first, *(s.step for s in newest_first if s.step not in {*skipped, copying})),
        skipped=tuple(step.step for step in newest_first if step.step in skipped),
    )


Signature = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """A step that needs nothing more, until its manifest is another file.

    Attributes:
        signature: Of the manifest that was looked at.
        failure: Why it cannot be copied; None: it is in the bucket.
    """

    signature: Signature
    failure: str | None


class LocalSteps:
    """The step directories of a run, and what has become of each of them.

    Attributes:
        unwanted: Steps that the bucket need not get.
    """

    def __init__(self, folder: Path, branch: Branch = FIRST_BRANCH) -> None:
        """Look at the checkpoints of a branch in a folder."""
        self._folder = folder
        self._branch = branch
        self._settled: dict[Path, Settled] = {}
        self._manifests: dict[Path, tuple[Signature, CheckpointManifest | None]] = {}
        self.unwanted: frozenset[int] = frozenset()

    def order(self, *, copying: int | None) -> CopyOrder:
        """Return the committed steps that are neither mirrored nor hopeless nor unwanted.

        Args:
            copying: The step that is being copied, which is finished first.
        """
        paths = step_paths(self._folder, self._branch)
        steps = [step for step, path in paths.items() if signature_of(path) is not None]
        known = kept_steps(
            {step: self.manifest(step) for step in steps}, whole=set(steps), in_use=()
        )
        settled = self.settled()
        return copy_order(
            [s for s in known if s.step not in settled and s.step not in self.unwanted],
            there=[step for step, was in settled.items() if was.failure is None],
            copying=copying,
        )

    def manifest(self, step: int) -> CheckpointManifest | None:
        """Return a step's manifest, read once; None: it cannot be used, or the step is gone."""
        path = self._folder / self._branch.name_of(step)
        signature, known = signature_of(path), self._manifests.get(path)
        if signature is None:
            return None
        if known is None or known[0] != signature:
            try:
                known = signature, read_step(path).manifest
            except CheckpointError:
                known = signature, None
            self._manifests[path] = known
        return known[1]

    def settled(self) -> dict[int, Settled]:
        """Return what is settled, by step; a step whose manifest is another file is not."""
        return {
            step: was
            for step, path in step_paths(self._folder, self._branch).items()
            if (was := self._settled.get(path)) and was.signature == signature_of(path)
        }

    def settle(self, path: Path, settled: Settled) -> None:
        """Note that a step needs nothing more."""
        self._settled[path] = settled

    def forget(self, step: int) -> None:
        """Note that the bucket has a step no longer."""
        self._settled.pop(self._folder / self._branch.name_of(step), None)


def signature_of(path: Path) -> Signature | None:
    """Return what tells a manifest from a later one of the same name; None when there is none."""
    try:
        found = (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns
