"""Why a step was saved: labels in its manifest, which decide how long it stays."""

from __future__ import annotations

import enum


class SaveReason(enum.StrEnum):
    """A reason to save; a step may have several. The latest and the present best are computed."""

    ROLLING = "rolling"
    """The interval was over: the newest few stay."""

    EPOCH = "epoch"
    """A pass over the data was complete: stays."""

    BEST = "best"
    """Its validation was the best so far: stays until another one is better."""

    FINAL = "final"
    """The run's last step: stays."""

    EMERGENCY = "emergency"
    """Training was stopped, and nothing else asked for this save: the newest one stays."""
