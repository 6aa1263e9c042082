"""Exchange checkpoint files between machines for a load, if each has only its own ranks' files."""

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import crc32c_of
from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    DESCRIPTIONS,
    Checkpoint,
    rank_file,
)
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest
from refocused.checkpoints.step.staging import STAGING_PREFIX
from refocused.checkpoints.step.verify import describe, unreadable
from refocused.engine.zero_layout import is_of_all_ranks, is_read_by
from refocused.system.atomic_files import link_or_copy
from refocused.system.errors import CheckpointError
from refocused.system.world import World

CHUNK_BYTES = 32 * 1024 * 1024


@contextlib.contextmanager
def assembled(checkpoint: Checkpoint, world: World, *, exact: bool) -> Iterator[Path]:
    """Yield a folder with all files of a verified checkpoint that this machine's ranks read.

    This is the checkpoint itself, unless a machine lacks files; then it is a temporary folder of
    links and received files. Each rank reads only its own files if `exact`, otherwise all.
    Collective; raises CheckpointError on every rank if a file is missing or a disk has no room.
    """
    if world.storage_ranks == 1:
        yield checkpoint.path
        return
    held = world.on_storage_ranks(lambda: frozenset(checkpoint.files))
    needed = wanted_files(checkpoint.manifest, world.gather(world.node), exact=exact)
    sources = world.on_all_ranks(lambda: plan_deliveries(held, needed))
    if not sources:
        yield checkpoint.path
        return
    token = world.broadcast(secrets.token_hex(4))
    folder = checkpoint.path.with_name(f"{STAGING_PREFIX}{checkpoint.path.name}-load-{token}")
    local = needed[world.storage_rank]

    def link() -> None:
        try:
            folder.mkdir()
            for name in local & {*checkpoint.files}:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(checkpoint.path / name, folder / name)
        except OSError as error:
            raise _disk_error(folder, error) from error

    def check_received() -> None:
        for name in received:
            if crc32c_of(folder / name) != checkpoint.manifest.files[name].crc32c:
                raise CheckpointError(
                    f"{name} was corrupted on its way from another machine. Start the run again."
                )

    try:
        world.on_storage_ranks(link)
        keepers = [rank for rank, keeps in enumerate(world.gather(world.is_storage_rank)) if keeps]
        missing = local - {*checkpoint.files} if world.is_storage_rank else ()
        received = [name for name in sources if name in missing]
        for name, source in sources.items():
            target = folder / name if name in received else None
            _deliver(checkpoint.path / name, target, source=keepers[source], world=world)
        world.on_all_ranks(check_received)
        yield folder
    finally:
        if world.is_storage_rank:
            shutil.rmtree(folder, ignore_errors=True)


def require_readable(checkpoint: Checkpoint, folder: Path, *, rank: int, exact: bool) -> None:
    """Open the files that a rank will read, so that no rank fails within DeepSpeed's collectives.

    `folder` and `exact` are those of `assembled`.
    """
    own_files = ("trainer.json", rank_file(rank))
    files = checkpoint.manifest.files
    names = [name for name in files if name in own_files or is_read_by(name, rank, exact=exact)]
    if problems := unreadable(dataclasses.replace(checkpoint, path=folder), names):
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded: {describe(problems)}. {CHOOSE_ANOTHER}"
        )


def wanted_files(
    manifest: CheckpointManifest, nodes: Sequence[int], *, exact: bool
) -> dict[int, frozenset[str]]:
    """Return the files that each machine's ranks read, given the machine of each rank."""
    files = manifest.files
    same_places = len(nodes) == manifest.world_size and all(
        files[rank_file(rank)].node == node for rank, node in enumerate(nodes)
    )
    if not (exact and same_places):
        return dict.fromkeys(nodes, frozenset(files))
    common = {name for name in files if name in DESCRIPTIONS or is_of_all_ranks(name)}
    return {
        node: frozenset(name for name, file in files.items() if file.node == node or name in common)
        for node in nodes
    }


def plan_deliveries(
    held: Sequence[frozenset[str]], needed: Mapping[int, frozenset[str]]
) -> dict[str, int]:
    """Return the storage rank that sends each file that some machine lacks."""
    sources = {}
    for name in sorted({name for node, names in needed.items() for name in names - held[node]}):
        having = [node for node, names in enumerate(held) if name in names]
        if not having:
            raise CheckpointError(
                f"No machine has {name}. Resume from another checkpoint, or from the mirror."
            )
        sources[name] = having[0]
    return sources


def _deliver(path: Path, target: Path | None, *, source: int, world: World) -> None:
    """Broadcast a file of rank `source` to the ranks with a target; errors raise on all ranks."""

    def read_chunks() -> Iterator[bytes]:
        # Up to the first error: the receivers' checksums detect a truncated file.
        with contextlib.suppress(OSError), path.open("rb") as file:
            while content := file.read(CHUNK_BYTES):
                yield content

    error: CheckpointError | None = None
    chunks, chunk = read_chunks() if world.rank == source else iter(()), b""
    while True:
        if target is not None and error is None:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("ab") as file:
                    file.write(chunk)
            except OSError as raised:
                error = _disk_error(target, raised)
        chunk = world.broadcast(next(chunks, b""), source=source)
        if not chunk:
            break
    world.raise_together(error)


def _disk_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read or written ({error.strerror}). A resume stores files of other "
        "machines there temporarily. Make room, or repair the disk."
    )
