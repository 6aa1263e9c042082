"""Import a checkpoint from outside the run's own folder and mirror, by path or URL."""

import contextlib
import dataclasses
import datetime
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.checkpoints.mirror.copies import fetch_checkpoint
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import (
    Selection,
    list_checkpoints,
    next_branch,
    present_branch,
)
from refocused.checkpoints.step.checkpoint_directory import (
    PART,
    Branch,
    Checkpoint,
    name_of,
    parse_name,
    read_checkpoint,
    step_paths,
)
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    Parent,
)
from refocused.checkpoints.step.staging import (
    STAGING_PREFIX,
    install,
    remove_checkpoint,
    write_manifest,
)
from refocused.checkpoints.step.verify import WHOLE, require_intact, verify
from refocused.system.atomic_files import fsync_directories, fsync_path, link_or_copy
from refocused.system.errors import CheckpointError, local_path

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A complete checkpoint elsewhere."""

    where: str
    manifest: CheckpointManifest
    copy_into: Callable[[Path], Checkpoint]  # copies it into a folder and verifies it


def own_request(request: str, catalog: Catalog) -> str | None:
    """Return the request as a name in the run's own catalog; None if the checkpoint is elsewhere.

    Paths and URLs below the run's own folder or mirror become names.
    """
    if "/" not in request or re.fullmatch(r"branch-\d+/checkpoint_step_\d+", request):
        return request
    above, name = split_address(request)
    if name is None:
        return None
    folders = [catalog.local.resolve()]
    if catalog.remote is not None:
        if above == catalog.remote.url:
            return name
        if "://" not in catalog.remote.url:
            folders.append(Path(catalog.remote.url).resolve())
    is_own = "://" not in request and local_path(above or "/").resolve() in folders
    return name if is_own else None


def split_address(address: str) -> tuple[str, str | None]:
    """Split the path or URL of a checkpoint, or of a file in it, into folder and name.

    `latest` and `latest/pointer.json` have the name `latest`. Without a name, return the whole
    address and None.
    """
    parts = address.rstrip("/").split("/")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] == "latest" and parts[index + 1 :] in ([], ["pointer.json"]):
            return "/".join(parts[:index]), "latest"
        if parse_name(parts[index]) is not None:
            first = index - 1 if re.fullmatch(r"branch-\d+", parts[index - 1]) else index
            return "/".join(parts[:first]), "/".join(parts[first : index + 1])
    return address.rstrip("/"), None


def find_elsewhere(request: str, open_url: Callable[[str], Bucket]) -> ForeignCheckpoint:
    """Find a checkpoint by path or URL: itself, or the newest complete one in a folder or run."""
    if "://" not in request:
        return _in_folder(local_path(request))
    url = request.rstrip("/")
    above, name = split_address(url)
    bucket = open_url(above)
    if name not in (None, "latest"):
        return _remote_step(RemoteCheckpoints(bucket, ""), str(name))
    for prefix in ("", "checkpoints"):
        remote = RemoteCheckpoints(bucket, prefix)
        for name, objects in reversed(remote.scan().items()):
            if COMMITTED in objects:
                return _remote_step(remote, name)
    run = url.removesuffix("/final_model")
    hint = f" An export has no optimizer states: try {run}/checkpoints/latest."
    raise _none_complete(url, hint="" if run == url else hint)


def find_in_run(
    request: str, catalog: Catalog, open_url: Callable[[str], Bucket]
) -> ForeignCheckpoint:
    """Find a checkpoint of the run of a catalog, by what `--resume` takes."""
    name = own_request(request, catalog)
    if name is None:
        return find_elsewhere(request, open_url)
    entry = catalog.resolve(name)
    if entry.local == WHOLE or catalog.remote is None:
        return _in_folder(catalog.local / entry.name)
    return _remote_step(catalog.remote, entry.name)


def require_trust(manifest: CheckpointManifest, *, where: str, run: str, trusted: bool) -> None:
    """Raise CheckpointError for a checkpoint of another run, unless the user trusts it."""
    if manifest.run == run or trusted:
        return
    raise CheckpointError(
        f"{where} was saved by run {manifest.run}, not by {run}. Loading it executes no code, but "
        "training would continue from weights that may be manipulated. If you trust its source, "
        "add --trust; otherwise choose a checkpoint of this run."
    )


def select_elsewhere(foreign: ForeignCheckpoint, catalog: Catalog) -> Selection:
    """Copy a checkpoint, verified, into a hidden folder of the run, and select it.

    If the run has imported the same checkpoint before, select that one.
    """
    entries = list_checkpoints(catalog)
    present = present_branch(catalog, entries)
    path = catalog.local / catalog.branch.name_of(foreign.manifest.step)
    if path.exists() and is_same(path, foreign.manifest):
        imported = read_checkpoint(path)
        return Selection(imported, next_branch(present, entries, imported))
    logger.info("Copying %s", foreign.where)
    stage = f"{STAGING_PREFIX}{name_of(foreign.manifest.step)}-from-elsewhere"
    parent = Parent.model_validate(foreign.manifest, from_attributes=True)
    branch = next_branch(present, entries, None).model_copy(update={"parent": parent})
    return Selection(foreign.copy_into(catalog.local / stage), branch)


def is_imported(path: Path) -> bool:
    """Whether a selected checkpoint lies in the hidden folder of `select_elsewhere`."""
    return any(parent.name.startswith(STAGING_PREFIX) for parent in path.parents)


def adopt(imported: Checkpoint, checkpoints: Path, *, run: str, branch: Branch) -> Checkpoint:
    """Make an imported checkpoint one of the run's own, as the first of `branch`."""
    if not is_imported(imported.path):
        return imported  # adopted at an earlier start
    stage = next(path for path in imported.path.parents if path.parent == checkpoints)
    name = branch.name_of(imported.step)
    final = checkpoints / name
    fields = {"run": run, "name": name, "created": datetime.datetime.now(datetime.UTC)}
    fields |= {**branch.as_record(), "parent": branch.parent}
    manifest = imported.manifest.model_copy(update=fields)
    (imported.path / COMMITTED).unlink(missing_ok=True)  # if killed here, the copy is incomplete
    write_manifest(imported.path, manifest)
    fsync_path(imported.path)
    install(imported.path, final)
    shutil.rmtree(stage)
    return Checkpoint(final, manifest)


def is_same(path: Path, manifest: CheckpointManifest) -> bool:
    """Whether a local checkpoint has the same files, all of them intact."""
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError:
        return False
    return checkpoint.manifest.files == manifest.files and not verify(checkpoint, deep=True)


def _in_folder(path: Path) -> ForeignCheckpoint:
    above, name = split_address(str(path))
    if name is not None and not (path / MANIFEST).exists():
        path = Path(above) if name == "latest" else Path(above, name)
    if (path / MANIFEST).exists() or name not in (None, "latest"):
        checkpoint = read_checkpoint(path)
    else:  # the newest one that has all its files
        for candidate in reversed((step_paths(path) or step_paths(path / "checkpoints")).values()):
            with contextlib.suppress(CheckpointError):
                checkpoint = read_checkpoint(candidate)
                if not verify(checkpoint, deep=False):
                    break
        else:
            raise _none_complete(path)
    if checkpoint.part is not None:
        raise CheckpointError(
            f"{checkpoint.path} is not a complete checkpoint ({checkpoint.part}). Resume from the "
            "run's mirror, or first collect the parts of all machines in one folder, without "
            f"{PART}."
        )
    return ForeignCheckpoint(
        str(checkpoint.path),
        checkpoint.manifest,
        lambda stage: _copied(checkpoint, stage / name_of(checkpoint.step)),
    )


def _copied(checkpoint: Checkpoint, target: Path) -> Checkpoint:
    """Copy a checkpoint; on the same disk by hard links, since its files never change."""
    if target.exists():
        remove_checkpoint(target)
    try:
        for name in checkpoint.manifest.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(checkpoint.path / name, target / name)
        for name in (MANIFEST, COMMITTED):
            shutil.copyfile(checkpoint.path / name, target / name)
            fsync_path(target / name)
        fsync_directories(target)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path} cannot be copied to {target.parent}: {error.strerror} "
            f"({error.filename}). Make room there, or choose another checkpoint."
        ) from error
    copy = Checkpoint(target, checkpoint.manifest)
    require_intact(copy)
    return copy


def _none_complete(address: object, *, hint: str = "") -> CheckpointError:
    return CheckpointError(
        f"{address} is not a checkpoint and contains no complete one. Name a checkpoint_step_N, "
        f"their folder, or a run.{hint}"
    )


def _remote_step(remote: RemoteCheckpoints, name: str) -> ForeignCheckpoint:
    where = f"{remote.url}/{name}"
    if remote.marker(name) is None:
        raise CheckpointError(
            f"{where} has no {COMMITTED} object: it does not exist, or its upload never finished. "
            "Choose another checkpoint."
        )
    return ForeignCheckpoint(
        where,
        remote.manifest(name),
        lambda stage: fetch_checkpoint(remote, name, checkpoints=stage),
    )
