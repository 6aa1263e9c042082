"""The disk, the bucket and the network that a run takes, by arithmetic alone."""

from __future__ import annotations

import dataclasses

from refocused.config.outputs import CheckpointConfig
from refocused.estimate.run_cost import RunCost, RunWork
from refocused.system.world import World

MASTER_BYTES = 12  # a parameter's float32 master and Adam's two moments
KEPT_BESIDE = 2  # the best step and the last one of an interruption
BEING_WRITTEN = 1
LARGEST_UINT16_VOCABULARY = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class RunStorage:
    """What a run keeps and moves; bytes.

    Attributes:
        checkpoint: Of one step directory.
        disk: Most that step directories take on the disk at once, one being written included.
        mirror: That the bucket holds at the end; 0 without one.
        upload: That goes to the bucket in all.
        upload_per_second: So that a mirror keeps up with the saves.
        data: Tokens that are read; with more than one epoch fewer are fetched.
        data_per_second: Of them, while training.
    """

    checkpoint: int
    disk: int
    mirror: int
    upload: int
    upload_per_second: float
    data: int
    data_per_second: float


def checkpoint_bytes(parameters: int, *, stage: int, dtype: str) -> int:
    """Return the bytes of a step directory, but for its small files.

    Args:
        parameters: With the padding.
        stage: Below ZeRO-3 the weights of the passes are saved besides.
        dtype: What the passes compute in.
    """
    weights = (4 if dtype == "fp32" else 2) if stage < 3 else 0
    return (MASTER_BYTES + weights) * parameters


def least_save_bytes(parameters: int, stage: int, *, optimizer: str, world: World) -> int:
    """Return the bytes that a save takes of this machine's disk at least; 0: unknown.

    Args:
        parameters: With the padding.
        stage: Of ZeRO; at 0 rank 0 writes all, above it each rank its share.
        optimizer: Muon has one moment where AdamW has two.
        world: The ranks, and which of them share a disk.
    """
    size = (MASTER_BYTES - 4 * (optimizer == "muon")) * parameters
    if world.storage_ranks == 1:
        return size
    return size * world.local_world_size // world.world_size if stage else 0


def run_storage(
    work: RunWork, cost: RunCost, *, checkpoint: CheckpointConfig, vocabulary: int
) -> RunStorage:
    """Return what a run keeps and moves.

    Args:
        work: The run.
        cost: Its speed.
        checkpoint: What is kept and mirrored.
        vocabulary: Of the tokens: above 65,536 one takes 4 bytes.
    """
    size, saves = work.save_bytes, work.saves
    remote = saves if checkpoint.keep_remote == "all" else checkpoint.keep_remote + KEPT_BESIDE
    mirrored = checkpoint.mirror is not None
    seconds_between = cost.hours * 3600 / saves if saves else 0.0
    token_bytes = 2 if vocabulary <= LARGEST_UINT16_VOCABULARY else 4
    return RunStorage(
        checkpoint=size,
        disk=min(saves, checkpoint.keep + KEPT_BESIDE + BEING_WRITTEN) * size,
        mirror=min(saves, remote) * size if mirrored else 0,
        upload=saves * size if mirrored else 0,
        upload_per_second=size / seconds_between if mirrored and seconds_between else 0.0,
        data=work.tokens * token_bytes,
        data_per_second=cost.tokens_per_second * token_bytes,
    )
