from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest
from thread_ranks import on_two_ranks, results

from refocused.config.outputs import TrackingConfig
from refocused.metrics import tracking
from refocused.metrics.trackers import Tracker, Trackers
from refocused.metrics.tracking import start_tracking, trackers_of
from refocused.metrics.wandb import WandbNote, WandbTracker
from refocused.system.world import World

ALL = TrackingConfig(wandb="demo", tensorboard=True, openmetrics="run.prom")


@dataclasses.dataclass
class Listening:
    """Stands for the reporter."""

    tracked: list[Trackers] = dataclasses.field(default_factory=list)

    def track(self, trackers: Trackers) -> None:
        self.tracked.append(trackers)

    def event(self, kind: str, text: str, **facts: object) -> None: ...


def start(folder: Path, world: World, reporter: Listening, config: TrackingConfig) -> str | None:
    return start_tracking(
        folder,
        world,
        track=reporter.track,
        report=reporter.event,
        step=10,
        wandb_id=None,
        tracking=config,
        run="tiny",
        settings={},
        is_automatic=True,
    )


def test_a_run_is_told_to_those_it_asks_for(tmp_path: Path) -> None:
    def names(config: TrackingConfig) -> list[str]:
        note = WandbNote("tiny-1", 0)
        found = trackers_of(tmp_path, tracking=config, run="tiny", settings={}, step=0, note=note)
        return [one.name for one in found]

    assert names(ALL) == ["wandb", "tensorboard", "openmetrics"]
    assert names(TrackingConfig()) == []
    assert names(TrackingConfig(tensorboard=True)) == ["tensorboard"]


def test_rank_0_alone_tells_and_every_rank_knows_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "Trackers", lambda trackers, tell: trackers)
    reporters = [Listening(), Listening()]

    def action(world: World) -> str | None:
        return start(tmp_path, world, reporters[world.rank], ALL)

    first, second = results(on_two_ranks(action))
    assert first is not None
    assert first.startswith("tiny-")
    assert second == first
    (trackers,) = cast("list[list[Tracker]]", reporters[0].tracked)
    assert isinstance(trackers[0], WandbTracker)
    assert reporters[1].tracked == []


def test_without_wandb_the_id_of_the_checkpoint_stays(tmp_path: Path) -> None:
    reporter = Listening()
    wandb_id = start_tracking(
        tmp_path,
        World(),
        track=reporter.track,
        report=reporter.event,
        step=0,
        wandb_id="tiny-1",
        tracking=TrackingConfig(),
        run="tiny",
        settings={},
        is_automatic=True,
    )
    assert (wandb_id, reporter.tracked) == ("tiny-1", [])
