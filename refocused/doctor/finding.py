"""`Finding`: one line of the doctor's report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at, one word.
        level: `fail`: the run would not start, or would lose something; `warn`: it would cost more
            than it must, or could not be looked at.
        text: What was found, and where.
        fix: What to do; None where there is nothing to do, or the text says it already.
    """

    check: str
    level: Level
    text: str
    fix: str | None = None


def any_fails(findings: Iterable[Finding]) -> bool:
    """Tell whether something is wrong that keeps a run from its end."""
    return any(finding.level == "fail" for finding in findings)


def size(count: float) -> str:
    """Spell bytes in GB (1e9), small ones in MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
