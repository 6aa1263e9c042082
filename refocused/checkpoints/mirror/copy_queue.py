"""Choose the checkpoint that the mirror copies next."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from refocused.checkpoints.step import retention
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch, step_paths
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, CheckpointManifest
from refocused.checkpoints.step.step_directory import read_step
from refocused.system.errors import CheckpointError

MAX_BEHIND = 2
MIRRORED = ""  # the outcome of a successful copy
Signature = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """The steps that the bucket lacks."""

    wanted: tuple[int, ...]  # in the order of copying
    # Rolling and emergency saves with newer ones: copied only when idle, not when draining.
    skipped: tuple[int, ...]


def copy_order(
    missing: Sequence[retention.RetentionCandidate],
    *,
    there: Collection[int] = (),
    copying: int | None = None,
) -> CopyOrder:
    """Order the newest first, since a resume needs it; skip those with two newer ones.

    Args:
        missing: The local checkpoints that the bucket lacks, in any order.
        there: The local steps that it has.
        copying: The step being copied. It stays first: a mirror slower than the saves would
            otherwise never finish one.
    """
    by_step = {step.step: step for step in sorted(missing, key=lambda step: -step.step)}
    newest = sorted({*there, *by_step}, reverse=True)[:MAX_BEHIND]
    skipped = [
        step
        for step, kept in by_step.items()
        if step not in (*newest, copying)
        and not (kept.best or kept.reasons & retention.ALWAYS_KEPT)
    ]
    wanted = sorted(set(by_step) - set(skipped), key=lambda step: (step != copying, -step))
    return CopyOrder(tuple(wanted), tuple(skipped))


@dataclasses.dataclass(slots=True)
class _Known:
    """A local checkpoint, valid while the signature of its manifest is the same."""

    signature: Signature
    manifest: CheckpointManifest | None  # None: unusable
    outcome: str | None = None  # `MIRRORED`, or why it cannot be copied; None: not copied yet


class LocalSteps:
    """The local checkpoints of a branch, and the outcome of copying each."""

    def __init__(self, folder: Path, branch: Branch = FIRST_BRANCH) -> None:
        self._folder = folder
        self._branch = branch
        self._known: dict[Path, _Known] = {}
        self.unwanted: frozenset[int] = frozenset()

    def order(self, *, copying: int | None) -> CopyOrder:
        """Return the steps that are not mirrored, failed or unwanted."""
        known = self._look()
        steps = retention.retention_candidates(
            {step: one.manifest for step, one in known.items()}, whole=known
        )
        return copy_order(
            [s for s in steps if known[s.step].outcome is None and s.step not in self.unwanted],
            there=[step for step, one in known.items() if one.outcome == MIRRORED],
            copying=copying,
        )

    def manifest(self, step: int) -> CheckpointManifest | None:
        """Return a step's manifest; None if it is unusable or the step was removed."""
        known = self._look().get(step)
        return known.manifest if known is not None else None

    def outcomes(self) -> dict[int, str]:
        """Return `MIRRORED`, or the failure, of each finished step."""
        known = self._look()
        return {step: one.outcome for step, one in known.items() if one.outcome is not None}

    def record_outcome(self, path: Path, signature: Signature, outcome: str | None) -> None:
        """Record the outcome of a step, unless it has been saved again since."""
        known = self._known.get(path)
        if known is not None and known.signature == signature:
            known.outcome = outcome

    def forget(self, step: int) -> None:
        """Forget the outcome of a step that was removed from the bucket."""
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
    """Return the modification times (ns) of manifest and marker; None if there is none."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns, (path / COMMITTED).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
