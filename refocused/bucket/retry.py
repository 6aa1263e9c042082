"""When a failed request is tried again, and how long to wait first."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable

from refocused.system.errors import BucketError

logger = logging.getLogger(__name__)

_TRANSIENT_STATUSES = frozenset({408, 429})


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why one request failed.

    Attributes:
        reason: What was seen, in words.
        transient: The same request may succeed later.
        status: HTTP status of the answer; None when there was no answer.
        retry_after_s: Seconds the server asked to wait; None when it did not ask.
    """

    reason: str
    transient: bool
    status: int | None = None
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, counted in failures without progress.

    Full jitter draws each wait uniformly between 0 and the exponential ceiling (Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so that many nodes that fail
    together do not come back together.

    Attributes:
        attempts: Failures in a row without progress after which an operation is given up.
        initial_s: Ceiling of the first wait, in seconds; it doubles with each failure.
        longest_s: Longest wait, in seconds, whatever the store asks for.
        sleep: Waits for so many seconds; what it raises ends the operation.
        tell: Told what failed, before each wait; from whichever thread that is.
        draw: Returns a random number in [0, 1); not from Python's own generator, whose state
            belongs to the training and is saved with it: a fault of the network would change it.
    """

    attempts: int = 10
    initial_s: float = 0.5
    longest_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], None] = lambda text: None
    draw: Callable[[], float] = random.SystemRandom().random

    def wait_s(self, failures: int, *, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after `failures` (at least 1) failures in a row."""
        ceiling = min(self.longest_s, self.initial_s * 2.0 ** (failures - 1))
        return min(max(self.draw() * ceiling, retry_after_s or 0.0), self.longest_s)


class Attempts:
    """The failures of one operation: waits after each, and gives up when there are too many.

    Args:
        policy: How often and how long.
        what: The operation and its object, as an error message names them.
    """

    def __init__(self, policy: RetryPolicy, *, what: str) -> None:
        self._policy = policy
        self._what = what
        self._failures = 0

    def progressed(self) -> None:
        """Count from the start: bytes arrived since the last failure."""
        self._failures = 0

    def wait_after(self, fault: Fault) -> None:
        """Wait before the next attempt.

        Raises:
            BucketError: The policy's attempts are spent.
        """
        self._failures += 1
        if self._failures >= self._policy.attempts:
            raise BucketError(
                f"{self._what}: {fault.reason}; given up after {self._failures} attempts in a row "
                "without progress. Check the network and the store's status, then run again: "
                "what has arrived is kept."
            )
        wait = self._policy.wait_s(self._failures, retry_after_s=fault.retry_after_s)
        asked = fault.retry_after_s or 0.0
        wish = f" (the store asks for {asked:,.0f} s)" if asked > wait else ""
        logger.warning("%s: %s; next attempt in %.1f s%s", self._what, fault.reason, wait, wish)
        self._policy.tell(f"{self._what}: {fault.reason}")
        self._policy.sleep(wait)


def is_transient_status(status: int) -> bool:
    """Say whether an HTTP error status may pass: 408, 429 and 5xx."""
    return status in _TRANSIENT_STATUSES or status >= 500


def parsed_retry_after(header: str | None, *, now_s: float) -> float | None:
    """Return the seconds that a Retry-After header asks for (RFC 9110, 10.2.3).

    Args:
        header: The header's text: a number of seconds or an HTTP date; None when absent.
        now_s: Seconds since 1970, for the form with a date.
    """
    if header is None:
        return None
    if header.isascii() and header.strip().isdigit():
        return float(header)
    import email.utils  # 6 ms, for a header that is seldom seen

    try:
        date_s = email.utils.parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):  # as malformed dates raise
        return None
    return max(0.0, date_s - now_s)
