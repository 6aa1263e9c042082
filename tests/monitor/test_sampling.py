from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from refocused.config.outputs import CostConfig, LogConfig
from refocused.monitor.sampler import start_sampler as sampling
from refocused.monitor.sampler.sampler_process import SamplerError
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.processes import this_process
from refocused.system.world import World

GPU_RANK = World(world_size=16, local_world_size=8, device_kind="cuda")


@dataclasses.dataclass
class Events:
    """Stands for the reporter."""

    kinds: list[str]

    def event(self, kind: str, text: str, **facts: object) -> None:
        self.kinds.append(kind)


def start(world: World, log: LogConfig, folder: Path) -> list[str]:
    events = Events([])
    sampling.start_sampling(folder, world, report=events.event, log=log, cost=CostConfig())
    return events.kinds


def test_what_a_machines_sampler_is_told(tmp_path: Path) -> None:
    second = dataclasses.replace(GPU_RANK, rank=8, node=1)
    settings = sampling.sampler_settings(
        tmp_path,
        second,
        log=LogConfig(sample_seconds=2),
        cost=CostConfig(per_hour_usd=24, budget_usd=400, credit_usd=500),
        environment={"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
    assert settings.training == this_process()
    assert (settings.node, settings.ranks, settings.interval_seconds) == (1, 8, 2)
    assert (settings.visible_devices, settings.cuda_order) == ("1,0", "PCI_BUS_ID")
    money = (settings.per_hour_usd, settings.budget_usd, settings.credit_usd)
    assert money == (24, 400, 500)


def test_no_gpu_belongs_to_ranks_on_a_cpu(tmp_path: Path) -> None:
    cpu = dataclasses.replace(GPU_RANK, device_kind="cpu")
    settings = sampling.sampler_settings(
        tmp_path, cpu, log=LogConfig(), cost=CostConfig(), environment={}
    )
    assert (settings.ranks, settings.visible_devices) == (0, None)


@pytest.mark.parametrize(
    ("local_rank", "seconds", "count"), [(0, 5.0, 1), (1, 5.0, 0), (0, 0.0, 0)]
)
def test_each_machines_first_rank_starts_one_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, seconds: float, count: int
) -> None:
    started: list[SamplerSettings] = []
    monkeypatch.setattr(sampling, "start_sampler", started.append)
    world = dataclasses.replace(GPU_RANK, local_rank=local_rank)
    assert start(world, LogConfig(sample_seconds=seconds), tmp_path) == []
    assert len(started) == count


def test_a_sampler_that_cannot_be_started_is_told_and_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(settings: Any) -> None:
        raise SamplerError("no room")

    monkeypatch.setattr(sampling, "start_sampler", fails)
    assert start(GPU_RANK, LogConfig(), tmp_path) == ["sampler_failed"]
