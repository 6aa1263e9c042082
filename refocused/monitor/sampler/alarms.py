"""The alarms: their limits and advice, when they are raised and cleared, and who is notified.

Between its two limits an alarm keeps its state, so that a value near one of them does not raise and
clear it repeatedly.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pydantic

from refocused.config import shipped_files
from refocused.config.yaml_source import parse_yaml
from refocused.monitor.readings import AlarmEvent, Severity, as_record

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 10.0  # of one attempt to send a message
PAUSES_SECONDS = (2.0, 10.0)  # before the second and the third attempt
REPEAT_SECONDS = 600.0  # between two messages that the same alarm is raised
END_SECONDS = 20.0  # within which the last attempts must begin when the sampler ends

Level = Literal["bad", "between", "good"]
Key = tuple[str, str]  # the alarm and its subject


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One alarm of `config/alarms.yaml`: a value at `bad` raises it, one at `good` clears it."""

    bad: float = 1
    good: float = 0
    severity: Severity = "warning"
    begins_after: float = 0.0  # seconds that the value must be bad before
    ends_after: float = 0.0  # seconds that it must be good before
    when: str = ""  # the condition in words
    advice: str = ""  # what to do


@functools.cache
def alarm_rules() -> dict[str, Rule]:
    """Return the rule of each alarm by its name."""
    file = shipped_files() / "alarms.yaml"
    return pydantic.TypeAdapter(dict[str, Rule]).validate_python(parse_yaml(file.read_bytes()))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The value of one subject (`node1 GPU 5`, `run`), and a sentence that states it."""

    alarm: str
    subject: str
    value: float | None  # True is bad and False is good; None: unknown
    text: str

    @property
    def level(self) -> Level | None:
        """Where the value lies between the limits of its rule."""
        if self.value is None:
            return None
        rule = alarm_rules()[self.alarm]
        sign = 1 if rule.bad >= rule.good else -1
        if sign * self.value >= sign * rule.bad:
            return "bad"
        return "good" if sign * self.value <= sign * rule.good else "between"


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Whether an alarm is raised, and since when (in seconds) its readings contradict that."""

    raised: bool = False
    turned: float | None = None


def judge(
    standings: Mapping[Key, Standing], readings: Iterable[Reading], *, now: float, host: str
) -> tuple[dict[Key, Standing], list[AlarmEvent]]:
    """Return the state of every alarm after these readings, and those raised or cleared.

    An alarm without a reading keeps its state: a lost GPU reports no temperature. `standings` is
    what the last call returned, `now` is in monotonic seconds.
    """
    after, events = dict(standings), []
    for found in readings:
        if found.level is None:
            continue
        key, rule = (found.alarm, found.subject), alarm_rules()[found.alarm]
        before = after.get(key, Standing())
        after[key] = _next(before, found.level, rule, now)
        raised = after[key].raised
        if raised != before.raised:
            text = found.text if raised else f"over: {found.text}"
            events.append(AlarmEvent(*key, raised, rule.severity, text, host, rule.advice))
    return after, events


def _next(before: Standing, level: Level, rule: Rule, now: float) -> Standing:
    opposite, delay = ("good", rule.ends_after) if before.raised else ("bad", rule.begins_after)
    if level != opposite:
        return Standing(before.raised)
    turned = now if before.turned is None else before.turned
    if now - turned < delay:
        return Standing(before.raised, turned)
    return Standing(not before.raised)


def still_raised(records: Iterable[Mapping[str, object]], *, host: str) -> list[AlarmEvent]:
    """Clear all alarms that lines of `events.jsonl` have raised and not cleared.

    A new sampler, maybe on another machine (`host`), does this before its first reading: an alarm
    about something that is no longer read would never be cleared.
    """
    raised: dict[Key, Severity] = {}
    for record in records:
        if record.get("kind") == AlarmEvent.kind:
            key = (str(record.get("alarm")), str(record.get("subject")))
            raised.pop(key, None)
            if record.get("raised"):
                raised[key] = "critical" if record.get("severity") == "critical" else "warning"
    text = "over: cleared at the restart of training; the readings begin again"
    return [AlarmEvent(*key, False, severity, text, host) for key, severity in raised.items()]


class AlarmMessages:
    """Sends a message when a critical alarm is raised, and another when it is cleared.

    An alarm that is raised again within `REPEAT_SECONDS` is reported after them, if it still is.
    """

    def __init__(self, target: str) -> None:
        """Start the thread; `target` is an address or a shell command."""
        is_address = target.startswith(("http://", "https://"))
        self._send_to = functools.partial(_post if is_address else _run, target)
        self._newest: dict[Key, AlarmEvent] = {}
        self._sent: dict[Key, tuple[bool, float]] = {}  # whether raised, and when that was sent
        self._has_failed = False
        self._deadline = math.inf
        self._ending = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def add(self, events: Iterable[AlarmEvent], *, run: str, step: int | None, now: float) -> None:
        """Send the messages that are due at `now` (monotonic seconds), without waiting."""
        critical = [event for event in events if event.severity == "critical"]
        self._newest |= {(event.alarm, event.subject): event for event in critical}
        for key, event in self._newest.items():
            # The first event of a session may clear an alarm of the session before.
            was_raised, at = self._sent.get(key, (not event.raised, -math.inf))
            if event.raised != was_raised and (was_raised or now - at >= REPEAT_SECONDS):
                self._sent[key] = event.raised, now if event.raised else at
                now_utc = datetime.datetime.now(datetime.UTC).isoformat()
                message = {"run": run, "step": step, "time": now_utc, **as_record(event)}
                self._thread.submit(self._send, json.dumps(message).encode())

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        self._deadline = time.monotonic() + END_SECONDS
        self._ending.set()
        self._thread.shutdown()

    def _send(self, message: bytes) -> None:
        """Send one message, with retries; log the first of several failures."""
        reason: str | None = "the run has ended"
        for pause in (0.0, *PAUSES_SECONDS):
            if (pause and self._ending.wait(pause)) or time.monotonic() > self._deadline:
                break
            try:
                reason = self._send_to(message)
            except Exception as error:  # the edge of a background owner
                reason = type(error).__name__  # its text may hold the address, which may be secret
            if reason is None:
                break
        if reason is not None and not self._has_failed:
            logger.warning("log.on_alarm: an alarm could not be sent (%s).", reason)
        self._has_failed = reason is not None


def _post(address: str, message: bytes) -> str | None:
    """POST a message; return why it was not accepted."""
    import requests  # a run without an address does not need it

    kind = {"Content-Type": "application/json"}
    options: dict[str, Any] = {"timeout": LIMIT_SECONDS, "allow_redirects": False, "stream": True}
    with requests.post(address, message, headers=kind, **options) as answer:
        return None if 200 <= answer.status_code < 300 else f"HTTP {answer.status_code}"


def _run(command: str, message: bytes) -> str | None:
    """Run a shell command with a message on its standard input; return why it failed."""
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.communicate(message, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"the command took longer than {LIMIT_SECONDS:g} s"
    return f"exit code {process.returncode}" if process.returncode else None
