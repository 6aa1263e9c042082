"""Whether a machine's memory holds the copy that a save in the background writes from."""

from __future__ import annotations

import socket
from collections.abc import Callable

from refocused.errors import ConfigError
from refocused.estimate.storage import MASTER_BYTES
from refocused.monitoring.memory import memory_now
from refocused.world import World


def copied_bytes(parameters: int, *, stage: int, dtype: str, world: World) -> int:
    """Return the bytes that this rank's part of a checkpoint holds.

    At stage 0 rank 0 saves for all; below stage 3 it saves the weights of the passes besides.
    """
    weights = parameters * (4 if dtype == "fp32" else 2) if world.is_first and stage < 3 else 0
    if stage == 0:
        return weights + (MASTER_BYTES * parameters if world.is_first else 0)
    return weights + MASTER_BYTES * -(-parameters // world.world_size)


def require_memory_for_copies(
    needed_bytes: int, *, world: World, available: Callable[[], int | None]
) -> None:
    """Refuse copies that a machine has no memory for; every rank must call.

    Args:
        needed_bytes: Of this rank.
        world: The ranks.
        available: Says how many bytes this machine has left; None: unknown.

    Raises:
        ConfigError: On every rank.
    """
    machine = socket.gethostname()
    needed = sum(of for there, of in world.gather((machine, needed_bytes)) if there == machine)
    free = available()
    error = None
    if free is not None and free < needed:
        error = ConfigError(
            f"checkpoint.async keeps a copy of the state of {needed / 1e9:.2f} GB in the memory of "
            f"{machine}, which has {free / 1e9:.2f} GB left. Set checkpoint.async=false."
        )
    world.raise_together(error)


def available_bytes() -> int:
    """Return what this machine, or the container this runs in, has left."""
    return memory_now().available
