"""How two steps differ: how far they are, what they lost, and under which settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from refocused.checkpoints.resume.step_contents import StepContents, dotted

# Named in a manifest, but told elsewhere (files, losses) or of no use to a person.
_UNTOLD = {"schema_version", "name", "files", "loss", "validation_loss"}
_LOSSES = ("loss", "validation_loss", "best_loss")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One fact that two steps tell differently.

    Attributes:
        name: Dotted name.
        a: What the first says.
        b: What the second says.
        only_in: The one that has it at all; None: both have.
    """

    name: str
    a: Any
    b: Any
    only_in: Literal["a", "b"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LossChange:
    """One loss of both steps, in nats a token; None is unknown."""

    name: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """How much the second is above the first."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps side by side.

    Attributes:
        facts: What differs of their manifests, and the time and money spent.
        losses: Their losses, equal ones too.
        settings: What differs of the run files they were trained under.
    """

    facts: list[Difference]
    losses: list[LossChange]
    settings: list[Difference]


def compare(a: StepContents, b: StepContents) -> Comparison:
    """Put two steps side by side."""
    ours, theirs = ({**step.trainer, **step.manifest.model_dump()} for step in (a, b))
    return Comparison(
        facts=differences(_facts(a), _facts(b)),
        losses=[LossChange(name, ours[name], theirs[name]) for name in _LOSSES],
        settings=differences(a.settings, b.settings),
    )


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return what two mappings tell differently, in the first one's order, then the second's."""
    found = []
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in b:
            found.append(Difference(name, a[name], None, only_in="a"))
        elif name not in a:
            found.append(Difference(name, None, b[name], only_in="b"))
        elif a[name] != b[name]:
            found.append(Difference(name, a[name], b[name]))
    return found


def _facts(step: StepContents) -> dict[str, Any]:
    manifest = dotted(step.manifest.model_dump(mode="json", exclude=_UNTOLD))
    spent = {name: step.trainer[name] for name in ("seconds", "cost_usd", "best_step")}
    return {**manifest, "bytes": step.manifest.total_bytes, **spent}
