"""Why a step was saved: labels in its manifest, which decide how long it stays."""

from __future__ import annotations

import enum


class Tier(enum.StrEnum):
    """A reason to save; a step may have several. Latest and best are computed, not saved."""

    ROLLING = "rolling"
    """The interval was over: the newest few stay."""

    EPOCH = "epoch"
    """A pass over the data was complete: stays."""

    FINAL = "final"
    """The run's last step: stays."""

    EMERGENCY = "emergency"
    """Training was stopped, and nothing else asked for this save: the newest one stays."""
