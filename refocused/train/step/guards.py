"""Batches for all ranks or for none: one that has to wait is waited for until somebody stops."""

from __future__ import annotations

from collections.abc import Callable

from refocused.data.loader.batch import Batch
from refocused.system.errors import RefocusedError
from refocused.system.world import World
from refocused.train.step.stopping import StopRequest

# How long a rank waits for its batches before all look whether to stop. The others are inside the
# agreement meanwhile, where a signal does not reach Python.
PATIENCE_SECONDS = 0.2


def fetch_together(
    world: World, fetch: Callable[[float], list[Batch] | None], stop: StopRequest
) -> list[Batch] | None:
    """Return this rank's next batches when every rank has its own.

    Args:
        world: The ranks.
        fetch: Waits so many seconds for this rank's batches; None when they are not there by then.
        stop: Looked at while a rank waits.

    Returns:
        None, on every rank alike, when they agree to stop instead of waiting on.

    Raises:
        RefocusedError: On every rank alike when one cannot have its batches; a rank that failed
            alone would leave the others inside a collective.
    """
    batches: list[Batch] | None = None
    while True:
        error: RefocusedError | None = None
        if batches is None:
            try:
                batches = fetch(PATIENCE_SECONDS)
            except RefocusedError as raised:
                error = raised
        failed, waits = world.largest([error is not None, batches is None])
        if failed:
            world.raise_together(error)
        if not waits:
            return batches
        if stop.agreed():
            return None
