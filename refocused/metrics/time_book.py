"""Splits this session's seconds by what they were spent on, from one record to the next."""

from __future__ import annotations

from refocused.metrics.run_time import TimeSpent
from refocused.metrics.step_phases import StepPhases
from refocused.metrics.throughput import Throughput


class TimeBook:
    """Gives every second of a session one use."""

    def __init__(self, throughput: Throughput, phases: StepPhases) -> None:
        """Begin where the session does.

        Args:
            throughput: Books laps on the host.
            phases: Times the steps where they are computed.
        """
        self._throughput = throughput
        self._phases = phases
        self._booked_until = 0.0
        self._booked: dict[str, float] = {}

    def since_last(self, *, waited_seconds: float | None = None) -> TimeSpent:
        """Return what the time since the last call was spent on; waits for the device.

        What the device computed comes first: while it does, the host may wait for a batch or begin
        a save, and neither costs anything. Of what is left each use gets at most what it took.

        Args:
            waited_seconds: That batches were waited for in this session; None: no more than before.
        """
        now = self._throughput.session_seconds
        left, self._booked_until = now - self._booked_until, now
        passes, updates = self._phases.take()
        laps = self._throughput.laps
        uses = {
            "forward_backward": passes,
            "update": updates,
            **{use: self._new(use, laps[use]) for use in ("start_up", "ending", "save")},
            "validation": self._new(
                "validation", laps["validation"] + laps["tasks"] + laps["sample"]
            ),
            "data_wait": 0.0 if waited_seconds is None else self._new("data", waited_seconds),
        }
        for use, seconds in uses.items():
            uses[use] = max(0.0, min(seconds, left))
            left -= uses[use]
        return TimeSpent(
            start_up_seconds=uses["start_up"],
            forward_backward_seconds=uses["forward_backward"],
            update_seconds=uses["update"],
            data_wait_seconds=uses["data_wait"],
            save_stall_seconds=uses["save"],
            validation_seconds=uses["validation"],
            ending_seconds=uses["ending"],
            other_seconds=max(0.0, left),
        )

    def rest_as_other(self) -> TimeSpent:
        """Return the time since the last call without a use, and without asking the device."""
        before, self._booked_until = self._booked_until, self._throughput.session_seconds
        return TimeSpent(other_seconds=self._booked_until - before)

    def _new(self, use: str, total_seconds: float) -> float:
        """Return what came to a total since it was last asked for."""
        before, self._booked[use] = self._booked.get(use, 0.0), total_seconds
        return total_seconds - before
