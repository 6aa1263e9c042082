"""What time it is at the object store, which refuses requests signed at another time."""

from __future__ import annotations

import email.utils
import os
import urllib.error
import urllib.request

_STORE = "https://storage.googleapis.com"
_TIMEOUT_S = 10.0


def store_time_s() -> float | None:
    """Return the store's clock in seconds since 1970, whole ones; None: it cannot be reached."""
    address = os.environ.get("STORAGE_EMULATOR_HOST") or _STORE
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # any answer tells the time
        date = error.headers["Date"]
    except (OSError, ValueError):
        return None
    return None if date is None else email.utils.parsedate_to_datetime(date).timestamp()
