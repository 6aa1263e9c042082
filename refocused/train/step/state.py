"""Where training stands: everything a resume restores besides the engine's own shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pydantic

from refocused.config.batch_plan import BatchPlan
from refocused.data.order.position import Position
from refocused.system.errors import CheckpointError

# Which checkpoints of earlier versions do not have.
NEWER_FIELDS = {"validation_step", "tasks_step", "wandb_id"}


@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
    """The run's progress.

    Attributes:
        step: Optimizer steps made.
        tokens: Tokens trained on.
        position: Where the next batch begins in the data.
        loss: Training loss of the last step that was read.
        validation_loss: The last one; None before the first.
        validation_step: Step of the last validation that was completed.
        tasks_step: Step after which all tasks were last put to the model.
        best_loss: Lowest validation loss so far.
        best_step: Step of the lowest validation loss.
        seconds: Time of all sessions since the first start: start-up, and what a rewind threw
            away, included.
        cost_usd: Price of that time; None while no price is known.
        wandb_id: Under which id Weights & Biases knows the run; None: it was never told of it.
    """

    step: int = 0
    tokens: int = 0
    position: Position = dataclasses.field(default_factory=Position)
    loss: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    cost_usd: float | None = None
    validation_step: int | None = None
    tasks_step: int | None = None
    wandb_id: str | None = None

    def after_step(self, plan: BatchPlan, position: Position) -> TrainState:
        """Return the state one optimizer step later."""
        return dataclasses.replace(
            self, step=self.step + 1, tokens=self.tokens + plan.tokens, position=position
        )

    def after_validation(self, loss: float) -> TrainState:
        """Return the state with a validation's result; only a finite one can be the best."""
        better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        return dataclasses.replace(
            self,
            validation_loss=loss,
            validation_step=self.step,
            best_loss=loss if better else self.best_loss,
            best_step=self.step if better else self.best_step,
        )

    def as_record(self) -> dict[str, Any]:
        """Return the state for JSON, which has no NaN and no infinity: those become None."""
        record = {
            field.name: _known(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        return record | {"position": self.position.to_dict()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainState:
        """Read what `as_record` wrote.

        Raises:
            CheckpointError: A field is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        odd_names = (names - NEWER_FIELDS - set(record)) | (set(record) - names)
        if odd_names:
            odd = ", ".join(sorted(odd_names))
            raise CheckpointError(
                f"The checkpoint's trainer.json differs from this version's form in: {odd}. "
                "Resume with the version of refocused that wrote it, or from another checkpoint."
            )
        try:
            position = Position.from_dict(record["position"])
            return _FORM.validate_python({**record, "position": position})
        except (pydantic.ValidationError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoint's trainer.json holds values of another kind: "
                f"{' '.join(str(error).split()):.200}. Resume from another checkpoint."
            ) from None


_FORM = pydantic.TypeAdapter(TrainState)


def _known(value: Any) -> Any:
    """Return None for a number that JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
