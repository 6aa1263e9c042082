"""A step from outside this run's own folder and mirror: found by its address, and taken over."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.download import fetch_step
from refocused.checkpoints.resume.resume_selection import (
    Selection,
    list_checkpoints,
    next_branch,
    present_branch,
)
from refocused.checkpoints.step.branches import Branch, step_paths
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    MANIFEST,
    SCHEMA_VERSION,
    SUPERSEDED,
    CheckpointManifest,
)
from refocused.checkpoints.step.staging import STAGING_PREFIX, install, remove_step, write_manifest
from refocused.checkpoints.step.step_directory import (
    PART,
    StepDirectory,
    name_of,
    parse_name,
    read_step,
)
from refocused.checkpoints.step.verify import describe, verify
from refocused.system.atomic_files import fsync_directories, fsync_path, link_or_copy
from refocused.system.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignStep:
    """One whole step somewhere else; `bring` copies it, verified, into a folder."""

    where: str
    manifest: CheckpointManifest
    bring: Callable[[Path], StepDirectory]


def as_own(request: str, catalog: Catalog) -> str | None:
    """Return a request that the run's own catalog understands; None: the step is elsewhere.

    A path or an address of a step below the run's own folder or mirror becomes its name.
    """
    if "/" not in request or re.fullmatch(r"branch-\d+/checkpoint_step_\d+", request):
        return request
    above, name = split_address(request)
    if name is None:
        return None
    places = [catalog.local.resolve()]
    if catalog.remote is not None:
        if above == catalog.remote.url:
            return name
        if "://" not in catalog.remote.url:
            places.append(Path(catalog.remote.url).resolve())
    own = "://" not in request and Path(above or "/").expanduser().resolve() in places
    return name if own else None


def split_address(address: str) -> tuple[str, str | None]:
    """Split the path or address of a checkpoint, or of what is in it, at its name.

    A listing prints `latest/` last, or what is inside of a checkpoint, so those are understood too.
    Without a name return the whole address and None.
    """
    parts = address.rstrip("/").split("/")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] == "latest" and parts[index + 1 :] in ([], ["pointer.json"]):
            return "/".join(parts[:index]), "latest"
        if parse_name(parts[index]) is not None:
            first = index - 1 if re.fullmatch(r"branch-\d+", parts[index - 1]) else index
            return "/".join(parts[:first]), "/".join(parts[first : index + 1])
    return address.rstrip("/"), None


def find_elsewhere(request: str, open_url: Callable[[str], Bucket]) -> ForeignStep:
    """Find a step, or the newest whole one in a folder of steps or of a run, by path or address."""
    if "://" in request:
        return _in_bucket(request.rstrip("/"), open_url)
    return _in_folder(Path(request).expanduser())


def require_trust(manifest: CheckpointManifest, *, where: str, run: str, trusted: bool) -> None:
    """Raise CheckpointError for a step that another run saved, unless the user trusts it."""
    if manifest.run == run or trusted:
        return
    raise CheckpointError(
        f"{where} was saved by run {manifest.run}, not by {run}. Its files can run no code here, "
        "but all that is trained from now on would rest on what somebody else put into them. If "
        "you know where it comes from, add --trust; otherwise choose a step of this run."
    )


def select_elsewhere(found: ForeignStep, catalog: Catalog) -> Selection:
    """Copy a step below the run's own, verified, under a hidden name; select it.

    Where the run took the same step over before, its own is selected.
    """
    entries = list_checkpoints(catalog)
    present = present_branch(catalog, entries)
    path = catalog.local / catalog.branch.name_of(found.manifest.step)
    if path.exists() and _is_same(path, found.manifest):
        own = read_step(path)
        return Selection(own, next_branch(present, entries, own))
    logger.info("Fetching %s", found.where)
    stage = f"{STAGING_PREFIX}{name_of(found.manifest.step)}-from-elsewhere"
    return Selection(found.bring(catalog.local / stage), next_branch(present, entries, None))


def is_brought(path: Path) -> bool:
    """Whether a checkpoint that `select_elsewhere` selected is not the run's own yet."""
    return any(parent.name.startswith(STAGING_PREFIX) for parent in path.parents)


def take_over(
    brought: StepDirectory, checkpoints: Path, *, run: str, branch: Branch
) -> StepDirectory:
    """Make a checkpoint from elsewhere the run's own, on the branch that it begins."""
    if not is_brought(brought.path):
        return brought  # an earlier start took it over
    stage = next(path for path in brought.path.parents if path.parent == checkpoints)
    name = branch.name_of(brought.step)
    final = checkpoints / name
    ours = brought.manifest.model_copy(
        update={
            "schema_version": SCHEMA_VERSION,
            "run": run,
            "run_id": branch.run_id,
            "branch": branch.number,
            "ancestry": branch.ancestry,
            "name": name,
            "created": datetime.datetime.now(datetime.UTC),
        }
    )
    (brought.path / COMMITTED).unlink(missing_ok=True)  # a kill here leaves an unfinished copy
    write_manifest(brought.path, ours)
    fsync_path(brought.path)
    install(brought.path, final)
    shutil.rmtree(stage)
    return StepDirectory(final, ours)


def _is_same(path: Path, manifest: CheckpointManifest) -> bool:
    """Whether a step here holds the same files, all of them whole."""
    try:
        step = read_step(path)
    except CheckpointError:
        return False
    return step.manifest.files == manifest.files and not verify(step, deep=True)


def _in_folder(path: Path) -> ForeignStep:
    above, name = split_address(str(path))
    if name is not None and not (path / MANIFEST).exists():
        path = Path(above) if name == "latest" else Path(above, name)
    is_one = (path / MANIFEST).exists() or name not in (None, "latest")
    step = read_step(path) if is_one else _newest(path)
    if step.part is not None:
        raise CheckpointError(
            f"{step.path} is no whole checkpoint ({step.part}). Resume from the run's mirror, or "
            f"bring the parts of all machines together in one folder, without {PART}, first."
        )
    return ForeignStep(
        str(step.path), step.manifest, lambda stage: _copied(step, stage / name_of(step.step))
    )


def _newest(folder: Path) -> StepDirectory:
    """Return the newest step of a folder that has all its files."""
    candidates = step_paths(folder) or step_paths(folder / "checkpoints")
    for path in reversed(candidates.values()):
        try:
            step = read_step(path)
        except CheckpointError:
            continue
        if not (path / SUPERSEDED).exists() and not verify(step, deep=False):
            return step
    raise _none_whole(folder)


def _copied(step: StepDirectory, target: Path) -> StepDirectory:
    """Copy a step, by hard links where it lies on the same disk: its files never change."""
    if target.exists():
        remove_step(target)
    try:
        for name in step.manifest.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(step.path / name, target / name)
        for name in (MANIFEST, COMMITTED):  # the first schema has no marker
            if (step.path / name).exists():
                shutil.copyfile(step.path / name, target / name)
                fsync_path(target / name)
        fsync_directories(target)
    except OSError as error:
        raise CheckpointError(
            f"{step.path} cannot be copied to {target.parent}: {error.strerror} "
            f"({error.filename}). Make room there, or choose another step."
        ) from error
    copy = StepDirectory(target, step.manifest)
    if problems := verify(copy, deep=True):
        raise CheckpointError(f"{step.path} is corrupt: {describe(problems)}. Choose another step.")
    return copy


def _in_bucket(url: str, open_url: Callable[[str], Bucket]) -> ForeignStep:
    above, name = split_address(url)
    bucket = open_url(above)
    if name not in (None, "latest"):
        return _remote_step(RemoteSteps(bucket, ""), str(name))
    for prefix in ("", "checkpoints"):
        remote = RemoteSteps(bucket, prefix)
        for name, objects in reversed(remote.scan().items()):
            if COMMITTED in objects and SUPERSEDED not in objects:
                return _remote_step(remote, name)
    run = url.removesuffix("/final_model")
    hint = f" An export has no optimizer states: try {run}/checkpoints/latest."
    raise _none_whole(url, hint="" if run == url else hint)


def _none_whole(place: object, *, hint: str = "") -> CheckpointError:
    return CheckpointError(
        f"{place} is no checkpoint and holds none that is whole. Name a checkpoint_step_N, the "
        f"folder that holds them, or a run.{hint}"
    )


def _remote_step(remote: RemoteSteps, name: str) -> ForeignStep:
    where = f"{remote.url}/{name}"
    if remote.marker(name) is None:
        raise CheckpointError(
            f"{where} has no {COMMITTED} object: it is not there, or its upload never finished. "
            "Choose another step."
        )
    return ForeignStep(
        where, remote.manifest(name), lambda stage: fetch_step(remote, name, checkpoints=stage)
    )
