"""Starting each machine's sampler of GPUs and system, which training neither sees nor waits for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from refocused.config.outputs import CostConfig, LogConfig
from refocused.monitor.sampler.sampler_process import SamplerError, start_sampler
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.processes import this_process
from refocused.system.world import World


def start_sampling(
    folder: Path,
    world: World,
    *,
    report: Callable[[str, str], None],
    log: LogConfig,
    cost: CostConfig,
) -> None:
    """Start the sampler of this machine, if the run has any; every rank may call.

    One that cannot be started is told and missed: the run goes on.

    Args:
        folder: The run's.
        world: The ranks.
        report: Takes the kind of an event and its text.
        log: How often to sample.
        cost: What alarms compare the run's cost with.
    """
    if not log.sample_seconds or not world.is_local_rank_0:
        return
    settings = sampler_settings(folder, world, log=log, cost=cost, environment=os.environ)
    try:
        start_sampler(settings)
    except SamplerError as error:
        report("sampler_failed", str(error))


def sampler_settings(
    folder: Path,
    world: World,
    *,
    log: LogConfig,
    cost: CostConfig,
    environment: Mapping[str, str],
) -> SamplerSettings:
    """Return what the sampler of this rank's machine is told."""
    return SamplerSettings(
        run=folder,
        training=this_process(),
        interval_seconds=log.sample_seconds,
        node=world.node,
        ranks=world.local_world_size if world.device_kind == "cuda" else 0,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        cuda_order=environment.get("CUDA_DEVICE_ORDER"),
        per_hour_usd=cost.per_hour_usd,
        budget_usd=cost.budget_usd,
        credit_usd=cost.credit_usd,
    )
