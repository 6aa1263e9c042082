"""What a failed request to Google Cloud Storage means, and whether and when to retry it."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

from refocused.bucket.gcs_client import ANONYMOUS
from refocused.system.errors import BucketError

logger = logging.getLogger(__name__)

_ROLES = {  # cloud.google.com/storage/docs/access-control/iam-roles
    "storage.objects.get": "roles/storage.objectViewer",
    "storage.objects.list": "roles/storage.objectViewer",
    "storage.objects.create": "roles/storage.objectUser",
    "storage.objects.delete": "roles/storage.objectUser",
    "serviceusage.services.use": "roles/serviceusage.serviceUsageConsumer",
}
_PERMISSION = re.compile(r"\b(?:storage|serviceusage)\.\w+\.\w+")
# urllib3 opens its messages with the connection: `HTTPSConnection(host=..., port=443): `.
_CONNECTION = re.compile(r"^(?:\w+\([^)]*\)|<[^>]*>): ")
_LONGEST_REASON = 300  # characters


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why one request failed."""

    reason: str
    transient: bool  # the same request may succeed later
    status: int | None = None  # HTTP status; None when there was no answer
    retry_after_s: float | None = None  # what the server asked for


class RefusedRequestError(BucketError):
    """A request that will fail again: its text says why and what to do.

    `status` is the HTTP status, None when there was no answer.
    """

    def __init__(self, text: str, *, status: int | None = None) -> None:
        # `status` has a default because ranks exchange errors by their text.
        super().__init__(text)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, counted in failures without progress.

    Full jitter draws each wait uniformly between 0 and the exponential ceiling (Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so that many nodes that fail
    together do not come back together.
    """

    attempts: int = 10  # failures in a row without progress, after which an operation is given up
    initial_s: float = 0.5  # ceiling of the first wait; it doubles with each failure
    longest_s: float = 30.0  # whatever the store asks for
    sleep: Callable[[float], None] = time.sleep  # what it raises ends the operation
    report: Callable[[str], None] = lambda text: None  # gets each fault, before the wait
    # Not Python's own generator, whose state belongs to the training and is saved with it: a fault
    # of the network would change it.
    draw: Callable[[], float] = random.SystemRandom().random

    def wait_s(self, failures: int, *, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after `failures` (at least 1) failures in a row."""
        ceiling = min(self.longest_s, self.initial_s * 2.0 ** (failures - 1))
        return min(max(self.draw() * ceiling, retry_after_s or 0.0), self.longest_s)


class Attempts:
    """The failures of one operation, which `what` names: waits after each, and gives up."""

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
        self._policy.report(f"{self._what}: {fault.reason}")
        self._policy.sleep(wait)


def parsed_retry_after(header: str | None, *, now_s: float) -> float | None:
    """Return the seconds that a Retry-After header asks for (RFC 9110, 10.2.3); None: none.

    It holds a number of seconds, or an HTTP date, to which `now_s` (since 1970) is compared.
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


def fault_types() -> tuple[type[Exception], ...]:
    """Return the exceptions by which the client library reports a failed request."""
    import http.client

    import requests
    import urllib3
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import InvalidResponse

    return (
        GoogleAPICallError,
        GoogleAuthError,
        InvalidResponse,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
        ValueError,  # answers that cannot be read: no JSON, numbers or addresses that are none
        RecursionError,
    )


def fault_of(error: Exception) -> Fault:
    """Say what one of `fault_types` means."""
    from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError

    response = getattr(error, "response", None)
    if isinstance(error, GoogleAuthError):
        # A token that cannot be had: often the network, but a revoked key stays revoked.
        may_pass = isinstance(error, (RefreshError, TransportError))
        transient = may_pass and "invalid_grant" not in str(error)
        return Fault(_innermost(error), transient, status=None if transient else 401)
    if response is not None and response.status_code >= 400:
        return fault_of_response(response)
    # A broken connection, a time-out, or an answer that cannot be read: it may have been cut.
    return Fault(_innermost(error), transient=True)


def _innermost(error: BaseException) -> str:
    """Return what went wrong without the layers above it: one short line."""
    while isinstance(cause := next(iter(error.args), None), Exception):
        reason = getattr(cause, "reason", None)
        error = reason if isinstance(reason, Exception) else cause
    return _printable(f"{type(error).__name__}: {_CONNECTION.sub('', str(error))}")


def _printable(text: str) -> str:
    """Return text of a store as one short line that does nothing to a terminal."""
    line = " ".join(text.split())[:_LONGEST_REASON]
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)


def fault_of_response(response: Any) -> Fault:
    """Say what a `requests.Response` with an error status means, in the store's own words."""
    status = response.status_code
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = str(response.reason or response.text)
    return Fault(
        reason=f"HTTP {status} {_printable(message)}",
        transient=status in (408, 429) or status >= 500,
        status=status,
        retry_after_s=parsed_retry_after(response.headers.get("Retry-After"), now_s=time.time()),
    )


def refusal(fault: Fault, *, address: str, permission: str, identity: str) -> RefusedRequestError:
    """Build the error of a fault that will not pass.

    `address` is the `gs://bucket/name` that was asked for; the request needs `permission`, such as
    `storage.objects.get`; `identity` is whose it was, in words.
    """
    bucket, is_anonymous = "/".join(address.split("/")[:3]), identity == ANONYMOUS
    named = _PERMISSION.search(fault.reason)
    missing = named.group() if named else permission
    role = _ROLES.get(missing, "roles/storage.objectUser")
    fixes = {
        401: f"The credentials of {identity} were not accepted: they expired or were revoked. "
        "Log in again (gcloud auth application-default login) or use a new key file.",
        403: f"The permission {missing} is missing for {identity}. Grant the role {role}: "
        f"gcloud storage buckets add-iam-policy-binding {bucket} --member=WHO --role={role}",
        404: "There is no such bucket or object, or no longer (it was replaced after it was "
        f"listed), or {identity} may not see it. Check the name: gcloud storage ls {bucket}",
    }
    if is_anonymous:
        fixes[401] = (
            "No Google credentials were found, and this may not be read by everybody. Log in "
            "(gcloud auth application-default login), or give the key file of a service account."
        )
        fixes[403] += (
            ". Or log in first: gcloud auth application-default login, or give a key file."
        )
    other = f"{identity} asked. The store will answer the same again; see its message."
    fix = fixes.get(fault.status or 0, other)
    return RefusedRequestError(f"{address}: {fault.reason}. {fix}", status=fault.status)
