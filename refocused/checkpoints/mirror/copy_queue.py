"""Which checkpoint the mirror copies next, of those on the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, step_paths
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST, CheckpointManifest
from refocused.checkpoints.step.retention import ALWAYS_KEPT, KeptStep, kept_steps
from refocused.checkpoints.step.step_directory import read_step
from refocused.system.errors import CheckpointError

MOST_BEHIND = 2
MIRRORED = ""  # an outcome that is no failure
Signature = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """The steps that a bucket lacks."""

    wanted: tuple[int, ...]  # the next one first
    # Rolling and emergency saves that newer ones replace: copied when nothing else is to be done,
    # and not waited for at the end.
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
    by_step = {step.step: step for step in sorted(lacking, key=lambda step: -step.step)}
    newest = sorted({*there, *by_step}, reverse=True)[:MOST_BEHIND]
    skipped = [
        step
        for step, kept in by_step.items()
        if step not in (*newest, copying) and not (kept.best or kept.reasons & ALWAYS_KEPT)
    ]
    wanted = sorted(set(by_step) - set(skipped), key=lambda step: (step != copying, -step))
    return CopyOrder(tuple(wanted), tuple(skipped))


@dataclasses.dataclass(slots=True)
class _Known:
    """A local step, until its manifest is another file; `manifest` is None where it cannot be used.

    The outcome is `MIRRORED`, or why the step cannot be copied; None: it is to be copied.
    """

    signature: Signature
    manifest: CheckpointManifest | None
    outcome: str | None = None


class LocalSteps:
    """The step directories of a run, and what has become of each of them."""

    def __init__(self, folder: Path, branch: Branch = FIRST_BRANCH) -> None:
        self._folder = folder
        self._branch = branch
        self._known: dict[Path, _Known] = {}
        self.unwanted: frozenset[int] = frozenset()

    def order(self, *, copying: int | None) -> CopyOrder:
        """Return the steps that are neither mirrored nor hopeless nor unwanted."""
        known = self._look()
        steps = kept_steps({step: one.manifest for step, one in known.items()}, whole=known)
        return copy_order(
            [s for s in steps if known[s.step].outcome is None and s.step not in self.unwanted],
            there=[step for step, one in known.items() if one.outcome == MIRRORED],
            copying=copying,
        )

    def manifest(self, step: int) -> CheckpointManifest | None:
        """Return a step's manifest; None: it cannot be used, or the step is gone."""
        known = self._look().get(step)
        return known.manifest if known is not None else None

    def outcomes(self) -> dict[int, str]:
        """Return `MIRRORED`, or the failure, of each step that needs nothing more."""
        known = self._look()
        return {step: one.outcome for step, one in known.items() if one.outcome is not None}

    def settle(self, path: Path, signature: Signature, outcome: str | None) -> None:
        """Note the outcome of a step, unless its manifest is another file by now."""
        known = self._known.get(path)
        if known is not None and known.signature == signature:
            known.outcome = outcome

    def forget(self, step: int) -> None:
        """Note that the bucket has a step no longer."""
        self._known.pop(self._folder / self._branch.name_of(step), None)

    def _look(self) -> dict[int, _Known]:
        found = {}
        for step, path in step_paths(self._folder, self._branch).items():
            signature, known = signature_of(path), self._known.get(path)
            if signature is None:
                continue
            if known is None or known.signature != signature:
                try:
                    known = _Known(signature, read_step(path).manifest)
                except CheckpointError:
                    known = _Known(signature, None)
                self._known[path] = known
            found[step] = known
        return found


def signature_of(path: Path) -> Signature | None:
    """Return what differs between a manifest and a later one of the same name; None: no file."""
    try:
        found = (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns
