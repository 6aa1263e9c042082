"""Run `run.on_end` on a machine, once the run has ended and its mirror is complete.

A process of its own waits for that, since the mirror outlives the ranks and their supervisor. It
waits as long as the mirror copies: what is lost costs more than a machine that waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.metrics.jsonl import read_json
from refocused.monitor.readings import AlarmEvent
from refocused.monitor.sampler.alarms import AlarmMessages
from refocused.monitor.sampler.start_sampler import ON_ALARM, ON_END, last_start
from refocused.system import logs
from refocused.system.processes import is_running, liveness_of, run_shell

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 300.0  # of the command
POLL_SECONDS = 1.0
# For supervisor and launchers to return the exit code, and for the next run of a script to begin.
SETTLE_SECONDS = 15.0
SILENT_SECONDS = 300.0  # a mirror that has reported nothing for so long has ended


def wait_and_run(argument: str) -> None:
    """Wait and run the command in this process; the argument is JSON, see `begin_on_end`."""
    command, on_alarm = os.environ.pop(ON_END), os.environ.pop(ON_ALARM, None)
    facts, has_mirror, patience_minutes, begun = json.loads(argument)
    folder, node = Path(facts["FOLDER"]), facts["NODE"]
    name = "training.log" if node == 0 else f"on_end-node-{node}.log"
    logs.start_process_log("on_end", folder / "logs" / name)

    def warn(text: str) -> None:
        logger.warning("%s The machine goes on, and costs.", text)
        if on_alarm is not None:
            messages = AlarmMessages(on_alarm)
            event = AlarmEvent("on_end", "run", True, "critical", text, socket.gethostname())
            messages.add([event], run=folder.name, step=facts["STEP"], now=time.monotonic())
            messages.close()

    changed = time.monotonic()
    late, status = changed + patience_minutes * 60, dict[str, Any]()
    time.sleep(SETTLE_SECONDS)
    while True:
        # Its own supervisor may still run, as with a terminal that takes no more output.
        if last_start(folder) != begun:
            logger.info("run.on_end does not run: the run was started again.")
            return
        now, before, status = time.monotonic(), status, read_json(folder / "mirror.json") or {}
        changed, awaited = changed if status == before else now, work_left(folder)
        if has_mirror and not status.get("complete"):
            awaited = (
                f"the mirror ({status.get('failed') or status.get('last_error') or 'it copies'})"
            )
            if now - changed > SILENT_SECONDS and not has_mirror_process(status):
                warn(f"run.on_end does NOT run: the mirror has ended. It waited for {awaited}.")
                return
        if awaited is None:
            break
        if now > late:
            late = math.inf
            warn(f"run.on_end still waits for {awaited}.")
        time.sleep(POLL_SECONDS)
    logger.info("Nothing is left to copy. Running run.on_end.")
    variables = {f"REFOCUSED_{name}": str(value) for name, value in facts.items()}
    if (reason := run_shell(command, b"", LIMIT_SECONDS, **variables)) is not None:
        warn(f"run.on_end failed: {reason}.")


def has_mirror_process(status: Mapping[str, Any]) -> bool:
    """Return whether the mirror that wrote a `mirror.json` runs on this machine."""
    process = status.get("process") or {}
    named = {"pid": process.get("pid"), "pid_started": process.get("started")}
    return liveness_of(named) == "alive"


def work_left(folder: Path) -> str | None:
    """Return what else works here: the export of a run's last model, another run, its mirror."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes()
            if b"export_final_model" in words and str(folder).encode() in words:
                return "the export of the final model"
    for file in folder.parent.glob("*/state.json"):
        mirror = read_json(file.with_name("mirror.json")) or {}
        works = is_running(read_json(file) or {}) or has_mirror_process(mirror)
        if file.parent != folder and works:
            return f"another run of this machine, {file.parent.name}"
    return None
