"""List a run's checkpoints, on the disk and in the bucket together, and find one of them."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import Bucket
from refocused.bucket.transfer import Progress, map_in_threads
from refocused.checkpoints.mirror.lease import present_head, read_lease
from refocused.checkpoints.mirror.remote_steps import RemoteSteps, inspect_objects
from refocused.checkpoints.resume.download import fetch_step
from refocused.checkpoints.step import branches, step_directory
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import best_of
from refocused.checkpoints.step.verify import (
    UNREADABLE,
    WHOLE,
    FileProblem,
    Found,
    inspect_directory,
    is_part,
    verify,
)
from refocused.metrics.jsonl import read_json
from refocused.system.errors import CheckpointError, as_typed

ROLES = ("latest", "best", "final")  # each means the checkpoint that has it in its notes
LIST_THREADS = 32  # reads of manifests at once: each is small, so its latency is its cost
_LIST = as_typed("checkpoints list")


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One checkpoint, here and in the bucket. What only its manifest says is None without one."""

    step: int  # optimizer steps made
    name: str  # of its directory, below the folder of checkpoints
    size: int | None  # bytes of its files
    local: str  # `ok` (all files have their sizes), `node N of M: its part` (the same for a part),
    # `broken: ...`, `unreadable: ...` or `-` (absent)
    bucket: str  # `ok` (committed), `NN %` (of its bytes are there), `broken: ...`, `unreadable:
    # ...` or `-` (absent)
    created: datetime.datetime | None = None  # when it was saved, with a time zone
    loss: float | None = None  # of training, in nats a token
    validation_loss: float | None = None  # in nats a token
    validation_set: str = ""  # fingerprint of what it was measured on
    bucket_bytes: int = 0  # of its objects, complete or not
    tiers: tuple[SaveReason, ...] = ()  # save reasons
    notes: tuple[str, ...] = ()  # `latest`, `best`, `final`, `epoch E`, `incomplete: ...`
    branch: int = 1  # number of the branch whose folder holds it
    local_run_id: str = ""  # id of the run that saved the local one
    bucket_run_id: str = ""  # the same of the one in the bucket
    alias: str | None = None  # `checkpoint-epochE-stepN-filesF`
    is_present: bool = True  # on the present branch; only such a checkpoint is `latest` or `best`

    @property
    def usable(self) -> bool:
        """Whether training can resume from it, here or after a download."""
        return WHOLE in (self.local, self.bucket)

    @property
    def sound_here(self) -> bool:
        """Whether this disk holds the checkpoint, or this machine's part of it."""
        return self.local == WHOLE or is_part(self.local)


class Catalog:
    """The checkpoints of one run."""

    def __init__(self, local: Path, mirror: Bucket | None = None, prefix: str = "") -> None:
        """Read the folder `local`, which need not exist, and what is below `prefix` of a bucket."""
        self.local = local
        self.remote = RemoteSteps(mirror, prefix) if mirror is not None else None
        self.branch = branches.FIRST_BRANCH  # the present one, once `entries` was called
        self.two_heads: CheckpointError | None = None  # why no branch can be the present one

    def entries(self) -> list[CatalogEntry]:
        """List every checkpoint by ascending step, those of the present branch last.

        The present branch is the newer one of the mirror's lease and `state.json`, or else the one
        with the highest number.

        Raises:
            BucketError: The bucket cannot be listed.
        """
        here, remote = self.here(), self.remote
        there: dict[str, Found] = {}
        if remote is not None:
            listed = remote.scan()

            def inspect(name: str) -> Found:
                size = sum(blob.size for blob in listed[name].values())
                found = inspect_objects(remote, name, listed[name])
                return dataclasses.replace(found, objects_bytes=size)

            states = map_in_threads(inspect, list(listed), threads=LIST_THREADS)
            there = dict(zip(listed, states, strict=True))
        places = {step_directory.parse_place(name) or (): name for name in {*here, *there}}
        names = [places[place] for place in sorted(places) if place]
        found = [(name, here.get(name, Found()), there.get(name, Found())) for name in names]
        self.branch = self._present(found)
        entries = [_entry(*one, on=self.branch) for one in found]
        usable = {entry.step: entry for entry in entries if entry.usable and entry.is_present}
        best = best_of({n: (one.validation_loss, one.validation_set) for n, one in usable.items()})
        for note, step in (("best", best), ("latest", max(usable, default=None))):
            for number, one in enumerate(entries):
                if one.is_present and one.step == step:
                    entries[number] = dataclasses.replace(one, notes=(note, *one.notes))
        return sorted(entries, key=lambda entry: entry.is_present)

    def _present(self, found: Sequence[tuple[str, Found, Found]]) -> branches.Branch:
        """Return the branch to continue, given all checkpoints in order of branch and step."""
        run, there, self.two_heads = self.local.parent, None, None
        recorded = branches.recorded_branch(run)
        known = str((read_json(run / "state.json") or {}).get("lease"))
        if self.remote is not None:
            there, _ = read_lease(self.remote.bucket, self.remote.lease_name)
        manifests = [remote.manifest or local.manifest for _, local, remote in found]
        saved = next((branches.branch_of(one) for one in reversed(manifests) if one), None)
        try:
            head = present_head(recorded, known=known, there=there, saved=saved)
        except CheckpointError as error:
            head, self.two_heads = recorded, error
        return head or branches.FIRST_BRANCH

    def problems(self, step: step_directory.Checkpoint) -> list[FileProblem]:
        """Read every byte of a local checkpoint; return what is wrong with it."""
        return verify(step, deep=True)

    def here(self) -> dict[str, Found]:
        """Check every local checkpoint by its structure and the sizes of its files."""
        paths = branches.checkpoint_paths(self.local)
        return {name: inspect_directory(path) for name, path in paths.items()}

    def resolve(self, request: str) -> CatalogEntry:
        """Find a usable checkpoint as `find` does; raise CheckpointError if there is none."""
        entries = self.entries()
        entry = self.find(request, entries)
        if not entry.usable:
            raise CheckpointError(
                f"{entry.name} cannot be used: {'; '.join(entry.notes)}. "
                f"{_nearest(request, entries)}"
            )
        return entry

    def find(self, request: str, entries: Sequence[CatalogEntry]) -> CatalogEntry:
        """Find a checkpoint, usable or not, by a role such as `latest`, its step or its name.

        Raises:
            CheckpointError: There is none; the message names the nearest ones.
        """
        if request in ROLES:
            usable = (one for one in reversed(entries) if one.usable and one.is_present)
            chosen = next((entry for entry in usable if request in entry.notes), None)
            if chosen is None:
                raise CheckpointError(self._nothing(request))
            return chosen
        match = re.fullmatch(r"branch-(\d+)/checkpoint_step_(\d+)", request)
        place = (int(match[1]), int(match[2])) if match else None
        plain = re.sub(r"[,_]", "", request)
        step = int(plain) if plain.isdecimal() else step_directory.parse_name(request)
        for entry in reversed(entries):  # step N of the present branch wins
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
        progress: Progress | None = None,
        replace: bool = False,
    ) -> step_directory.Checkpoint:
        """Return a checkpoint's local directory; download it if it is absent or broken.

        `replace` downloads it although all sizes are right, because a checksum was wrong. Raises
        CheckpointError if there is no bucket, and as `fetch_step`.
        """
        path = self.local / name
        if not replace and inspect_directory(path).state == WHOLE:
            return step_directory.read_step(path)
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
        return f"{none} has the role {role}. List the checkpoints: {_LIST}"

    def _places(self) -> str:
        return f"{self.local} or {self.remote.url}" if self.remote else str(self.local)


def _entry(name: str, here: Found, there: Found, *, on: branches.Branch) -> CatalogEntry:
    place, manifest = step_directory.parse_place(name), here.manifest or there.manifest
    assert place is not None  # no other names are listed
    names = ("created", "loss", "validation_loss", "validation_set", "tiers", "alias")
    known: dict[str, Any] = {name: getattr(manifest, name) for name in names if manifest}
    entry = CatalogEntry(
        step=place[1],
        name=name,
        size=manifest.total_bytes if manifest else None,
        local=here.state,
        bucket=there.state,
        bucket_bytes=there.objects_bytes,
        branch=place[0],
        local_run_id=here.manifest.run_id if here.manifest else "",
        bucket_run_id=there.manifest.run_id if there.manifest else "",
        **known,
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
    """Describe what is wrong with a checkpoint, here or in the bucket."""
    places = {"local": entry.local, "bucket": entry.bucket}
    broken = [
        f"{place}: {state.removeprefix('broken: ')}"
        for place, state in places.items()
        if state.startswith(("broken", UNREADABLE))
    ]
    if entry.usable:
        return broken
    if entry.bucket.endswith("%"):
        broken.append(f"bucket: {entry.bucket} of it")
    if is_part(entry.local):
        broken.append(f"local: {entry.local}")
    return [f"incomplete: {', '.join(broken)}; ignored by resume"]


def _nearest(request: str, entries: Sequence[CatalogEntry]) -> str:
    """Name up to three usable checkpoints: the closest in number if one is given, else in name."""
    names = [entry.name for entry in entries if entry.usable]
    if not names:
        return "There is no usable checkpoint."
    numbers = re.findall(r"\d+", request)
    if numbers:
        wanted = int(max(numbers, key=len))
        near = sorted(names, key=lambda name: abs(int(name.rpartition("_")[2]) - wanted))[:3]
    else:
        near = difflib.get_close_matches(request, [*names, *ROLES], n=3) or names[-3:]
    return f"Nearest: {', '.join(near)}."
