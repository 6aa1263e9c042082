"""Starting the trackers of a run: Weights & Biases, TensorBoard, a file for Prometheus."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from refocused.config.outputs import TrackingConfig
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.openmetrics import OpenMetricsTracker
from refocused.metrics.tensorboard import TensorBoardTracker
from refocused.metrics.trackers import Tracker, Trackers
from refocused.metrics.wandb import WandbNote, WandbRun, WandbTracker, continued, read_note
from refocused.system.world import World

NOTE_FILE = Path("wandb") / "refocused.json"


def start_tracking(
    folder: Path,
    world: World,
    *,
    track: Callable[[Trackers], None],
    report: Callable[[str, str], None],
    step: int,
    wandb_id: str | None,
    tracking: TrackingConfig,
    run: str,
    settings: Mapping[str, object],
    is_automatic: bool,
) -> str | None:
    """Open the trackers on rank 0; return the id of the run at Weights & Biases.

    Every rank must call. Nothing waits for a tracker, and none can fail the run.

    Args:
        folder: The run's.
        world: The ranks.
        track: Takes the trackers, on rank 0.
        report: Takes the kind of an event and its text.
        step: What training starts from.
        wandb_id: Of the run, from the checkpoint; None: it has none yet.
        tracking: Which ones.
        run: The run's name.
        settings: All that the run was given, nested.
        is_automatic: Training starts from the newest step there is, not from one that a person
            chose.
    """

    def start() -> str | None:
        note = None
        if tracking.wandb is not None:
            note = continued(
                read_note(folder / NOTE_FILE),
                known=wandb_id,
                run=run,
                step=step,
                is_automatic=is_automatic,
                token=secrets.token_hex(4),
            )
        trackers = trackers_of(
            folder, tracking=tracking, run=run, settings=settings, step=step, note=note
        )
        if trackers:
            track(Trackers(trackers, tell=report))
        return wandb_id if note is None else note.id

    return world.on_rank_0(start)


def trackers_of(
    folder: Path,
    *,
    tracking: TrackingConfig,
    run: str,
    settings: Mapping[str, object],
    step: int,
    note: WandbNote | None,
) -> list[Tracker]:
    """Return the trackers that a run asks for, none of them open.

    Args:
        folder: The run's.
        tracking: Which ones.
        run: The run's name.
        settings: All that the run was given, nested.
        step: Where training starts.
        note: What Weights & Biases knows of the run; None: it is not asked for.
    """
    found: list[Tracker] = []
    if tracking.wandb is not None and note is not None:
        about = WandbRun(
            project=tracking.wandb,
            run=run,
            folder=folder,
            settings=settings,
            step=step,
            note=note,
            note_file=folder / NOTE_FILE,
            metrics_file=folder / METRICS_FILE,
        )
        found.append(WandbTracker(about))
    if tracking.tensorboard:
        found.append(TensorBoardTracker(folder / "tensorboard", step=step, settings=settings))
    if tracking.openmetrics is not None:
        found.append(OpenMetricsTracker(Path(tracking.openmetrics).expanduser(), run=run))
    return found
