"""Which failed requests to a store may succeed later, and how long to wait for that."""

import dataclasses
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

from refocused.system.errors import BucketError, printable

logger = logging.getLogger(__name__)

# The start of urllib3's messages: `HTTPSConnection(host=..., port=443): `.
_CONNECTION = re.compile(r"^(?:\w+\([^)]*\)|<[^>]*>): ")
_MAX_REASON = 300  # characters


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why one request failed."""

    reason: str
    transient: bool  # the same request may succeed later
    status: int | None = None  # HTTP status; None without a response
    retry_after_s: float | None = None  # the server's Retry-After


class RefusedRequestError(BucketError):
    """A request failed in a way that retries cannot mend.

    `status` is the HTTP status, None without a response.
    """

    transient = False

    def __init__(self, text: str, *, status: int | None = None) -> None:
        # `status` has a default because ranks rebuild each other's errors from the text alone.
        super().__init__(text)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Exponential back-off with full jitter, counted in failures without progress.

    Each wait is drawn uniformly between 0 and the exponential ceiling (Brooker, "Exponential
    Backoff And Jitter", AWS Architecture Blog, 2015), so that nodes that fail together do not
    retry together.
    """

    attempts: int = 10  # failures in a row without progress before an operation fails
    initial_s: float = 0.5  # ceiling of the first wait; it doubles with each failure
    max_wait_s: float = 30.0  # also limits the server's Retry-After
    sleep: Callable[[float], None] = time.sleep  # may raise to abort the operation
    report: Callable[[str], None] = lambda text: None  # called with each fault, before the wait
    draw: Callable[[], float] = random.random

    def wait_s(self, failures: int, *, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after `failures` (at least 1) failures in a row."""
        doublings = min(failures - 1, 30)  # 2.0**1024 overflows, in an outage of hours
        ceiling = min(self.max_wait_s, self.initial_s * 2.0**doublings)
        return min(max(self.draw() * ceiling, retry_after_s or 0.0), self.max_wait_s)


class Attempts:
    """Counts the failures of one operation and waits after each; `operation` names it in logs."""

    def __init__(self, retry: Retry, *, operation: str) -> None:
        self._retry = retry
        self._operation = operation
        self._failures = 0
        self.is_renewed = False  # whether it has loaded refused credentials anew

    def progressed(self) -> None:
        """Reset the count: bytes arrived since the last failure."""
        self._failures, self.is_renewed = 0, False

    def wait_after(self, fault: Fault) -> None:
        """Wait before the next attempt; raise `BucketError` if none is left."""
        self._failures += 1
        if self._failures >= self._retry.attempts:
            raise BucketError(
                f"{self._operation}: {fault.reason}; gave up after {self._failures} attempts in a "
                "row without progress. Check the network and the store's status, then run again: "
                "data received so far is kept."
            )
        wait = self._retry.wait_s(self._failures, retry_after_s=fault.retry_after_s)
        requested = fault.retry_after_s or 0.0
        note = f" (the store requests {requested:,.0f} s)" if requested > wait else ""
        logger.warning("%s: %s; retrying in %.1f s%s", self._operation, fault.reason, wait, note)
        self._retry.report(f"{self._operation}: {fault.reason}")
        self._retry.sleep(wait)


def parsed_retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3); None if it has none."""
    from urllib3 import Retry as HeaderParser
    from urllib3.exceptions import InvalidHeader

    try:
        return None if header is None else float(HeaderParser().parse_retry_after(header))
    except (InvalidHeader, ValueError, TypeError, OverflowError):  # all from malformed headers
        return None


def fault_types() -> tuple[type[Exception], ...]:
    """Return the exceptions that a failed request may raise, besides those of a store's client."""
    from http.client import HTTPException

    import requests
    import urllib3

    known = requests.RequestException, urllib3.exceptions.HTTPError, HTTPException
    unreadable = ValueError, RecursionError  # invalid JSON, numbers or addresses
    return (*known, ConnectionError, TimeoutError, *unreadable)


def innermost(error: BaseException) -> str:
    """Return the innermost cause in one short line."""
    while isinstance(cause := next(iter(error.args), None), Exception):
        reason = getattr(cause, "reason", None)
        error = reason if isinstance(reason, Exception) else cause
    return printable_line(f"{type(error).__name__}: {_CONNECTION.sub('', str(error))}")


def printable_line(text: str) -> str:
    """Return a store's text as one short line without control characters."""
    line = " ".join(text.split())[:_MAX_REASON]
    return printable(line)


def fault_of_response(response: Any) -> Fault:
    """Interpret a `requests.Response` with an error status, by the store's own message."""
    status = response.status_code
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = str(response.reason or response.text)
    return Fault(
        reason=f"HTTP {status} {printable_line(message)}",
        transient=status in (408, 429) or status >= 500,
        status=status,
        retry_after_s=parsed_retry_after(response.headers.get("Retry-After")),
    )
