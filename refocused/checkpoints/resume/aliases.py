"""The names that stand for whatever step has a role now: latest, best, the end of an epoch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from refocused.checkpoints.step.checkpoint_manifest import SaveReason

if TYPE_CHECKING:
    from refocused.checkpoints.resume.catalog import CatalogEntry

ROLES = ("latest", "best", "final", "latest_backup")
_SYNONYMS = {"best_model": "best"}
_EPOCH = re.compile(r"epoch_(\d+)")


def is_role(request: str) -> bool:
    """Whether a request speaks of a role, and not of a step."""
    return request in (*ROLES, *_SYNONYMS) or _EPOCH.fullmatch(request) is not None


def by_role(request: str, entries: Sequence[CatalogEntry]) -> CatalogEntry | None:
    """Return the usable step that has a role; None: no step has it.

    `latest_backup` is the step before the latest; `epoch_00003` the one that was saved when three
    passes over the data were complete.

    Args:
        request: As `is_role` accepts it.
        entries: All steps of a run, ascending.
    """
    role = _SYNONYMS.get(request, request)
    usable = [entry for entry in entries if entry.usable and entry.is_present]
    if role == "latest_backup":
        return usable[-2] if len(usable) > 1 else None
    epoch = _EPOCH.fullmatch(role)
    if epoch is not None:
        role = epoch_note(int(epoch[1]))
    return next((entry for entry in reversed(usable) if role in entry.notes), None)


def tier_notes(tiers: Sequence[SaveReason], *, epoch: int) -> tuple[str, ...]:
    """Return what a list says of a step's labels; nothing of a rolling or formerly best one."""
    texts = {SaveReason.EPOCH: epoch_note(epoch), SaveReason.ROLLING: "", SaveReason.BEST: ""}
    return tuple(filter(None, (texts.get(tier, tier.value) for tier in tiers)))


def epoch_note(epochs: int) -> str:
    """Say which epoch's end it is, counted by those that are complete."""
    return f"epoch {epochs}"
