"""Training's position in the stream of windows, as a resume needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from refocused.system.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How much of the stream all ranks together have consumed."""

    epoch: int = 0  # complete passes; of a mixture, by every source
    windows: int = 0  # consumed in the present pass; of a mixture, since the run started
    sources: Mapping[str, int] | None = None  # of a mixture: windows of each since the run started

    def to_dict(self) -> dict[str, Any]:
        """Return the form saved in a checkpoint's JSON."""
        saved: dict[str, Any] = {"epoch": self.epoch, "windows": self.windows}
        return saved if self.sources is None else saved | {"sources": dict(self.sources)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """Parse the form of `to_dict`; raise `CheckpointError` for anything else."""
        sources = saved.get("sources", {})
        has_keys = isinstance(sources, dict) and set(saved) - {"sources"} == {"epoch", "windows"}
        numbers = [saved["epoch"], saved["windows"], *sources.values()] if has_keys else []
        if not has_keys or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(
                f"the data position of the checkpoint is {dict(saved)!r}, but it must be `epoch`, "
                "`windows` and, of a mixture, `sources`, all non-negative integers. The file was "
                "changed or is of another program: resume from another checkpoint."
            )
        return cls(**saved)
