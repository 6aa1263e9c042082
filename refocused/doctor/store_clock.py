"""The object store before it is used: whether its name exists, and what time it is there."""

from __future__ import annotations

import email.utils
import os
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request

_STORE = "https://storage.googleapis.com"
_TIMEOUT_S = 10.0
LOOKUP_SECONDS = 1.5


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


def missing_store_name() -> str | None:
    """Return the store's host name where DNS says that there is none; None: it may be reached.

    A slow or failing DNS proves nothing, and behind a proxy names are looked up elsewhere.
    """
    address = urllib.parse.urlsplit(os.environ.get("STORAGE_EMULATOR_HOST") or _STORE)
    host, answers = address.hostname, []
    if host is None or address.scheme in urllib.request.getproxies():
        return None

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            answers.append(error.errno)

    thread = threading.Thread(target=look_up, daemon=True)  # DNS may take longer than we wait
    thread.start()
    thread.join(LOOKUP_SECONDS)
    return host if answers and answers[0] in (socket.EAI_NONAME, socket.EAI_NODATA) else None
