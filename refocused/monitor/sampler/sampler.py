"""The sampler: writes what GPUs and machine do, and raises alarms, while its rank lives.

One process a machine; without a rank it samples until it is interrupted. It reads NVIDIA's library,
the system and the run's own files, and never talks to the processes that train; nothing that
happens to it reaches them.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from refocused.metrics.jsonl import JsonLines, JsonLinesTail
from refocused.monitor.readings import AlarmEvent, GpuSample, SystemSample, as_record
from refocused.monitor.run_reader import RunReader, RunSight
from refocused.monitor.sampler.alarm_rules import (
    LONGEST_TREND_SECONDS,
    DiskPoint,
    gpu_readings,
    system_readings,
)
from refocused.monitor.sampler.alarms import Key, Reading, Standing, judge, still_raised
from refocused.monitor.sampler.gpu_reader import GpuReader, NoGpusError
from refocused.monitor.sampler.machine_readings import SystemReader
from refocused.monitor.sampler.run_alarms import Money, run_readings
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.locks import FileLock

if TYPE_CHECKING:
    from refocused.monitor.sampler.start_sampler import SamplerSettings


logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # the longest time until it is seen that the rank has ended


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What one round of reading has found."""

    gpus: list[GpuSample]
    system: SystemSample
    run: RunSight


class Sampler:
    """Samples again and again; ends by itself when its rank does, if it has one."""

    def __init__(self, settings: SamplerSettings) -> None:
        """Open the library and the files.

        Raises:
            OSError: The run's folder cannot be written.
        """
        self._settings = settings
        self._host = socket.gethostname()
        self._samples = JsonLines(settings.samples, compact=True)
        self._events = JsonLines(settings.events)
        self._end_earlier_alarms()
        self._gpus, note = self._open_gpus()
        self._system = SystemReader(
            settings.run,
            host=self._host,
            gpus=self._gpus.count if self._gpus is not None else None,
            gpu_note=note,
        )
        self._run = RunReader(settings.run, began=time.time())
        self._disk: collections.deque[DiskPoint] = collections.deque()
        self._standings: Mapping[Key, Standing] = {}
        self._failure: str | None = None

    def run(self) -> None:
        """Sample until the rank has ended, and once more then; without one, for ever."""
        due = time.monotonic()
        try:
            while self._settings.training is None or self._settings.training_alive:
                if time.monotonic() >= due:
                    self.round()
                    due = max(due + self._settings.interval_seconds, time.monotonic())
                time.sleep(min(LOOK_SECONDS, max(0.0, due - time.monotonic())))
            self.round()
        finally:
            if self._gpus is not None:
                self._gpus.close()

    def round(self) -> None:
        """Take and write one sample of everything; what fails is said once, and tried again."""
        try:
            found = self._read()
            self._write(found)
            self._judge(found)
        except Exception as error:
            # The edge of a background owner: a reading that fails costs no other round.
            if str(error) != self._failure:
                logger.exception("a round of samples failed")
            self._failure = str(error)
        else:
            self._failure = None

    def _write(self, found: Round) -> None:
        samples: list[GpuSample | SystemSample] = [*found.gpus, found.system]
        for sample in samples:
            self._samples.write(as_record(sample))

    def _read(self) -> Round:
        return Round(
            self._gpus.samples() if self._gpus is not None else [],
            self._system.sample(),
            self._run.sight(alive=self._settings.training_alive),
        )

    def _judge(self, found: Round) -> None:
        self._standings, events = judge(
            self._standings, self._readings(found), now=time.monotonic(), host=self._host
        )
        for event in events:
            self._tell(event)

    def _readings(self, found: Round) -> Iterator[Reading]:
        yield from gpu_readings(found.gpus, is_training=found.run.is_training)
        yield from system_readings(found.system, self._disk_trend(found.system))
        settings = self._settings
        if settings.node == 0 and settings.training is not None:
            money = Money(settings.per_hour_usd, settings.budget_usd, settings.credit_usd)
            yield from run_readings(found.run, money, now=time.time())

    def _disk_trend(self, system: SystemSample) -> list[DiskPoint]:
        """Return what was free in the last hour, one point a minute and the last one."""
        if system.disk_free_gib is None:
            return []
        now, points = time.monotonic(), self._disk
        if not points or now - points[-1][0] >= 60:
            points.append((now, system.disk_free_gib))
        while now - points[0][0] > LONGEST_TREND_SECONDS:
            points.popleft()
        return [*points, (now, system.disk_free_gib)]

    def _tell(self, event: AlarmEvent) -> None:
        self._events.write(as_record(event))
        level = logging.WARNING if event.raised else logging.INFO
        logger.log(level, "%s: %s", "ALARM" if event.raised else "alarm", event.text)

    def _end_earlier_alarms(self) -> None:
        earlier = JsonLinesTail(self._settings.events).records()
        for event in still_raised(earlier, host=self._host):
            self._events.write(as_record(event))

    def _open_gpus(self) -> tuple[GpuReader | None, str | None]:
        """Open NVIDIA's library; without one say why, once."""
        settings = self._settings
        try:
            reader = GpuReader(
                host=self._host,
                visible=settings.visible_devices,
                cuda_order=settings.cuda_order,
                ranks=settings.ranks,
            )
        except NoGpusError as error:
            kind: Literal["sampler", "sampler_warning"] = (
                "sampler_warning" if error.is_fault else "sampler"
            )
            self._events.write({"kind": kind, "text": str(error), "host": self._host})
            logger.log(logging.WARNING if error.is_fault else logging.INFO, "%s", error)
            return None, str(error)
        return reader, None


def take_turn(settings: SamplerSettings) -> bool:
    """Wait until no other sampler of this machine runs, and be the one.

    That of an earlier start sees within a second that its rank is gone.

    Returns:
        False: another one samples, and ours has no rank any more to wait for.
    """
    lock = FileLock(settings.lock)  # held until the process ends
    while not lock.acquire():
        if not settings.training_alive:
            return False
        time.sleep(LOOK_SECONDS)
    return True
