"""`Finding`: one line of the doctor's report."""

import dataclasses
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, and how to fix it unless the text says so or nothing is wrong.

    `fail`: the run would not start or would lose data. `warn`: it would cost more than necessary,
    or could not be checked.
    """

    check: str
    level: Level
    text: str
    fix: str | None = None
