"""The run's folder: shared or one per machine, and claimed by one training at a time."""

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ConfigError, TrainingError, as_typed
from refocused.system.locks import FileLock
from refocused.system.world import World

logger = logging.getLogger(__name__)

CLAIM_SECONDS = 60.0  # ranks whose launcher was killed need some time to notice, save and exit
_POLL_SECONDS = 0.2


def claim_run(folder: Path, *, timeout_seconds: float = CLAIM_SECONDS) -> FileLock:
    """Lock a run's folder until this process ends; wait for another start to end first.

    Two starts of one run would overwrite each other's checkpoints and mix their records.

    Raises:
        TrainingError: Another process is still training it after the time-out.
    """
    lock = FileLock(folder / "run.lock")
    if lock.acquire():
        return lock
    logger.warning(
        "%s is being trained by another process; waiting up to %.0f s for it to end",
        folder,
        timeout_seconds,
    )
    deadline = time.monotonic() + timeout_seconds
    while not lock.acquire():
        if time.monotonic() >= deadline:
            raise TrainingError(
                f"{folder} is being trained by another process, which still holds "
                f"{folder / 'run.lock'}. Wait until it has ended or stop it ("
                f"{as_typed('stop')} {folder}), or give this run another name (run.name=...)."
            )
        time.sleep(_POLL_SECONDS)
    return lock


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name the run's folder in the error if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The run's folder {folder} cannot be written: {error.strerror}. Make room there, or "
            "set run.directory to a folder on another disk."
        ) from error


def find_storage_ranks(folder: Path, world: World) -> World:
    """Determine which ranks write the run's files; return the updated world. All ranks call.

    Either all ranks see the same folder, and rank 0 writes it; or every machine has its own, and
    its first rank writes that.

    Raises:
        ConfigError: On every rank: some machines share the folder and others do not, or the ranks
            of one machine see different ones.
    """
    nodes = list(dict.fromkeys(world.gather(world.node)))  # rank 0's machine comes first
    world = dataclasses.replace(world, node=nodes.index(world.node))
    seen = _machines_seen(folder, world, nodes=len(nodes))
    if all(len(machines) == len(nodes) for machines in seen):
        return world
    if len(nodes) > 1 and seen == world.gather({world.node}):
        return dataclasses.replace(world, storage_ranks=len(nodes))
    odd = next(rank for rank, machines in enumerate(seen) if machines != seen[0])
    raise ConfigError(
        f"rank {odd}: The run's folder {folder.absolute()} is another one for this rank than for "
        "rank 0, and the machines do not have one each either. Set run.directory to a folder on a "
        "disk that all machines share, or to one on each machine's own disk."
    ).agreed()


def require_one_mirror(mirror: str | None, world: World) -> None:
    """Raise ConfigError on every rank if the mirror is another folder on each machine."""
    if world.storage_ranks == 1 or mirror is None or "://" in mirror:
        return
    seen = _machines_seen(Path(mirror).expanduser(), world, nodes=world.storage_ranks)
    if any(len(machines) < world.storage_ranks for machines in seen):
        raise ConfigError(
            f"The folder checkpoint.mirror={mirror} is another one on each machine, so that none "
            "would hold all files of a checkpoint. Set it to a bucket, or to a folder on a disk "
            "that all machines share."
        ).agreed()


def _machines_seen(folder: Path, world: World, *, nodes: int) -> list[set[int]]:
    """Return, for each rank, the machines whose new file it sees; remove a folder made for this."""
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
