"""All steps of a run, on the disk and in the bucket together, and which one a person means."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.transfer import Progress
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.aliases import ROLES, by_role, is_role, tier_notes
from refocused.checkpoints.resume.download import fetch_step
from refocused.checkpoints.resume.step_state import (
    LEFT_BEHIND,
    UNREADABLE,
    WHOLE,
    Found,
    is_part,
    judge_directory,
    judge_objects,
)
from refocused.checkpoints.step.branches import (
    FIRST_BRANCH,
    Branch,
    branch_of,
    checkpoint_paths,
    recorded_branch,
)
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import best_of
from refocused.checkpoints.step.step_directory import (
    StepDirectory,
    parse_name,
    parse_place,
    read_step,
)
from refocused.checkpoints.step.verify import FileProblem, verify
from refocused.system.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One step as both places know it.

    Attributes:
        step: Optimizer updates done.
        name: Directory name.
        size: Bytes of its files; None: no manifest can be read.
        created: When it was saved; None: no manifest can be read.
        local: `ok` (structure and sizes are right), `node N of M: its part` (that is right),
            `broken: ...` or `-`.
        bucket: `ok` (committed), `NN %` (of its bytes are there), `superseded` (training went on
            from an earlier step), `broken: ...` or `-`.
        loss: Training loss of the step, in nats a token.
        validation_loss: Validation loss, in nats a token.
        bucket_bytes: Bytes of its objects in the bucket, whole or not.
        tiers: Why it was saved; none when no manifest can be read.
        notes: `latest`, `best`, `final`, `epoch E`, `emergency`, `incomplete: ...`.
        branch: Branch whose folder holds it.
        local_run_id: Identity of the run that saved the local one; empty in the first schema.
        bucket_run_id: The same of the one in the bucket.
        alias: The other name it is found by, `checkpoint-epochE-stepN-filesF`.
        is_present: Whether it is on the run's present branch: only those are `latest` or `best`.
    """

    step: int
    name: str
    size: int | None
    created: datetime.datetime | None
    local: str
    bucket: str
    loss: float | None
    validation_loss: float | None
    bucket_bytes: int = 0
    tiers: tuple[SaveReason, ...] = ()
    notes: tuple[str, ...] = ()
    branch: int = 1
    local_run_id: str = ""
    bucket_run_id: str = ""
    alias: str | None = None
    is_present: bool = True

    @property
    def usable(self) -> bool:
        """Whether training can resume from it, here or after a download."""
        return WHOLE in (self.local, self.bucket)

    @property
    def sound_here(self) -> bool:
        """Whether this disk has what belongs on it: the step, or this machine's part of it."""
        return self.local == WHOLE or is_part(self.local)


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedStep:
    """The step that a request means.

    Attributes:
        step: Optimizer updates done.
        name: Its directory name.
        path: Its local directory; None: it has to be fetched from the bucket.
    """

    step: int
    name: str
    path: Path | None


class Catalog:
    """The steps of one run.

    Attributes:
        local: Folder of the step directories; need not exist.
        remote: The same in the bucket; None: there is no mirror, or it is not asked.
    """

    def __init__(self, local: Path, mirror: Bucket | None = None, prefix: str = "") -> None:
        """Look at a folder, and at the steps below `prefix` of a bucket (see `prefix_of`)."""
        self.local = local
        self.remote = RemoteSteps(mirror, prefix) if mirror is not None else None
        self.branch = FIRST_BRANCH

    def entries(self) -> list[CatalogEntry]:
        """Every checkpoint; those of the present branch last, by step ascending.

        The present branch is then in `branch`: that of `state.json`, or that of the highest number.

        Raises:
            BucketError: The bucket cannot be listed.
        """
        here = self.here()
        there = self._there(here)
        places = {place: name for name in {*here, *there} if (place := parse_place(name))}
        found = [
            (name, here.get(name, Found()), there.get(name, Found()))
            for _, name in sorted(places.items())
        ]
        manifests = (local.manifest or remote.manifest for _, local, remote in reversed(found))
        newest = next(filter(None, manifests), None)
        known = recorded_branch(self.local.parent)
        self.branch = known or (branch_of(newest) if newest else FIRST_BRANCH)
        entries = [_entry(*one, on=self.branch) for one in found]
        return _annotated(sorted(entries, key=lambda entry: entry.is_present))

    def local_only(self) -> Catalog:
        """The same without the bucket."""
        return Catalog(self.local)

    def problems(self, step: StepDirectory) -> list[FileProblem]:
        """Read every byte of a local step; return what is wrong with it."""
        return verify(step, deep=True)

    def here(self) -> dict[str, Found]:
        """Judge every local checkpoint by its structure and sizes."""
        return {name: judge_directory(path) for name, path in checkpoint_paths(self.local).items()}

    def _there(self, here: Mapping[str, Found]) -> dict[str, Found]:
        """Judge every checkpoint of the bucket by its own manifest."""
        if self.remote is None:
            return {}
        found = {}
        for name, objects in self.remote.scan().items():
            judged = judge_objects(self.remote, name, objects, here.get(name, Found()))
            size = sum(blob.size for blob in objects.values())
            found[name] = dataclasses.replace(judged, objects_bytes=size)
        return found

    def resolve(self, request: str) -> ResolvedStep:
        """Find the step that `latest`, `best`, a number, a name or a path means.

        Raises:
            CheckpointError: There is no such step, or it is broken; the nearest are named.
            BucketError: The bucket cannot be listed.
        """
        if "/" in request and _requested_place(request) is None:
            directory = read_step(Path(request).expanduser())
            return ResolvedStep(directory.step, directory.name, directory.path)
        entries = self.entries()
        entry = self.find(request, entries)
        if not entry.usable:
            raise CheckpointError(
                f"{entry.name} cannot be used: {'; '.join(entry.notes)}. "
                f"{_nearest(request, entries)}"
            )
        path = self.local / entry.name if entry.local == WHOLE else None
        return ResolvedStep(entry.step, entry.name, path)

    def find(self, request: str, entries: Sequence[CatalogEntry]) -> CatalogEntry:
        """Find a role such as `latest` or `best`, a number or a name among entries, usable or not.

        Raises:
            CheckpointError: There is no such step; the nearest are named.
        """
        if is_role(request):
            chosen = by_role(request, entries)
            if chosen is None:
                raise CheckpointError(self._nothing(request))
            return chosen
        place, step = _requested_place(request), _requested_step(request)
        for entry in reversed(entries):  # the present branch comes first, and its step N is meant
            if (entry.branch, entry.step) == place or (place is None and entry.step == step):
                if request.startswith("checkpoint-epoch") and entry.alias != request:
                    raise CheckpointError(
                        f"{request} does not exist: {entry.name} is {entry.alias or 'unreadable'}."
                    )
                return entry
        raise CheckpointError(
            f"There is no checkpoint {request!r} in {self._places()}. {_nearest(request, entries)}"
        )

    def fetch(
        self,
        name: str,
        *,
        threads: int = 8,
        progress: Callable[[Progress], None] | None = None,
        replace: bool = False,
    ) -> StepDirectory:
        """Return a step's local directory, downloading it when it is absent or broken.

        Args:
            name: Its directory name.
            threads: Downloads at once.
            progress: Told how far the download is.
            replace: Download even when the local sizes are right, because a checksum was not.

        Raises:
            CheckpointError: There is no mirror, or the step in it is not whole.
            BucketError: The bucket cannot be read, or the disk has no room.
        """
        path = self.local / name
        if not replace and judge_directory(path).state == WHOLE:
            return read_step(path)
        if self.remote is None:
            raise CheckpointError(
                f"{path} is not a whole checkpoint and no bucket is known that has it. "
                "Name one with --bucket gs://bucket/prefix, or choose another step."
            )
        return fetch_step(
            self.remote, name, checkpoints=self.local, threads=threads, progress=progress
        )

    def _nothing(self, request: str) -> str:
        if request in ("best", "best_model"):
            return (
                f"No usable checkpoint in {self._places()} has a validation loss, so none is the "
                "best. Choose latest, or a step: python launch/checkpoints.py list"
            )
        if request != "latest":
            return (
                f"No usable checkpoint in {self._places()} is what {request} stands for. See what "
                "each was saved for: python launch/checkpoints.py list"
            )
        return (
            f"There is no usable checkpoint in {self._places()}. "
            "Start without one (--resume none), or name another run or --bucket."
        )

    def _places(self) -> str:
        return f"{self.local} or {self.remote.url}" if self.remote else str(self.local)


def _entry(name: str, here: Found, there: Found, *, on: Branch) -> CatalogEntry:
    place, manifest = parse_place(name), here.manifest or there.manifest
    assert place is not None  # no other names are listed
    entry = CatalogEntry(
        step=place[1],
        name=name,
        size=manifest.total_bytes if manifest else None,
        created=manifest.created if manifest else None,
        local=here.state,
        bucket=there.state,
        loss=manifest.loss if manifest else None,
        validation_loss=manifest.validation_loss if manifest else None,
        bucket_bytes=there.objects_bytes,
        tiers=manifest.tiers if manifest else (),
        branch=place[0],
        local_run_id=here.manifest.run_id if here.manifest else "",
        bucket_run_id=there.manifest.run_id if there.manifest else "",
        alias=manifest.alias if manifest else None,
        is_present=on.step_of(name) is not None,
    )
    labels: tuple[str, ...] = ()
    if manifest is not None and entry.usable:
        labels = tier_notes(manifest.tiers, epoch=manifest.epoch)
    if not entry.is_present:
        labels = (f"branch {entry.branch}, which the run left; ignored by resume", *labels)
    return dataclasses.replace(entry, notes=labels + _troubles(entry))


def _troubles(entry: CatalogEntry) -> tuple[str, ...]:
    """What is wrong with a step, in one place or in both."""
    places = {"local": entry.local, "bucket": entry.bucket}
    broken = [
        f"{place}: {state.removeprefix('broken: ')}"
        for place, state in places.items()
        if state.startswith(("broken", UNREADABLE))
    ]
    if entry.usable:
        return tuple(broken)
    if entry.bucket == LEFT_BEHIND:
        return ("superseded: training went on from an earlier step; ignored by resume",)
    if entry.bucket.endswith("%"):
        broken.append(f"bucket: {entry.bucket} of it")
    if is_part(entry.local):
        broken.append(f"local: {entry.local}")
    return (f"incomplete: {', '.join(broken)}; ignored by resume",)


def _annotated(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    usable = [entry for entry in entries if entry.usable and entry.is_present]
    best = best_of({entry.step: entry.validation_loss for entry in usable})
    latest = usable[-1].step if usable else None
    marks = {"latest": latest, "best": best}
    return [
        dataclasses.replace(
            entry,
            notes=tuple(note for note, at in marks.items() if entry.is_present and at == entry.step)
            + entry.notes,
        )
        for entry in entries
    ]


def _requested_place(request: str) -> tuple[int, int] | None:
    """Return branch and step of a name that says both."""
    match = re.fullmatch(r"branch-(\d+)/checkpoint_step_(\d+)", request)
    return (int(match[1]), int(match[2])) if match else None


def _requested_step(request: str) -> int | None:
    plain = re.sub(r"[,_]", "", request)
    return int(plain) if plain.isdecimal() else parse_name(request)


def _nearest(request: str, entries: Sequence[CatalogEntry]) -> str:
    """Offer up to three usable steps: by distance when the request holds a number, else by name."""
    names = [entry.name for entry in entries if entry.usable]
    if not names:
        return "No usable checkpoint is there."
    numbers = re.findall(r"\d+", request)
    if numbers:
        wanted = int(max(numbers, key=len))
        near = sorted(names, key=lambda name: abs(int(name.rpartition("_")[2]) - wanted))[:3]
    else:
        near = difflib.get_close_matches(request, [*names, *ROLES], n=3) or names[-3:]
    return f"Nearest: {', '.join(near)}."
