"""Watch this machine's ranks from outside; explain a hang, and stop the run.

Nothing here waits for a rank, and the run's disk is waited for only for a bounded time: it may be
the cause. Ranks of other machines are seen by the watchdogs there.
"""

import contextlib
import datetime
import functools
import json
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from refocused.metrics.jsonl import JsonLines, read_json, write_state
from refocused.monitor.readings import AlarmEvent, GpuSample, as_record
from refocused.monitor.sampler.alarms import alarm_rules
from refocused.monitor.sampler.hangs import Explanation, Watch, explain, report
from refocused.monitor.sampler.rank_probe import RankProbe
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.errors import ExitCode

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STACKS_SECONDS = 3.0  # for ranks to write their stacks and collectives
DISK_SECONDS = 10.0  # for the run's disk to take the report
OTHERS_SECONDS = 10.0  # for the watchdog of the machine whose rank is missing to be first
EXIT_SECONDS = 6.0  # for ranks to exit; launchers return the code of the first


class Watchdog:
    """Watches from a thread of the sampler's process, whose other work may wait for a disk.

    Its `event` is the alarm, once the run was stopped.
    """

    def __init__(self, settings: SamplerSettings, gpus: Callable[[], Sequence[GpuSample]]) -> None:
        """Watch until all ranks of this machine have ended; `gpus` are the newest readings."""
        self.event: AlarmEvent | None = None
        self._settings, self._gpus = settings, gpus
        self._watch = Watch(settings.hang_minutes)
        self._ranks: list[RankProbe] = []
        for place in settings.places:
            with contextlib.suppress(OSError):  # it has ended
                self._ranks += [RankProbe(place)] if place.node == settings.node else []
        self._thread = threading.Thread(target=self._watch_ranks, daemon=True)
        self._thread.start()

    def wait_for_steps(self) -> None:
        """Wait until this machine's ranks have started, or ended: files are of an earlier start."""
        while any(one.progress.moment().activity == "start-up" for one in self._alive()):
            time.sleep(POLL_SECONDS)

    def finish(self) -> None:
        """Wait until all ranks of a run that is being stopped have ended."""
        if self.event is not None:
            self._thread.join()

    def _alive(self) -> list[RankProbe]:
        return [one for one in self._ranks if one.place.process.alive]

    def _watch_ranks(self) -> None:
        try:
            while alive := self._alive():
                moments = {one.place.rank: one.progress.moment() for one in alive}
                idle = self._watch.observe(moments, time.monotonic())
                if idle and self._settings.hang_minutes != 0:
                    self._explain_and_stop(alive, idle)
                time.sleep(POLL_SECONDS)
        except Exception:  # the edge of a background owner
            logger.exception("The watchdog failed; a hang would not be noticed any more")

    def _explain_and_stop(self, alive: Sequence[RankProbe], idle: float) -> None:
        for one in alive:
            one.begin()
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and not all(
            one.stacks and one.progress.collectives() is not None for one in alive
        ):
            time.sleep(0.1)
        ranks = [one.seen() for one in alive]
        found, limit = explain(ranks), self._watch.limit_seconds
        told = self._write(
            found, functools.partial(report, ranks, found, idle, limit, ExitCode.HUNG)
        )
        logger.error("%s", told)
        if found.cause == "none":
            time.sleep(OTHERS_SECONDS)
        self._stop(told)
        # A rank may have written another state meanwhile.
        in_time(self._write_state)

    def _write(self, found: Explanation, text: Callable[[Path], str]) -> str:
        """Write the report and the alarm; return the text, which names the report's file."""
        settings, rule = self._settings, alarm_rules()["hang"]
        now, host = datetime.datetime.now(datetime.UTC), self._ranks[0].place.host
        event = AlarmEvent("hang", "run", True, rule.severity, found.text, host, rule.advice)
        self.event = event
        stacks = [f"rank {one.place.rank}\n{one.stacks}" for one in self._ranks]
        gpus = [json.dumps(as_record(gpu)) for gpu in self._gpus()] or ["none"]
        rest = "\n\n".join(["", "GPUs", *gpus, *stacks, ""])
        file = settings.log(f"hang-{now:%Y%m%d-%H%M%S}.txt")

        def write() -> None:
            file.write_text(text(file) + rest)
            JsonLines(settings.log("events.jsonl")).write(as_record(event))

        if in_time(write):
            return text(file)
        spare = Path(tempfile.gettempdir()) / f"refocused-{file.name}"  # the run's disk takes none
        in_time(lambda: spare.write_text(text(spare) + rest))
        return text(spare)

    def _write_state(self) -> None:
        file = self._settings.run / "state.json"
        if self._settings.node == 0 and (state := read_json(file)) is not None:
            write_state(file, {**state, "status": "failed", "exit_code": int(ExitCode.HUNG)})

    def _stop(self, text: str) -> None:
        """Make ranks exit by themselves, for the exit code; then kill those that cannot."""
        alive = self._alive()
        alive.sort(key=lambda one: one.progress.moment().beat_seconds > EXIT_SECONDS / 2)
        for number, one in enumerate(alive):  # the first one that has the interpreter prints it
            one.progress.order(ExitCode.HUNG, "" if number else text)
        deadline = time.monotonic() + EXIT_SECONDS
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        for one in self._alive():
            one.send(signal.SIGKILL)


def in_time(write: Callable[[], object]) -> bool:
    """Write to a disk that may be dead; return whether that was done in time."""
    done = threading.Event()

    def carry_out() -> None:
        with contextlib.suppress(OSError):
            write()
            done.set()

    threading.Thread(target=carry_out, daemon=True).start()
    return done.wait(DISK_SECONDS)
