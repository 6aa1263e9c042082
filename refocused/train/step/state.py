"""Training progress: everything a resume restores besides the engine's own shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic

from refocused.data.order.sequences import Position
from refocused.metrics.jsonl import finite
from refocused.system.errors import CheckpointError

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
    """The run's progress."""

    step: int = 0  # optimizer steps made
    tokens: int = 0  # trained on since the run's first start
    position: Position = dataclasses.field(default_factory=Position)  # of the next batch
    loss: float | None = None  # training loss of the last step whose loss was read from the device
    validation_loss: float | None = None  # of the last validation, nats a token
    bits_per_byte: float | None = None  # of the last validation; None: unknown
    best_loss: float | None = None  # lowest validation loss so far
    best_bits_per_byte: float | None = None  # of that validation
    best_step: int | None = None  # step of that validation
    seconds: float = 0.0  # of all sessions, with start-up and steps that a rewind discarded
    cost_usd: float | None = None  # price of all sessions; None while no price is known
    validation_step: int | None = None  # step of the last completed validation
    validation_set: str | None = None  # fingerprint of what these losses were measured on
    tasks_step: int | None = None  # step of the last completed evaluation on tasks
    wandb_id: str | None = None  # the run's id at Weights & Biases, once it was tracked there
    # [first sequence, end) of each part that rewinds skip.
    left_out: tuple[tuple[int, int], ...] = ()

    def after_step(self, plan: BatchPlan, position: Position) -> TrainState:
        """Return the state one optimizer step later."""
        tokens = plan.sequences_between(self.step, self.step + 1) * plan.sequence_length
        return dataclasses.replace(
            self, step=self.step + 1, tokens=self.tokens + tokens, position=position
        )

    def after_validation(
        self, loss: float, bits: float | None = None, *, of: str = ""
    ) -> TrainState:
        """Return the state with a validation loss; only a finite one of a step can be the best.

        Losses of another set than `of` are not compared with it.
        """
        state = dataclasses.replace(
            self,
            validation_loss=loss,
            bits_per_byte=bits,
            validation_step=self.step,
            validation_set=of,
        )
        if self.validation_set != of:
            state = state.with_best(is_present=False)
        is_candidate = self.step > 0 and math.isfinite(loss)
        if is_candidate and (state.best_loss is None or loss < state.best_loss):
            return state.with_best(is_present=True)
        return state

    def with_best(self, *, is_present: bool) -> TrainState:
        """Return the state with its present validation as the best one, or without a best one."""
        validation = self.validation_loss, self.bits_per_byte, self.step
        loss, bits, step = validation if is_present else (None, None, None)
        return dataclasses.replace(self, best_loss=loss, best_bits_per_byte=bits, best_step=step)

    def as_record(self) -> dict[str, Any]:
        """Return the state for JSON, in which non-finite numbers become None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**finite(values), "position": self.position.to_dict()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainState:
        """Read what `as_record` wrote; raise CheckpointError at a missing, unknown or odd field."""
        odd = {field.name for field in dataclasses.fields(cls)} ^ set(record)
        if odd:
            raise CheckpointError(
                f"The checkpoint's trainer.json differs from this version's form in: "
                f"{', '.join(sorted(odd))}. Resume with the version of refocused that wrote it, or "
                "from another checkpoint."
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


def read_part(record: dict[str, Any], name: str, form: type[T]) -> T | None:
    """Take a part out of `trainer.json`, if it is there; raise CheckpointError if it is odd."""
    value = record.pop(name, None)
    try:
        return None if value is None else pydantic.TypeAdapter(form).validate_python(value)
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"The checkpoint's trainer.json has a malformed part: {name}: {error}. Resume from "
            "another checkpoint."
        ) from error
