"""Removing old steps from a bucket: what retention has to know of them, and doing what it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from refocused.bucket.bucket import BlobInfo
from refocused.checkpoints.mirror.remote_steps import RemoteSteps, is_copy
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    SUPERSEDED,
    CheckpointManifest,
)
from refocused.checkpoints.step.retention import KeptStep, best_of, to_remove
from refocused.checkpoints.step.tiers import SaveReason
from refocused.system.errors import CheckpointError


class RemoteRetention:
    """The checkpoints of one branch in a bucket, of which the newest few stay.

    Those of other branches, or with a mark of an earlier version, are neither counted nor removed:
    the run left them on purpose. So is one whose manifest cannot be read: what belongs to it is not
    known.
    """

    def __init__(self, remote: RemoteSteps, branch: Branch = FIRST_BRANCH, *, keep: int) -> None:
        """Keep the newest `keep` rolling steps below a prefix, and what retention never removes."""
        self._remote = remote
        self._branch = branch
        self._keep = keep
        self._manifests: dict[int, tuple[BlobInfo, CheckpointManifest | None]] = {}

    def steps(self, *, in_use: Collection[int] = ()) -> list[KeptStep]:
        """List the steps; manifests that were read once are not read again.

        Args:
            in_use: Steps that are being copied, or are about to be.

        Raises:
            BucketError: The bucket cannot be read.
        """
        manifests, whole = {}, set()
        for name, objects in self._remote.scan().items():
            step = self._branch.step_of(name)
            if step is None or SUPERSEDED in objects:
                continue
            manifest = self._manifest(step, objects)
            if manifest is None:
                continue
            manifests[step] = manifest
            if COMMITTED in objects and _has_all(objects, manifest):
                whole.add(step)
        return kept_steps(manifests, whole=whole, in_use=in_use)

    def thin_out(self, *, in_use: Collection[int] = ()) -> list[int]:
        """Remove what is not kept, each step's marker first; return the steps that went.

        Raises:
            BucketError: The bucket cannot be read or written; what is half removed is unmarked.
        """
        doomed = to_remove(self.steps(in_use=in_use), keep=self._keep)
        for step in doomed:
            self._remote.retract(self._branch.name_of(step))
        return doomed

    def unwanted(self, lacking: Mapping[int, CheckpointManifest]) -> set[int]:
        """Return those of the local steps that would be removed as soon as they were copied.

        Args:
            lacking: The local steps that the bucket does not hold.

        Raises:
            BucketError: The bucket cannot be read.
        """
        there = {step.step for step in self.steps() if step.verified}
        manifests = {step: self._manifests[step][1] for step in there} | dict(lacking)
        together = kept_steps(manifests, whole=set(manifests), in_use=())
        return set(to_remove(together, keep=self._keep)) & set(lacking)

    def _manifest(self, step: int, objects: Mapping[str, BlobInfo]) -> CheckpointManifest | None:
        """Return a step's manifest; None: it has none, or one that cannot be used."""
        blob = objects.get(MANIFEST)
        if blob is None:
            return None
        known = self._manifests.get(step)
        if known is None or known[0] != blob:
            try:
                known = blob, self._remote.manifest(self._branch.name_of(step))
            except CheckpointError:
                known = blob, None
            self._manifests[step] = known
        return known[1]


def kept_steps(
    manifests: Mapping[int, CheckpointManifest | None],
    *,
    whole: Collection[int],
    in_use: Collection[int],
) -> list[KeptStep]:
    """Say of each step what retention has to know; the best is that of the whole ones."""
    best = best_of(
        {
            step: found.validation_loss
            for step, found in manifests.items()
            if found and step in whole
        }
    )
    return [
        KeptStep(
            step=step,
            verified=step in whole,
            tiers=frozenset(found.tiers if found else {SaveReason.ROLLING}),
            best=step == best,
            in_use=step in in_use,
        )
        for step, found in manifests.items()
    ]


def _has_all(objects: Mapping[str, BlobInfo], manifest: CheckpointManifest) -> bool:
    return all(
        file in objects and is_copy(objects[file], record)
        for file, record in manifest.files.items()
    )
