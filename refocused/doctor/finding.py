"""`Finding`: one line of the doctor's report."""

from __future__ import annotations

import dataclasses
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and how to fix it unless the text says so or nothing is wrong.

    `fail`: the run would not start, or would lose something. `warn`: it would cost more than it
    must, or could not be checked.
    """

    check: str
    level: Level
    text: str
    fix: str | None = None


def size(count: float) -> str:
    """Format bytes in GB (1e9), small ones in MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
