"""How numbers of a run are spelled on its screen and in its summary; a dash is an unknown."""

from __future__ import annotations

import datetime

from refocused.metrics.step_metrics import duration

STALE_SAMPLE_SECONDS = 60.0


def percent(share: float | None) -> str:
    """Spell a share."""
    return "?" if share is None else f"{share:.1%}"


def value(number: float | None, form: str) -> str:
    """Spell a number in a form; a dash where it is unknown."""
    return "-" if number is None else format(number, form)


def time_text(seconds: float | None) -> str:
    """Spell a time span; a dash where it is unknown."""
    return "-" if seconds is None else duration(seconds)


def stale_text(age_seconds: float | None) -> str:
    """Spell the age of a machine's samples; nothing while they are fresh, or there are none."""
    if age_seconds is None or age_seconds <= STALE_SAMPLE_SECONDS:
        return ""
    return f"{duration(age_seconds)} ago"


def moment(unix_seconds: float) -> str:
    """Spell a time of day in UTC."""
    when = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    return f"{when:%a %d %b %H:%M} UTC"


def tokens_text(tokens: int) -> str:
    """Spell a number of tokens: whole below a million, then in millions and billions."""
    if tokens < 10**6:
        return f"{tokens:,} tokens"
    return f"{tokens / 1e6:.3g} M tokens" if tokens < 10**9 else f"{tokens / 1e9:.4g} B tokens"
