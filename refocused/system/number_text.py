"""Numbers as text: spans of time, moments, dollars, sizes; unknown numbers are None."""

from __future__ import annotations

import datetime


def known(form: str, *numbers: object) -> str:
    """Format numbers, as in `known("{:.1f} C", 61.0)`; empty if one is unknown."""
    return "" if None in numbers else form.format(*numbers)


def value(number: float | None, form: str) -> str:
    """Format a number; `-` if it is unknown."""
    return known(f"{{:{form}}}", number) or "-"


def percent(share: float | None) -> str:
    """Format a share; `?` if it is unknown."""
    return known("{:.1%}", share) or "?"


def duration(seconds: float | None) -> str:
    """Format a time span: 0.04 s, 48 s, 12.5 min, 23.6 h; `-` if it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 0.995:
        return f"{round(seconds, 2):g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def moment(unix_seconds: float) -> str:
    """Format a time of day in UTC."""
    when = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    return f"{when:%a %d %b %H:%M} UTC"


def dollars(cost_usd: float | None) -> str:
    """Format an amount that follows a time; empty if it is unknown."""
    return known(" ${:,.2f}", cost_usd)


def size_text(count: float) -> str:
    """Format bytes with one to three digits before the point (1 kB = 1000 bytes)."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """Format a number: whole below a million, then in M, B or T (1e6, 1e9, 1e12)."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:,.0f}"


def age(seconds: float) -> str:
    """Format how long ago something was, to the minute; the future counts as now."""
    minutes = int(max(0, seconds) // 60)
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} d ago"
