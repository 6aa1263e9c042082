"""Where in the stream of windows training stands: all that a resume needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from refocused.system.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How much of the stream all ranks together have consumed."""

    epoch: int = 0  # whole passes that are finished; of a mixture, by every source
    windows: int = 0  # consumed in the present pass; of a mixture, since the run began
    # of a mixture: windows consumed of each since the run began
    sources: Mapping[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the form that is kept in a checkpoint's JSON."""
        saved: dict[str, Any] = {"epoch": self.epoch, "windows": self.windows}
        return saved if self.sources is None else saved | {"sources": dict(self.sources)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """Read what `to_dict` wrote; raise `CheckpointError` for anything else."""
        sources = saved.get("sources", {})
        right_form = isinstance(sources, dict) and set(saved) - {"sources"} == {"epoch", "windows"}
        numbers = [saved["epoch"], saved["windows"], *sources.values()] if right_form else []
        if not right_form or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(
                f"the data position of the checkpoint is {dict(saved)!r}, but it must be `epoch`, "
                "`windows` and, of a mixture, `sources`, all whole numbers from 0. The file was "
                "changed or is of another program: resume from another checkpoint."
            )
        return cls(**saved)
