"""How long the mirror waits after a failure, and which failures no waiting can mend."""

from __future__ import annotations

from refocused.bucket.gcs_errors import RefusedRequestError

FIRST_WAIT_SECONDS = 1.0
MOST_DOUBLINGS = 30
_REFUSALS = (RefusedRequestError, PermissionError, NotADirectoryError, FileExistsError)


def is_refusal(error: BaseException) -> bool:
    """Whether trying again cannot help by itself: no permission, no bucket, no such folder."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _REFUSALS):
        cause = cause.__cause__
    return cause is not None


def wait_seconds(failures: int, *, refused: bool, longest: float) -> float:
    """How long to wait after so many failures in a row: doubling, or the longest at once."""
    if refused:
        return longest
    doublings = min(failures - 1, MOST_DOUBLINGS)  # a bucket may be down for thousands of attempts
    return min(FIRST_WAIT_SECONDS * 2.0**doublings, longest)
