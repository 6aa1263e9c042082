"""Sample the GPUs and the machine, and raise alarms, while training runs.

One process per machine. It reads NVIDIA's library, the system and the run's own files. It never
communicates with the training processes, so that its failures cannot affect them.
"""

import collections
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping

from refocused.metrics.jsonl import JsonLines, JsonLinesTail
from refocused.monitor.readings import GpuSample, SystemSample, as_record
from refocused.monitor.run_reader import RunReader, RunView
from refocused.monitor.sampler.alarms import (
    LONGEST_TREND_SECONDS,
    AlarmMessages,
    DiskPoint,
    Key,
    Reading,
    Standing,
    gpu_readings,
    judge,
    rank_readings,
    run_readings,
    still_raised,
    system_readings,
)
from refocused.monitor.sampler.gpu_reader import GpuReader, NoGpusError
from refocused.monitor.sampler.machine_readings import SystemReader
from refocused.monitor.sampler.start_sampler import ON_ALARM, SamplerSettings
from refocused.monitor.sampler.watchdog import Watchdog
from refocused.system import logs
from refocused.system.locks import FileLock
from refocused.system.number_text import duration

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # the longest time until the sampler notices that its rank has ended


def sample(argument: str) -> None:
    """Sample in this process until its rank has ended; the argument is SamplerSettings as JSON."""
    # Removed from the environment, which a command of `log.on_alarm` inherits.
    on_alarm = {"on_alarm": os.environ.pop(ON_ALARM, None)}
    settings = SamplerSettings.model_validate_json(argument).model_copy(update=on_alarm)
    # The first machine's alarms also go to the log that people read.
    log = "training.log" if settings.node == 0 else "sampler.log"
    logs.start_process_log("sampler", settings.log(log))
    if take_turn(settings):
        Sampler(settings).run()


class Sampler:
    """Samples at an interval; ends with its rank, if it has one."""

    def __init__(self, settings: SamplerSettings) -> None:
        """Open the library and the files; raise OSError if the run's folder cannot be written."""
        self._settings = settings
        self._host = socket.gethostname()
        self._samples = JsonLines(settings.log("gpu_metrics.jsonl"), compact=True)
        events = settings.log("events.jsonl")
        self._events = JsonLines(events)
        self._cleared = still_raised(JsonLinesTail(events).records(), host=self._host)
        for event in self._cleared:
            self._events.write(as_record(event))
        self._messages = AlarmMessages(settings.on_alarm) if settings.on_alarm else None
        self._newest: list[GpuSample] = []
        self.watchdog = Watchdog(settings, lambda: self._newest)
        self.watchdog.wait_for_steps()
        self._gpus: GpuReader | None = None
        note: str | None = None
        try:
            self._gpus = GpuReader(
                host=self._host,
                visible=settings.visible_devices,
                cuda_order=settings.cuda_order,
                ranks=settings.ranks,
            )
        except NoGpusError as error:
            kind, note = "sampler_warning" if error.is_fault else "sampler", str(error)
            self._events.write({"kind": kind, "text": note, "host": self._host})
            logger.log(logging.WARNING if error.is_fault else logging.INFO, "%s", note)
        self._system = SystemReader(
            settings.run,
            host=self._host,
            gpus=self._gpus.count if self._gpus is not None else None,
            gpu_note=note,
        )
        self._began = time.time()
        self._run = RunReader(settings.run, recent_only=True)
        self._disk: collections.deque[DiskPoint] = collections.deque()
        self._standings: Mapping[Key, Standing] = {}
        self._failure: str | None = None

    def run(self) -> None:
        """Sample until the rank has ended, and once more after that; without a rank, forever."""
        due = time.monotonic()
        try:
            while self._settings.training is None or self._settings.training_alive:
                if time.monotonic() >= due:
                    self.round()
                    due = max(due + self._settings.interval_seconds, time.monotonic())
                time.sleep(min(POLL_SECONDS, max(0.0, due - time.monotonic())))
            self.watchdog.finish()
            self.round()
        finally:
            if self._messages is not None:
                hang = [] if self.watchdog.event is None else [self.watchdog.event]
                name = self._settings.run.name
                self._messages.add(hang, run=name, step=None, now=time.monotonic())
                self._messages.close()
            if self._gpus is not None:
                self._gpus.close()

    def round(self) -> None:
        """Read everything once and write it; log a failure once, and continue."""
        try:
            gpus = self._newest = self._gpus.samples() if self._gpus is not None else []
            system, run = self._system.sample(), self._run.read(time.time())
            for gpu in gpus:
                self._samples.write(as_record(gpu))
            self._samples.write(as_record(system))
            readings = self._readings(gpus, system, run)
            self._standings, events = judge(
                self._standings, readings, now=time.monotonic(), host=self._host
            )
            for event in events:
                self._events.write(as_record(event))
                level, mark, words = logging.INFO, "alarm", event.text
                if event.raised:
                    level, mark, words = logging.WARNING, "ALARM", f"{words} {event.advice}"
                logger.log(level, "%s: %s", mark, words)
            if self._messages is not None:
                news, name = [*self._cleared, *events], run.name
                self._messages.add(news, run=name, step=run.step, now=time.monotonic())
                self._cleared = []
        except Exception as error:
            # The edge of a background owner: one failed round must not end the others.
            if str(error) != self._failure:
                logger.exception("A round of samples failed")
            self._failure = str(error)
        else:
            self._failure = None

    def _readings(
        self, gpus: list[GpuSample], system: SystemSample, run: RunView
    ) -> Iterator[Reading]:
        settings, now, points = self._settings, time.monotonic(), self._disk
        yield from gpu_readings(gpus, is_training=self.watchdog.is_stepping)
        # The free space of the last hour: one point a minute, and the newest.
        newest = [] if system.disk_free_gb is None else [(now, system.disk_free_gb)]
        if not points or now - points[-1][0] >= 60:
            points.extend(newest)
        while points and now - points[0][0] > LONGEST_TREND_SECONDS:
            points.popleft()
        yield from system_readings(system, [*points, *newest])
        if settings.node == 0 and settings.training is not None:
            alive, machines = settings.training_alive, ([*gpus, *run.gpus], [system, *run.systems])
            yield from run_readings(run, settings.cost, began=self._began, alive=alive)
            if (idle := self.watchdog.idle_seconds) is not None:
                words = f"The ranks last made progress {duration(idle)} ago."
                yield Reading("no_step", "run", idle > 0, words)
            yield from rank_readings(run, *machines, began=self._began)  # also of other machines


def take_turn(settings: SamplerSettings) -> bool:
    """Wait until no other sampler of this machine and run is active; return whether ours may start.

    The sampler of an earlier start notices within a second that its rank is gone. False: another
    one is active, and ours has no rank, or lost it while it waited.
    """
    # One lock per machine and run, held until the process ends.
    lock = FileLock(settings.run / f"sampler-{settings.node}.lock")
    while not lock.acquire():
        if not settings.training_alive:
            return False
        time.sleep(POLL_SECONDS)
    return True
