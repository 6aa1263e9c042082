"""Start the processes of the sampler, and of `run.on_end`, with their settings."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from refocused.config.outputs import CostConfig, LogConfig
from refocused.config.run_config import RunConfig
from refocused.metrics.jsonl import read_json
from refocused.system.errors import ExitCode
from refocused.system.processes import ProcessIdentity, start_detached, this_process
from refocused.system.progress import Place

if TYPE_CHECKING:
    from refocused.system.world import World

logger = logging.getLogger(__name__)
ON_ALARM = "REFOCUSED_ON_ALARM"  # the variable that holds `log.on_alarm` in its environment
ON_END = "REFOCUSED_ON_END"  # the same for `run.on_end`, see `on_end.py`


class SamplerSettings(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The settings of a sampler's process."""

    run: Path  # the run's folder
    training: ProcessIdentity | None  # the machine's first rank, with which the sampler ends; None:
    # no run is watched, and the sampler continues until it is interrupted
    interval_seconds: float = pydantic.Field(default=5.0, gt=0)
    node: int = 0  # this machine's number in the run; 0 also watches the run itself
    ranks: int = 1  # of the run, on this machine
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES of the ranks, if set
    cuda_order: str | None = None  # CUDA_DEVICE_ORDER of the ranks, if set
    cost: CostConfig = CostConfig()  # what alarms compare the run's cost with
    hang_minutes: float | None = None  # after which a run without progress is stopped; 0: never
    places: tuple[Place, ...] = ()  # of all ranks
    # Passed in the environment: it may hold a secret.
    on_alarm: str | None = pydantic.Field(default=None, exclude=True)

    @property
    def training_alive(self) -> bool:
        """Whether the machine's first rank runs."""
        return self.training is not None and self.training.alive

    def log(self, name: str) -> Path:
        """Return the path of this machine's `gpu_metrics.jsonl`, `events.jsonl` or `sampler.log`.

        The first machine's events are also the trainer's.
        """
        path = self.run / "logs" / name
        return path if self.node == 0 else path.with_stem(f"{path.stem}-node-{self.node}")


def start_sampling(
    folder: Path, world: World, *, log: LogConfig, cost: CostConfig, hang_minutes: float | None = 0
) -> None:
    """Start the sampler of this machine, if the run wants one; every rank must call.

    If it cannot be started, that is logged, and the run continues.
    """
    if not log.sample_seconds:
        return
    places: list[dict[str, object]] = []
    if (files := world.progress.files) is not None:  # else the ranks' memory is not shared
        here = {"rank": world.rank, "node": world.node, "host": socket.gethostname()}
        places = world.gather({**here, "process": this_process(), "files": files})
    if not world.is_local_rank_0:
        return
    settings = SamplerSettings(
        run=folder.absolute(),
        training=this_process(),
        interval_seconds=log.sample_seconds,
        node=world.node,
        ranks=world.local_world_size if world.device_kind == "cuda" else 0,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cuda_order=os.environ.get("CUDA_DEVICE_ORDER"),
        cost=cost,
        on_alarm=log.on_alarm,
        hang_minutes=hang_minutes,
        places=tuple(map(Place.model_validate, places)),
    )
    try:
        start_sampler(settings)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "The sampler of GPUs and machine could not be started (%s); its output is in %s. "
            "Training continues without its readings and alarms.",
            *(error, settings.log("sampler.log")),
        )


def start_sampler(settings: SamplerSettings) -> int:
    """Start a machine's sampler; return its process id, or raise OSError or SubprocessError."""
    function = "refocused.monitor.sampler.sampler:sample"
    log, secrets = settings.log("sampler.log"), {ON_ALARM: settings.on_alarm}
    return start_detached(function, settings.model_dump_json(), log=log, secrets=secrets)


def begin_on_end(
    config: RunConfig, code: ExitCode, *, step: int, was_over: bool = False, node: int = 0
) -> list[str]:
    """Start the process of `run.on_end`, if the run has one and was not stopped; return log lines.

    `code` is the exit code of a run that has trained to a `step` and will not be restarted. If it
    `was_over`, complete in its mirror, before this start, then somebody only looks at it.
    """
    command, folder = config.run.on_end, Path(config.run.directory, config.run.name).absolute()
    if command is None or code == ExitCode.INTERRUPTED:
        return []
    if was_over:
        return ["      run.on_end does not run: the run was complete before, and took no step."]
    facts = {"RUN": config.run.name, "FOLDER": str(folder), "EXIT_CODE": int(code)}
    facts |= {"STEP": step, "NODE": node}
    mirror, limit = config.checkpoint.mirror, config.checkpoint.drain_minutes
    argument = json.dumps([facts, mirror is not None, limit, last_start(folder)])
    function, log = "refocused.monitor.sampler.on_end:wait_and_run", folder / "logs" / "on_end.log"
    secrets = {ON_END: command, ON_ALARM: config.log.on_alarm}
    try:
        pid = start_detached(function, argument, log=log, secrets=secrets)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"      run.on_end does NOT run: its process could not be started ({error})."]
    when = "as soon as the mirror is complete" if mirror is not None else "now"
    return [f"      run.on_end runs in the background, {when}; to cancel it: kill {pid}"]


def last_start(folder: Path) -> list[Any]:
    """Return what tells the starts of a run apart, also on a machine without rank 0."""
    run_file, state = folder / "run.yaml", read_json(folder / "state.json") or {}
    written = run_file.stat().st_mtime_ns if run_file.exists() else None  # anew by each
    return [written, state.get("session_began")]
