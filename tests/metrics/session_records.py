"""Records of a session, and the run they belong to, for the tests of trackers."""

from pathlib import Path
from typing import Any

from refocused.config.outputs import TrackingConfig
from refocused.metrics.trackers import Histogram, Record, TrackedRun

SETTINGS = {"optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]}, "run": {"name": "tiny"}, "none": None}
VALIDATION: Record = {"kind": "validation", "step": 1, "validation_loss": 3.0, "perplexity": 20.0}
SAMPLE: Record = {"kind": "sample", "step": 2, "sample": "def f():\n    return a < b"}
HISTOGRAMS: Record = {
    "kind": "histograms",
    "step": 3,
    "histograms": [Histogram("weights/head.weight", -1.0, 1.0, (1, 0, 2, 1), 0.5, 2.0)],
}


def step(number: int, loss: float | None = None, **more: Any) -> Record:
    loss = 3.5 - number if loss is None else loss
    return {"kind": "step", "step": number, "loss": loss, "mfu_fraction": None, **more}


def tracked_run(folder: Path, *, at: int = 0, **tracking: Any) -> TrackedRun:
    """A run named `tiny` whose session starts at a step."""
    config = TrackingConfig(**tracking)
    return TrackedRun(folder, "tiny", step=at, settings=SETTINGS, tracking=config)
