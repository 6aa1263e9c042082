"""A step that is not of this run's own folder or mirror: found by its address, and taken over."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.checkpoints.atomic import (
    fsync_directories,
    fsync_path,
    link_or_copy,
    write_bytes_atomic,
)
from refocused.checkpoints.catalog import Catalog
from refocused.checkpoints.fetch import fetch_step
from refocused.checkpoints.manifest import MANIFEST, CheckpointManifest
from refocused.checkpoints.remote_steps import COMMITTED, SUPERSEDED, RemoteSteps
from refocused.checkpoints.staging import STAGING_PREFIX, remove_step, set_aside
from refocused.checkpoints.step_directory import (
    PART,
    StepDirectory,
    name_of,
    parse_name,
    read_step,
    step_paths,
)
from refocused.checkpoints.verify import describe, verify
from refocused.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignStep:
    """One whole step somewhere else.

    Attributes:
        where: Its path or address.
        manifest: What it says of itself.
        bring: Brings it, verified, into a folder; returns it there.
    """

    where: str
    manifest: CheckpointManifest
    bring: Callable[[Path], StepDirectory]


def as_own(request: str, catalog: Catalog) -> str | None:
    """Return a request in words that the run's own catalog knows; None when it is elsewhere.

    A path or an address of a step below the run's own folder or mirror becomes its name.
    """
    if "/" not in request:
        return request
    above, _, last = request.rstrip("/").rpartition("/")
    if parse_name(last) is None:
        return None
    places = [catalog.local.resolve()]
    if catalog.remote is not None:
        if above == catalog.remote.url:
            return last
        if "://" not in catalog.remote.url:
            places.append(Path(catalog.remote.url).resolve())
    own = "://" not in request and Path(above or "/").expanduser().resolve() in places
    return last if own else None


def find_elsewhere(request: str, open_url: Callable[[str], Bucket]) -> ForeignStep:
    """Find the step that a path or an address means.

    It is a step, or the newest whole one in a folder of steps or of a run.

    Args:
        request: The path, or an address with a scheme.
        open_url: Opens an address.

    Raises:
        CheckpointError: No whole step is there.
        BucketError: The bucket cannot be read.
    """
    if "://" in request:
        return _in_bucket(request.rstrip("/"), open_url)
    return _in_folder(Path(request).expanduser())


def require_trust(manifest: CheckpointManifest, *, where: str, run: str, trusted: bool) -> None:
    """Refuse a step that another run saved, unless that was said to be right.

    Raises:
        CheckpointError: It is of another run.
    """
    if manifest.run == run or trusted:
        return
    raise CheckpointError(
        f"{where} was saved by run {manifest.run}, not by {run}. Its files can run no code here, "
        "but all that is trained from now on would rest on what somebody else put into them. If "
        "you know where it comes from, add --trust; otherwise choose a step of this run."
    )


def bring(found: ForeignStep, catalog: Catalog) -> StepDirectory:
    """Return a verified copy of a step below the run's own, under a name that nothing takes.

    Where the run took the same step over before, that is it.

    Raises:
        CheckpointError: It is corrupt, or the disk has no room.
        BucketError: It cannot be read.
    """
    name = name_of(found.manifest.step)
    if (catalog.local / name).exists() and _is_same(catalog.local / name, found.manifest):
        return read_step(catalog.local / name)
    logger.info("Fetching %s", found.where)
    return found.bring(catalog.local / f"{STAGING_PREFIX}{name}-from-elsewhere")


def take_over(brought: StepDirectory, catalog: Catalog, *, run: str) -> StepDirectory:
    """Make a step that `bring` returned the run's own, in place of what it had from there on.

    Its own step of that number, and that and the later ones in its mirror, get names and marks
    that no resume takes; nothing of them is lost.

    Args:
        brought: The step.
        catalog: The run's steps.
        run: The run's name, which the step's manifest gets.

    Raises:
        BucketError: The run's mirror cannot be written.
    """
    if not brought.path.parent.name.startswith(STAGING_PREFIX):
        return brought  # it has been the run's own for long
    final = catalog.local / name_of(brought.step)
    ours = brought.manifest.model_copy(
        update={"run": run, "name": final.name, "created": datetime.datetime.now(datetime.UTC)}
    )
    write_bytes_atomic(brought.path / MANIFEST, ours.to_json())
    for name in catalog.supersede_after(brought.step - 1):
        logger.info("  aside    %s in the mirror is marked SUPERSEDED", name)
    if final.exists():
        logger.info("  aside    %s is now %s", final.name, set_aside(final).name)
    brought.path.rename(final)
    fsync_path(final.parent)
    shutil.rmtree(brought.path.parent)
    return StepDirectory(final, ours)


def _is_same(path: Path, manifest: CheckpointManifest) -> bool:
    """Whether a step here holds the same files, all of them whole."""
    try:
        step = read_step(path)
    except CheckpointError:
        return False
    return step.manifest.files == manifest.files and not verify(step, deep=True)


def _in_folder(path: Path) -> ForeignStep:
    step = read_step(path) if (path / MANIFEST).exists() else _newest(path)
    if step.part is not None:
        raise CheckpointError(
            f"{step.path} is no whole checkpoint ({step.part}). Resume from the run's mirror, or "
            "bring the parts of all machines together in one folder, without "
            f"{PART}, first."
        )
    return ForeignStep(
        str(step.path), step.manifest, lambda stage: _copied(step, stage / name_of(step.step))
    )


def _newest(folder: Path) -> StepDirectory:
    """Return the newest step of a folder that has all its files."""
    candidates = step_paths(folder) or step_paths(folder / "checkpoints")
    for path in reversed(candidates):
        try:
            step = read_step(path)
        except CheckpointError:
            continue
        if not (path / SUPERSEDED).exists() and not verify(step, deep=False):
            return step
    raise CheckpointError(
        f"{folder} is no checkpoint and holds none that is whole. Give the path of a directory "
        "checkpoint_step_N, of the folder that holds them, or of a run."
    )


def _copied(step: StepDirectory, target: Path) -> StepDirectory:
    """Copy a step, by hard links where it lies on the same disk: its files never change."""
    if target.exists():
        remove_step(target)
    try:
        for name in step.manifest.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(step.path / name, target / name)
        shutil.copyfile(step.path / MANIFEST, target / MANIFEST)
        fsync_directories(target)
    except OSError as error:
        raise CheckpointError(
            f"{step.path} cannot be copied to {target.parent}: {error.strerror} "
            f"({error.filename}). Make room there, or choose another step."
        ) from error
    copy = StepDirectory(target, step.manifest)
    problems = verify(copy, deep=True)
    if problems:
        raise CheckpointError(f"{step.path} is corrupt: {describe(problems)}. Choose another step.")
    return copy


def _in_bucket(url: str, open_url: Callable[[str], Bucket]) -> ForeignStep:
    above, _, last = url.rpartition("/")
    step = parse_name(last)
    if step is not None:
        return _remote_step(RemoteSteps(open_url(above), ""), name_of(step))
    bucket = open_url(url)
    for prefix in ("", "checkpoints"):
        remote = RemoteSteps(bucket, prefix)
        whole = [
            step
            for step, objects in remote.scan().items()
            if COMMITTED in objects and SUPERSEDED not in objects
        ]
        if whole:
            return _remote_step(remote, name_of(max(whole)))
    raise CheckpointError(
        f"{url} is no checkpoint and holds none that is whole. Give the address of a "
        "checkpoint_step_N, of the folder that holds them, or of a run."
    )


def _remote_step(remote: RemoteSteps, name: str) -> ForeignStep:
    if remote.marker(name) is None:
        raise CheckpointError(
            f"{remote.url}/{name} has no {COMMITTED} object: it is not there, or its upload never "
            "finished. Choose another step."
        )
    return ForeignStep(
        f"{remote.url}/{name}",
        remote.manifest(name),
        lambda stage: fetch_step(remote, name, checkpoints=stage),
    )
