"""The run's folder: shared or one per machine, and claimed by one training at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ConfigError, TrainingError
from refocused.system.locks import FileLock
from refocused.system.world import World

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0  # ranks whose launcher was killed need some to notice, save and end
_POLL_SECONDS = 0.2


def claim_run(folder: Path, *, patience_seconds: float = PATIENCE_SECONDS) -> FileLock:
    """Take a run's folder for this process until it ends, however it ends.

    Two starts of one run would set each other's steps aside and mix their records.

    Args:
        folder: The run's folder.
        patience_seconds: How long to wait for another start to end, in seconds.

    Returns:
        The lock, which is held as long as the process lives.

    Raises:
        TrainingError: Another process is still training it.
    """
    lock = FileLock(folder / "run.lock")
    if lock.acquire():
        return lock
    logger.warning(
        "%s is being trained by another process; waiting up to %.0f s for it to end",
        folder,
        patience_seconds,
    )
    deadline = time.monotonic() + patience_seconds
    while not lock.acquire():
        if time.monotonic() >= deadline:
            raise TrainingError(
                f"{folder} is being trained by another process, which still holds "
                f"{folder / 'run.lock'}. Wait until it has ended or stop it (python "
                f"launch/stop.py {folder}), or give this run another name (run.name=...)."
            )
        time.sleep(_POLL_SECONDS)
    return lock


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name a folder of the run when it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The run's folder {folder} cannot be written: {error.strerror}. Make room there, or "
            "set run.directory to a folder on another disk."
        ) from error


def find_storage_ranks(folder: Path, world: World) -> World:
    """Find out who keeps the run's files; return the world that knows it.

    Every rank must call. Either all ranks see the same folder, and rank 0 keeps it; or every
    machine has its own, and its first rank keeps that.

    Raises:
        ConfigError: On every rank: some machines share the folder and others do not, or the ranks
            of one machine see different ones.
    """
    nodes = list(dict.fromkeys(world.gather(world.node)))  # the first rank's machine is the first
    world = dataclasses.replace(world, node=nodes.index(world.node))
    seen = _signs_seen(folder, world, nodes=len(nodes))
    if all(len(signs) == len(nodes) for signs in seen):
        return world
    own = world.gather({world.node})
    if len(nodes) > 1 and seen == own:
        return dataclasses.replace(world, storage_ranks=len(nodes))
    odd = next(rank for rank, signs in enumerate(seen) if signs != seen[0])
    raise _on_every_rank(
        f"rank {odd}: The run's folder {folder.absolute()} is another one for this rank than for "
        "rank 0, and the machines do not have one each either. Set run.directory to a folder on a "
        "disk that all machines share, or to one on each machine's own disk."
    )


def require_one_mirror(mirror: str | None, world: World) -> None:
    """Refuse a mirror that is another folder on each machine: no step in it would ever be whole.

    Raises:
        ConfigError: On every rank.
    """
    if world.storage_ranks == 1 or mirror is None or "://" in mirror:
        return
    folder = Path(mirror).expanduser()
    seen = _signs_seen(folder, world, nodes=world.storage_ranks)
    if any(len(signs) < world.storage_ranks for signs in seen):
        raise _on_every_rank(
            f"The folder checkpoint.mirror={mirror} is another one on each machine, so that none "
            "would hold all files of a checkpoint. Set it to a bucket, or to a folder on a disk "
            "that all machines share."
        )


def _signs_seen(folder: Path, world: World, *, nodes: int) -> list[set[int]]:
    """Return, for each rank, the machines whose first rank's new file it sees in a folder.

    A folder that is made for this is removed again.
    """
    token = world.broadcast(secrets.token_hex(4))
    signs = [folder / f".seen-{token}-{node}" for node in range(nodes)]
    mine = signs[world.node]
    missing = [path for path in (folder, *folder.parents) if not path.exists()]

    def write() -> None:
        if world.is_local_rank_0:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                mine.touch()

    try:
        world.on_all_ranks(write)
        seen = world.gather({node for node, sign in enumerate(signs) if sign.exists()})
    finally:
        if world.is_local_rank_0:
            mine.unlink(missing_ok=True)
    world.barrier()
    for path in missing if world.is_local_rank_0 else ():
        with contextlib.suppress(OSError):  # another machine removed it, or it is not empty
            path.rmdir()
    world.barrier()
    return seen


def _on_every_rank(text: str) -> ConfigError:
    error = ConfigError(text)
    error.on_every_rank = True
    return error
