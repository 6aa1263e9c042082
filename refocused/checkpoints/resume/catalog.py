"""List a run's checkpoints, on the disk and in the bucket together, and find one of them."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.transfer import Progress, map_in_threads
from refocused.checkpoints.mirror.copies import fetch_checkpoint, is_copy_of
from refocused.checkpoints.mirror.lease import present_head, read_lease
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints, inspect_objects
from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    FIRST_BRANCH,
    Branch,
    Checkpoint,
    Part,
    branch_of,
    checkpoint_paths,
    parse_name,
    parse_place,
    read_checkpoint,
    recorded_branch,
)
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.checkpoints.step.retention import best_of
from refocused.checkpoints.step.verify import (
    UNREADABLE,
    WHOLE,
    CheckpointState,
    FileProblem,
    inspect_directory,
    is_whole,
    verify,
)
from refocused.metrics.jsonl import read_json
from refocused.system.errors import CheckpointError, as_typed

ROLES = ("latest", "best", "final")  # each means the checkpoint that has it in its notes
LIST_THREADS = 32  # reads of manifests at once: each is small, so its latency is its cost
_LIST = as_typed("checkpoints list")
_ABSENT = CheckpointState()
_LEFT_BEHIND = "broken: another machine has trained this step anew since"
_OF_MANIFEST = (
    *("created", "loss", "validation_loss", "validation_set", "bits_per_byte", "tiers", "alias"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One checkpoint, on the disk and in the bucket.

    What only its manifest says is None without one.
    """

    step: int  # optimizer step at which it was saved
    name: str  # of its directory, below the folder of checkpoints
    size: int | None  # bytes of its files
    local: str  # `ok` (all files have their sizes), `node N of M: its part` (the same for a part),
    # `broken: ...`, `unreadable: ...` or `-` (absent)
    bucket: str  # `ok` (committed), `NN %` (of its bytes are in it), `broken: ...`, `unreadable:
    # ...` or `-` (absent)
    created: datetime.datetime | None = None  # when it was saved, with a time zone
    loss: float | None = None  # of training, in nats a token
    validation_loss: float | None = None  # in nats a token
    validation_set: str = ""  # fingerprint of what it was measured on
    bits_per_byte: float | None = None  # of that validation
    bucket_bytes: int = 0  # of its objects, complete or not
    tiers: tuple[SaveReason, ...] = ()  # save reasons
    notes: tuple[str, ...] = ()  # `latest`, `best`, `final`, `epoch E`, `unusable: ...`
    branch: int = 1  # number of the branch whose folder holds it
    local_run_id: str = ""  # id of the run that saved the local one
    bucket_run_id: str = ""  # the same of the one in the bucket
    alias: str | None = None  # `checkpoint-epochE-stepN-filesF`
    is_present: bool = True  # on the present branch; only such a checkpoint is `latest` or `best`

    @property
    def usable(self) -> bool:
        """Whether training can resume from it, perhaps after a download."""
        return WHOLE in (self.local, self.bucket)

    @property
    def sound_here(self) -> bool:
        """Whether this disk holds the checkpoint, or this machine's part of it."""
        return is_whole(self.local)


class Catalog:
    """The checkpoints of one run."""

    def __init__(self, local: Path, mirror: Bucket | None = None, prefix: str = "") -> None:
        """Read the folder `local`, which need not exist, and what is below `prefix` of a bucket."""
        self.local = local
        self.remote = RemoteCheckpoints(mirror, prefix) if mirror is not None else None
        self.part: Part | None = None  # what this machine's disk has of each; None: all of it
        self.branch = FIRST_BRANCH  # the present one, once `entries` was called
        self.two_heads: CheckpointError | None = None  # why no branch can be the present one
        # Local ones, of steps that another machine has trained anew since: not to be used.
        self.left_behind: tuple[str, ...] = ()

    def entries(self) -> list[CatalogEntry]:
        """List every checkpoint by ascending step, those of the present branch last.

        The present branch is the newer one of the mirror's lease and `state.json`, or else the one
        with the highest number.

        Raises:
            BucketError: The bucket cannot be listed.
        """
        local, remote, bucket = self.local_states(), self.remote, dict[str, CheckpointState]()
        sizes: dict[str, int] = {}
        if remote is not None:
            listed = remote.scan()
            states = map_in_threads(
                lambda name: inspect_objects(remote, name, listed[name]),
                list(listed),
                threads=LIST_THREADS,
            )
            bucket = dict(zip(listed, states, strict=True))
            sizes = {n: sum(blob.size for blob in blobs.values()) for n, blobs in listed.items()}
        names = sorted({*local, *bucket}, key=lambda name: parse_place(name) or (0, 0))
        pairs = {n: (local.get(n, _ABSENT), bucket.get(n, _ABSENT)) for n in names}
        manifests = {n: pair[0].manifest or pair[1].manifest for n, pair in pairs.items()}
        saved = [pair[1].manifest or pair[0].manifest for pair in pairs.values()]
        newest = next((manifest for manifest in reversed(saved) if manifest is not None), None)
        lease, self.two_heads = None, None
        if remote is not None:
            lease, _ = read_lease(remote.bucket, remote.lease_name)
        recorded = recorded_branch(self.local.parent)
        known = str((read_json(self.local.parent / "state.json") or {}).get("lease"))
        on_newest = None if newest is None else branch_of(newest)
        try:
            head = present_head(recorded, known=known, lease=lease, saved=on_newest)
        except CheckpointError as error:
            head, self.two_heads = recorded, error
        self.branch = head or FIRST_BRANCH
        self.left_behind = ()
        if lease is not None and lease.trained_by != known:
            self.left_behind = _left_behind(pairs, self.branch)
            for name in self.left_behind:
                pairs[name] = (
                    dataclasses.replace(pairs[name][0], state=_LEFT_BEHIND),
                    pairs[name][1],
                )
        usable = {
            step: manifests[name]
            for name, pair in pairs.items()
            if WHOLE in (pair[0].state, pair[1].state)
            and (step := self.branch.step_of(name)) is not None
        }
        marked = {"latest": max(usable, default=None), "best": best_of(usable)}
        entries = []
        for name, (on_disk, in_bucket) in pairs.items():
            manifest, present_step = manifests[name], self.branch.step_of(name)
            number, step = parse_place(name) or (1, 0)
            notes = [note for note, marked_step in marked.items() if present_step == marked_step]
            entry = CatalogEntry(
                step=step,
                name=name,
                size=None if manifest is None else manifest.total_bytes,
                local=on_disk.state,
                bucket=in_bucket.state,
                bucket_bytes=sizes.get(name, 0),
                branch=number,
                local_run_id=on_disk.manifest.run_id if on_disk.manifest else "",
                bucket_run_id=in_bucket.manifest.run_id if in_bucket.manifest else "",
                is_present=present_step is not None,
                **{name: getattr(manifest, name) for name in _OF_MANIFEST if manifest is not None},
            )
            if present_step is None:
                notes = [f"branch {number}, which the run left; ignored by resume"]
            if manifest is not None and entry.usable:
                texts = {tier: tier.value for tier in (SaveReason.FINAL, SaveReason.EMERGENCY)}
                texts[SaveReason.EPOCH] = f"epoch {manifest.epoch}"
                notes += [texts[tier] for tier in manifest.tiers if tier in texts]
            entries.append(dataclasses.replace(entry, notes=(*notes, *_troubles(entry))))
        return sorted(entries, key=lambda entry: entry.is_present)

    def problems(self, name: str) -> list[FileProblem]:
        """Read every byte of a local checkpoint; return what is wrong with it."""
        return verify(read_checkpoint(self.local / name), deep=True)

    def local_states(self) -> Mapping[str, CheckpointState]:
        """Check every local checkpoint by its structure and the sizes of its files."""
        paths = checkpoint_paths(self.local)
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
        where = f"{self.local} or {self.remote.url}" if self.remote else str(self.local)
        if request in ROLES:
            for entry in reversed(entries):
                if entry.usable and entry.is_present and request in entry.notes:
                    return entry
            remedies = {
                "best": f" has a validation loss. Choose latest, or a step: {_LIST}",
                "latest": ". Start without one (--resume none), or name another run or --bucket.",
                "final": f" has the role final. List the checkpoints: {_LIST}",
            }
            raise CheckpointError(f"No usable checkpoint in {where}{remedies[request]}")
        match = re.fullmatch(r"branch-(\d+)/checkpoint_step_(\d+)", request)
        branch_step = (int(match[1]), int(match[2])) if match else None
        plain = re.sub(r"[,_]", "", request)
        step = int(plain) if plain.isdecimal() else parse_name(request)
        for entry in reversed(entries):  # step N of the present branch wins
            is_step = branch_step is None and entry.step == step
            if is_step or (entry.branch, entry.step) == branch_step:
                if request.startswith("checkpoint-epoch") and entry.alias != request:
                    raise CheckpointError(
                        f"{request} does not exist: {entry.name} is {entry.alias or 'unreadable'}."
                    )
                return entry
        raise CheckpointError(
            f"There is no checkpoint {request!r} in {where}. {_nearest(request, entries)}"
        )

    def fetch(
        self,
        name: str,
        *,
        threads: int = 8,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> Checkpoint:
        """Return a checkpoint's local directory; download it if it is absent or broken.

        `replace` downloads it although all sizes are right, because a checksum was wrong. Raises
        CheckpointError if there is no bucket, and as `fetch_checkpoint`.
        """
        path = self.local / name
        if not replace and inspect_directory(path).state == WHOLE:
            return read_checkpoint(path)
        if self.remote is None and self.part is not None:
            raise CheckpointError(
                f"{name} is incomplete on some machine, and the run has no mirror. {CHOOSE_ANOTHER}"
            )
        if self.remote is None:
            raise CheckpointError(
                f"{path} is not a whole checkpoint and no bucket is known that has it. "
                "Name one with --bucket gs://bucket/prefix, or choose another step."
            )
        if self.part is not None and is_copy_of(path, self.remote.marker(name)):
            return read_checkpoint(path)  # others lack theirs
        return fetch_checkpoint(
            self.remote,
            name,
            checkpoints=self.local,
            part=self.part,
            threads=threads,
            progress=progress,
        )


def _left_behind(
    pairs: Mapping[str, tuple[CheckpointState, CheckpointState]], branch: Branch
) -> tuple[str, ...]:
    """Return the checkpoints of a disk that came back after another machine went on without it.

    From the first step that both machines saved, the bucket has the branch.
    """
    steps = {name: step for name in pairs if (step := branch.step_of(name)) is not None}

    def is_other(name: str) -> bool:
        local, remote = (state.manifest for state in pairs[name])
        return local is not None and (remote is None or local.files != remote.files)

    others = [name for name in steps if is_other(name)]
    saved_by_both = [steps[name] for name in others if pairs[name][1].is_whole]
    return tuple(name for name in others if saved_by_both and steps[name] >= min(saved_by_both))


def _troubles(entry: CatalogEntry) -> list[str]:
    """Describe what is wrong with a checkpoint, on the disk or in the bucket."""
    broken = [
        f"{side}: {state.removeprefix('broken: ')}"
        for side, state in (("local", entry.local), ("bucket", entry.bucket))
        if state.startswith(("broken", UNREADABLE))
    ]
    if entry.usable:
        return broken
    if entry.bucket.endswith("%"):
        broken.append(f"bucket: {entry.bucket} of it")
    if entry.sound_here:  # only this machine's part
        broken.append(f"local: {entry.local}")
    return [f"unusable: {', '.join(broken)}; ignored by resume"]


def _nearest(request: str, entries: Sequence[CatalogEntry]) -> str:
    """Name up to three usable checkpoints: the closest in number if one is given, else in name."""
    names = [entry.name for entry in entries if entry.usable]
    if not names:
        return "There is no usable checkpoint."
    numbers = re.findall(r"\d+", request)
    if numbers:
        number = int(max(numbers, key=len))
        near = sorted(names, key=lambda name: abs(int(name.rpartition("_")[2]) - number))[:3]
    else:
        near = difflib.get_close_matches(request, [*names, *ROLES], n=3) or names[-3:]
    return f"Nearest: {', '.join(near)}."
