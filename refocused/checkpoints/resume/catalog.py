"""All steps of a run, on the disk and in the bucket together, and which one a request means."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.transfer import Progress
from refocused.checkpoints.mirror.remote_steps import LEFT_BEHIND, RemoteSteps, judge_objects
from refocused.checkpoints.resume.download import fetch_step
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
from refocused.checkpoints.step.verify import (
    UNREADABLE,
    WHOLE,
    FileProblem,
    Found,
    is_part,
    judge_directory,
    verify,
)
from refocused.system.errors import CheckpointError

# These names stand for whatever step has the role now; `epoch_00003` is one too.
ROLES = ("latest", "best", "final", "latest_backup")
_EPOCH = re.compile(r"epoch_(\d+)")
_LIST = "python launch/checkpoints.py list"


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One step as both places know it."""

    step: int
    name: str
    size: int | None  # bytes of its files; None, as `created`: no manifest can be read
    created: datetime.datetime | None
    # `ok` (structure and sizes are right), `node N of M: its part` (that is right), `broken: ...`,
    # `unreadable: ...` or `-`
    local: str
    # `ok` (committed), `NN %` (of its bytes are there), `superseded` (by version 0.1: training went
    # on from an earlier step), `broken: ...`, `unreadable: ...` or `-`
    bucket: str
    loss: float | None  # in nats a token
    validation_loss: float | None
    bucket_bytes: int = 0  # of its objects, whole or not
    tiers: tuple[SaveReason, ...] = ()
    notes: tuple[str, ...] = ()  # `latest`, `best`, `final`, `epoch E`, `incomplete: ...`
    branch: int = 1  # whose folder holds it
    local_run_id: str = ""  # of the run that saved it; empty in the first schema
    bucket_run_id: str = ""
    alias: str | None = None  # `checkpoint-epochE-stepN-filesF`
    is_present: bool = True  # on the present branch: only those are `latest` or `best`

    @property
    def usable(self) -> bool:
        """Whether training can resume from it, here or after a download."""
        return WHOLE in (self.local, self.bucket)

    @property
    def sound_here(self) -> bool:
        """Whether this disk has what belongs on it: the step, or this machine's part of it."""
        return self.local == WHOLE or is_part(self.local)


class Catalog:
    """The steps of one run."""

    def __init__(self, local: Path, mirror: Bucket | None = None, prefix: str = "") -> None:
        """Look at a folder, and at the steps below `prefix` of a bucket (see `prefix_of`)."""
        self.local = local  # need not exist
        self.remote = RemoteSteps(mirror, prefix) if mirror is not None else None
        self.branch = FIRST_BRANCH  # the present one, once the steps are listed

    def entries(self) -> list[CatalogEntry]:
        """List every checkpoint; those of the present branch last, by step ascending.

        The present branch is that of `state.json`, or that of the highest number. A bucket that
        cannot be listed raises BucketError.
        """
        here, remote = self.here(), self.remote
        there: dict[str, Found] = {}
        if remote is not None:
            for name, objects in remote.scan().items():
                judged = judge_objects(remote, name, objects, here.get(name, Found()))
                size = sum(blob.size for blob in objects.values())
                there[name] = dataclasses.replace(judged, objects_bytes=size)
        places = {place: name for name in {*here, *there} if (place := parse_place(name))}
        names = [places[place] for place in sorted(places)]
        found = [(name, here.get(name, Found()), there.get(name, Found())) for name in names]
        manifests = (local.manifest or remote.manifest for _, local, remote in reversed(found))
        newest = next(filter(None, manifests), None)
        known = recorded_branch(self.local.parent)
        self.branch = known or (branch_of(newest) if newest else FIRST_BRANCH)
        entries = [_entry(*one, on=self.branch) for one in found]
        return _marked(sorted(entries, key=lambda entry: entry.is_present))

    def local_only(self) -> Catalog:
        """Return a catalog of the same folder without the bucket."""
        return Catalog(self.local)

    def problems(self, step: StepDirectory) -> list[FileProblem]:
        """Read every byte of a local step; return what is wrong with it."""
        return verify(step, deep=True)

    def here(self) -> dict[str, Found]:
        """Judge every local checkpoint by its structure and sizes."""
        return {name: judge_directory(path) for name, path in checkpoint_paths(self.local).items()}

    def resolve(self, request: str) -> CatalogEntry:
        """Find a usable step by role, number or name; CheckpointError names the nearest."""
        entries = self.entries()
        entry = self.find(request, entries)
        if not entry.usable:
            raise CheckpointError(
                f"{entry.name} cannot be used: {'; '.join(entry.notes)}. "
                f"{_nearest(request, entries)}"
            )
        return entry

    def find(self, request: str, entries: Sequence[CatalogEntry]) -> CatalogEntry:
        """Find a role such as `latest`, a number or a name among entries, usable or not.

        Raises CheckpointError when there is no such step; the nearest are named.
        """
        role = "best" if request == "best_model" else request
        if role in ROLES or _EPOCH.fullmatch(role):
            if (chosen := _by_role(role, entries)) is None:
                raise CheckpointError(self._nothing(role))
            return chosen
        match = re.fullmatch(r"branch-(\d+)/checkpoint_step_(\d+)", request)
        place = (int(match[1]), int(match[2])) if match else None
        plain = re.sub(r"[,_]", "", request)
        step = int(plain) if plain.isdecimal() else parse_name(request)
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

        With `replace` it is downloaded even when the local sizes are right, because a checksum was
        not. Raises CheckpointError without a mirror; else as `fetch_step`.
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

    def _nothing(self, role: str) -> str:
        none = f"No usable checkpoint in {self._places()}"
        if role == "best":
            return f"{none} has a validation loss. Choose latest, or a step: {_LIST}"
        if role == "latest":
            return f"{none}. Start without one (--resume none), or name another run or --bucket."
        return f"{none} is what {role} stands for. See what each was saved for: {_LIST}"

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
    notes = []
    if not entry.is_present:
        notes.append(f"branch {entry.branch}, which the run left; ignored by resume")
    if manifest is not None and entry.usable:
        texts = {tier: tier.value for tier in (SaveReason.FINAL, SaveReason.EMERGENCY)}
        texts[SaveReason.EPOCH] = f"epoch {manifest.epoch}"
        notes += [texts[tier] for tier in manifest.tiers if tier in texts]
    return dataclasses.replace(entry, notes=(*notes, *_troubles(entry)))


def _troubles(entry: CatalogEntry) -> list[str]:
    """Say what is wrong with a step, in one place or in both."""
    places = {"local": entry.local, "bucket": entry.bucket}
    broken = [
        f"{place}: {state.removeprefix('broken: ')}"
        for place, state in places.items()
        if state.startswith(("broken", UNREADABLE))
    ]
    if entry.usable:
        return broken
    if entry.bucket == LEFT_BEHIND:
        return ["superseded: training went on from an earlier step; ignored by resume"]
    if entry.bucket.endswith("%"):
        broken.append(f"bucket: {entry.bucket} of it")
    if is_part(entry.local):
        broken.append(f"local: {entry.local}")
    return [f"incomplete: {', '.join(broken)}; ignored by resume"]


def _marked(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """Note at the entries which of them are the latest and the best."""
    usable = {entry.step: entry for entry in entries if entry.usable and entry.is_present}
    best = best_of({step: entry.validation_loss for step, entry in usable.items()})
    marks = {"latest": max(usable, default=None), "best": best}
    return [
        dataclasses.replace(
            entry, notes=(*(note for note, at in marks.items() if at == entry.step), *entry.notes)
        )
        if entry.is_present
        else entry
        for entry in entries
    ]


def _by_role(role: str, entries: Sequence[CatalogEntry]) -> CatalogEntry | None:
    """Return the usable step that has a role, such as `latest_backup`, the one before the latest.

    `epoch_00003` was saved when three passes over the data were complete.
    """
    usable = [entry for entry in entries if entry.usable and entry.is_present]
    if role == "latest_backup":
        return usable[-2] if len(usable) > 1 else None
    epoch = _EPOCH.fullmatch(role)
    note = role if epoch is None else f"epoch {int(epoch[1])}"
    return next((entry for entry in reversed(usable) if note in entry.notes), None)


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
