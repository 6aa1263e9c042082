"""Random histories of one run: save, kill, resume, branch, prune, mirror, outage, other ranks.

The state machine acts on real folders, and on a folder as the bucket. Each save has a number that
is its weights and its loss, so that a resume shows whose history it continues. After each action:

- a checkpoint with its final name, or with its marker in the bucket, is whole
- a resume finds the newest whole checkpoint of the present branch, or exactly what was named
- nothing is removed that is best, always kept, among the newest two, of another save or, where the
  disk has room, not in the mirror
- the mirror has what its status says

REFOCUSED_HISTORIES is the number of histories; the default suits the fast tests.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import tempfile
import threading
import unittest.mock
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX, flip_byte
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import booleans, integers, none, sampled_from
from power_cut import Disk, Killed, killed_at
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.mirror.lease import LEASE_FILE, Lease, read_lease
from refocused.checkpoints.mirror.mirror import MirrorFiles, MirrorSettings
from refocused.checkpoints.mirror.mirror_loop import MirrorLoop
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.resume.resume_selection import decide_together, select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import (
    Branch,
    Checkpoint,
    checkpoint_paths,
    in_use,
    read_checkpoint,
    recorded_branch,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, SaveReason
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.retention import ALWAYS_KEPT, MirroredCheckpoints, prune
from refocused.checkpoints.step.staging import set_aside
from refocused.checkpoints.step.verify import verify
from refocused.data.order.sequences import Position
from refocused.engine.engine import ShardsWritten
from refocused.metrics.jsonl import read_json
from refocused.system.atomic_files import replace_file
from refocused.system.errors import BucketError, CheckpointError
from refocused.system.processes import ProcessIdentity
from refocused.system.world import World
from refocused.train.step.state import TrainState

HISTORIES = int(os.environ.get("REFOCUSED_HISTORIES", "40"))
LONGEST = 25  # actions
DEAD = ProcessIdentity(pid=1, started=-1)  # training has ended, so a mirror finishes its queue
MIRROR = "mirror"

# At which change of a file, counted from 0, the machine is killed, if at all.
KILLS = none() | none() | integers(0, 45)
REASONS = [*[SaveReason.ROLLING] * 4, *SaveReason]


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint that was saved."""

    number: int  # its weights and its loss
    name: str
    branch: int  # number of the one in whose folder it is
    step: int
    reason: SaveReason
    validation_loss: float | None
    history: Mapping[int, int]  # the number of each step's save, up to its own


class Weights(FakeOwner):
    """A rank's part of the state, flushed as the engine does, which any rank can read."""

    def save_shards(self, folder: Path) -> ShardsWritten:
        written = super().save_shards(folder)
        for file in written.files:
            with file.path.open("rb") as open_file:
                os.fsync(open_file.fileno())
        return written

    def load_resharded(self, folder: Path, *, ranks: int) -> None:
        mine, self.rank = self.rank, self.rank % ranks
        super().load_resharded(folder, ranks=ranks)
        self.rank = mine


def is_intact(path: Path) -> bool:
    try:
        return verify(read_checkpoint(path), deep=True) == []
    except CheckpointError:
        return False


class Session:
    """A start of the run that trains."""

    def __init__(self, branch: Branch, step: int, lease: Lease, ranks: int) -> None:
        self.branch, self.lease, self.ranks = branch, lease, ranks
        self.step = self.saved_step = step

    def head(self) -> tuple[Branch, int]:
        return self.branch, self.saved_step


class Histories(RuleBasedStateMachine):
    """A run on two machines, of which one is in use at a time, with a mirror."""

    @initialize()
    def begin(self) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # flushes are slow
        self.root = Path(tempfile.mkdtemp(dir=in_memory))
        self.patches = pytest.MonkeyPatch()
        self.disk = Disk(self.patches)
        self.bucket = FaultyBucket(self.root / "bucket")
        self.here = self.trained_last = "machine_0"  # the machine in use
        self.session: Session | None = None
        self.starts = 0
        self.saves: dict[int, Save] = {}
        self.present: dict[int, int] = {}  # the head's history: the number of each step's save
        self.led = self.present  # the history of the head that the lease names
        self.damaged: set[tuple[str, str]] = set()  # place and name
        self.known: dict[Path, tuple[object, int]] = {}  # what was verified: its files, its number
        self.copies = self.look()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.patches.undo()
            shutil.rmtree(self.root)

    # What there is

    def run_of(self, machine: str) -> Path:
        return self.root / machine / "sample"

    def folder(self, place: str) -> Path:
        """The checkpoints of a machine, or of the mirror."""
        return self.bucket.steps if place == MIRROR else self.run_of(place) / "checkpoints"

    def look(self) -> dict[str, dict[str, int]]:
        """Return the number of each visible checkpoint by place and name; all must be whole.

        One that a rule has damaged keeps its number.
        """
        seen: dict[str, dict[str, int]] = {}
        for place in ("machine_0", "machine_1", MIRROR):
            seen[place] = {}
            for name, path in checkpoint_paths(self.folder(place)).items():
                if (place, name) in self.damaged:
                    seen[place][name] = self.copies[place][name]
                elif place != MIRROR or (path / COMMITTED).exists():
                    seen[place][name] = self.number_of(path)
        return seen

    def number_of(self, path: Path) -> int:
        files = [(file, file.stat()) for file in sorted(path.rglob("*"))]
        signature = [(file, stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in files]
        known, number = self.known.get(path, (None, 0))
        if signature != known:
            checkpoint = read_checkpoint(path)
            assert verify(checkpoint, deep=True) == []
            number = int(checkpoint.manifest.loss or 0)
            self.known[path] = signature, number
        return number

    def has(self, place: str, number: int) -> bool:
        """Whether a place has an undamaged copy of a save."""
        name = self.saves[number].name
        return self.copies[place].get(name) == number and (place, name) not in self.damaged

    def available(self, numbers: Iterable[int]) -> list[int]:
        places = (self.here,) if self.bucket.is_down else (self.here, MIRROR)
        return [number for number in numbers if any(self.has(place, number) for place in places)]

    def settle(self, *, may_go: Collection[tuple[str, str]] = ()) -> None:
        """Look anew; what is not in `may_go` must be there as it was."""
        before, self.copies = self.copies, self.look()
        for place, names in before.items():
            for name, number in names.items():
                now = self.copies[place].get(name)
                assert now == number or (place, name) in may_go, (place, self.saves[number], now)
        self.damaged = {  # unless it has gone, or was downloaded again
            (place, name)
            for place, name in self.damaged
            if name in self.copies[place] and not is_intact(self.folder(place) / name)
        }

    def gone(self, place: str) -> set[str]:
        return {*self.copies[place]} - {*self.look()[place]}

    def on_branch(self, place: str) -> list[Save]:
        """The present branch's saves at a place, by step; some may be damaged."""
        saves = [self.saves[number] for _, number in sorted(self.present.items())]
        return [save for save in saves if self.copies[place].get(save.name) == save.number]

    def kept(self, place: str) -> set[str]:
        """What retention never removes, whatever the settings; a damage may be hidden to it."""
        copies, branch = self.copies[place], self.on_branch(place)
        losses = [(save.validation_loss, save.step, save.name) for save in branch]
        best = min((loss for loss in losses if loss[0] is not None), default=(0, 0, ""))[2]
        always = [name for name, n in copies.items() if self.saves[n].reason in ALWAYS_KEPT]
        names = {best, *always, *(save.name for save in branch[-2:])}
        return {name for name in names if (place, name) not in self.damaged}

    def act(self, action: Callable[[], object], *, dies: int | None, power: bool) -> bool:
        """Act, and return whether the machine was killed at it, with its power if so chosen."""
        try:
            with killed_at(dies):
                action()
            return False
        except BaseException as error:
            causes = [error]
            while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
                causes.append(cause)
            if not any(isinstance(e, Killed | threading.BrokenBarrierError) for e in causes):
                raise
        if power:
            self.disk.cut(self.root / self.here)
        self.session = None
        return True

    # Actions

    @rule(
        request=sampled_from(["auto", "auto", "latest", "none", "one", "one"]),
        ranks=sampled_from([1, 1, 2]),
        down=sampled_from([False, False, True]),
        pick=integers(0, 99),
        dies=KILLS,
        power=booleans(),
    )
    def start(
        self, request: str, ranks: int, down: bool, pick: int, dies: int | None, power: bool
    ) -> None:
        """Stop, and start again: also in an outage, if this disk has the newest checkpoint."""
        self.session = None
        present = [number for _, number in sorted(self.present.items())]
        newest = self.available(present)[-1:]
        self.bucket.is_down = down and self.trained_last == self.here
        self.bucket.is_down = self.bucket.is_down and self.available(present)[-1:] == newest
        expected = newest[-1] if newest else None
        if request == "one" and (choices := self.available(self.saves)):
            expected = choices[pick % len(choices)]
            save = self.saves[expected]
            request = f"branch-{save.branch}/checkpoint_step_{save.step}"
        elif request == "one":
            request = "auto"
        elif request == "none":
            expected = None
        self.starts += 1
        damaged, begun = self.damaged.copy(), list[Session]()
        loaded, errors = list[int | None](), list[Exception]()

        def begin() -> None:
            try:
                self.begin_session(request, ranks, begun, loaded)
            except (CheckpointError, BucketError) as error:
                errors.append(error)

        killed = self.act(begin, dies=dies, power=power)
        self.bucket.is_down = False
        assert loaded in ([], [expected]), (request, self.saves.get(expected or 0))
        if errors and not killed:
            assert expected is None and request != "none", errors
        if begun:
            session, history = begun[0], dict[int, int]()
            if expected is not None:
                history.update(self.saves[expected].history)
            lease, _ = read_lease(self.bucket, f"{PREFIX}/{LEASE_FILE}")
            leads = lease is not None and lease.trained_by == session.lease.token
            if leads or recorded_branch(self.run_of(self.here)) == session.branch:
                self.present, self.trained_last = history, self.here
            if leads:
                self.led = history
            self.session = None if killed else session
        self.settle(may_go=damaged)

    def begin_session(
        self, request: str, ranks: int, begun: list[Session], loaded: list[int | None]
    ) -> None:
        """Do what a start does, in its order; report what it loaded, and then the session."""
        run, folder = self.run_of(self.here), self.folder(self.here)
        run.mkdir(parents=True, exist_ok=True)
        known = str((read_json(run / "state.json") or {}).get("lease"))
        token = f"start {self.starts}"
        lease = Lease(self.bucket, PREFIX, token=token, training=DEAD, known=known)
        with contextlib.suppress(BucketError):
            assert lease.renew() is None  # no other machine trains

        def load(world: World) -> tuple[Branch, Checkpoint | None, int | None]:
            selection = decide_together(
                world,
                lambda: Catalog(folder, self.bucket, PREFIX),
                lambda catalog: select_checkpoint(catalog, request),
            )
            checkpointer = Checkpointer(
                folder, world=world, metadata=FACTS, branch=selection.branch
            )
            owner, checkpoint = Weights(world.rank), selection.checkpoint
            if checkpoint is not None:
                changes = changes_since(checkpoint, metadata=FACTS, world_size=ranks, allowed=())
                checkpointer.load(owner, checkpoint, exact=changes.load_mode == "exact")
            if world.is_rank_0:
                for path in selection.corrupt:
                    set_aside(path)
            checkpointer.prepare()
            return selection.branch, checkpoint, None if checkpoint is None else int(owner.loaded)

        branch, checkpoint, number = self.on_ranks(ranks, load)[0]
        loaded.append(number)
        step = 0 if checkpoint is None else checkpoint.step
        begun.append(session := Session(branch, step, lease, ranks))
        MirrorFiles(run).status.unlink(missing_ok=True)
        self.lead(session)

    def lead(self, session: Session) -> None:
        """Name the head in the lease, if the bucket can be used, and in `state.json`."""
        session.lease.lead(session.head)
        state = {**session.branch.as_record(), "lease": session.lease.known}
        file = self.run_of(self.here) / "state.json"
        replace_file(file, json.dumps(state).encode(), durable=True)

    def on_ranks(self, ranks: int, action: Callable[[World], Any]) -> list[Any]:
        return [action(World())] if ranks == 1 else results(on_two_ranks(action))

    @rule(
        number=integers(1, 4),
        reason=sampled_from(REASONS),
        loss=none() | sampled_from([1.0, 2.0, 3.0]),
        in_background=booleans(),
        dies=KILLS,
        power=booleans(),
    )
    def save(
        self,
        number: int,
        reason: SaveReason,
        loss: float | None,
        in_background: bool,
        dies: int | None,
        power: bool,
    ) -> None:
        """Save some steps: the first with a reason and a validation; the last may be killed."""
        for index in range(number):
            first, last = index == 0, index == number - 1
            self.save_one(
                reason if first else SaveReason.ROLLING,
                loss if first else None,
                in_background,
                dies if last else None,
                power,
            )

    def save_one(
        self,
        reason: SaveReason,
        loss: float | None,
        in_background: bool,
        dies: int | None,
        power: bool,
    ) -> None:
        session, number = self.training(), len(self.saves) + 1
        session.step = step = session.step + 10
        name, branch = session.branch.name_of(step), session.branch.holder(step)
        history = self.present | {step: number}
        self.saves[number] = Save(number, name, branch, step, reason, loss, history)
        state = TrainState(
            step=step,
            tokens=step,
            position=Position(0, step),
            loss=float(number),
            validation_loss=loss,
            validation_step=None if loss is None else step,
        )

        def write(world: World) -> None:
            checkpointer = Checkpointer(
                self.folder(self.here), world=world, metadata=FACTS, branch=session.branch
            )
            owner = Weights(world.rank, content=str(number).encode())
            try:
                checkpointer.save(
                    owner,
                    state.as_record(),
                    files_done=0,
                    reasons=(reason,),
                    in_background=in_background,
                )
                checkpointer.finish(wait=True)
            finally:
                checkpointer._writer.shutdown()

        killed = self.act(lambda: self.on_ranks(session.ranks, write), dies=dies, power=power)
        self.settle()
        is_saved = self.copies[self.here].get(name) == number
        assert is_saved or killed
        if is_saved:
            self.present[step], session.saved_step = number, step

    def training(self) -> Session:
        """Return the session; start one as a supervisor does, or anew if all is damaged."""
        for request in ("auto", "none"):
            if self.session is None:
                self.start(request, ranks=1, down=False, pick=0, dies=None, power=False)
        assert self.session is not None
        return self.session

    @rule(
        keep=integers(1, 3),
        disk_low=booleans(),
        read=none() | integers(0, 99),
        dies=KILLS,
        power=booleans(),
    )
    def prune(
        self, keep: int, disk_low: bool, read: int | None, dies: int | None, power: bool
    ) -> None:
        """Remove what retention does not keep, while a checkpoint may be read."""
        session, place, names = self.training(), self.here, sorted(self.copies[self.here])
        copies = MirrorFiles(self.run_of(place)).read_status() or MirroredCheckpoints()

        def remove(world: World) -> None:
            prune(
                self.folder(place),
                world,
                branch=session.branch,
                keep=keep,
                copies=copies,
                disk_low=disk_low,
            )

        kept = self.kept(place)
        with contextlib.ExitStack() as reading:
            if read is not None and names:
                with contextlib.suppress(FileNotFoundError):  # a damage took its manifest
                    kept.add(name := names[read % len(names)])
                    reading.enter_context(in_use(self.folder(place) / name))
            killed = self.act(lambda: self.on_ranks(session.ranks, remove), dies=dies, power=power)
        gone = self.gone(place)
        assert not gone & kept
        branch = {save.step: save for save in self.on_branch(place)}
        newest = max((step for step, n in self.present.items() if self.has(MIRROR, n)), default=-1)
        replaced = {*copies.skipped, *(step for step in branch if step < newest)}
        not_mirrored = {*copies.unwanted, *(replaced if disk_low else ())}
        for name in gone:
            save = self.saves[self.copies[place][name]]
            is_mirrored = self.copies[MIRROR].get(name) == save.number
            may_go = branch.get(save.step) == save and save.step in not_mirrored
            assert is_mirrored or may_go or (place, name) in self.damaged, save
        if not (killed or self.damaged or read is not None):  # and all that may go has gone
            rolling = [s.name for s in branch.values() if s.reason is SaveReason.ROLLING]
            emergencies = [s.name for s in branch.values() if s.reason is SaveReason.EMERGENCY]
            kept |= {*rolling[-keep:], *emergencies[-1:]}
            left = {step for step, save in branch.items() if save.name not in gone | kept}
            assert not left & {*copies.mirrored, *not_mirrored.difference(replaced)}
        self.settle(may_go={(place, name) for name in gone})

    @rule(
        keep_remote=sampled_from([None, 1, 1, 2]),
        failing=sampled_from([0, 0, 1, 3, 10]),
        dies=KILLS,
    )
    def mirror(self, keep_remote: int | None, failing: int, dies: int | None) -> None:
        """Let a mirror finish its queue; some of its requests fail."""
        session = self.training()
        if self.led is not self.present:  # the session began in an outage
            self.lead(session)
            assert session.lease.held
            self.led = self.present
        run = self.run_of(self.here)
        chosen = MirrorSettings(
            run=run,
            bucket=str(self.root / "bucket"),
            prefix=PREFIX,
            branch=session.branch,
            training=DEAD,
            scan_seconds=0.001,
            longest_wait_seconds=0.001,
            threads=1,
            keep_remote=keep_remote,
        )
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
        loop = "refocused.checkpoints.mirror.mirror_loop.open_bucket"
        self.bucket.failing = failing
        try:
            with unittest.mock.patch(loop, return_value=self.bucket):
                killed = self.act(lambda: MirrorLoop(chosen).run(), dies=dies, power=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in zip((signal.SIGTERM, signal.SIGALRM), before, strict=True):
                signal.signal(number, handler)
            self.bucket.failing = 0
            MirrorFiles(run).lock.unlink(missing_ok=True)  # held until its process ends
        gone = self.gone(MIRROR)
        self.copies[MIRROR] |= self.look()[MIRROR]
        assert not gone & self.kept(MIRROR)
        present = {self.saves[number].name for number in self.present.values()}
        assert gone <= present and (keep_remote is not None or not gone)
        self.settle(may_go={(MIRROR, name) for name in gone})
        status = MirrorFiles(run).read_status()
        assert killed or status is not None
        if killed or status is None:
            return
        local = {self.saves[n].step: n for n in self.present.values() if self.has(self.here, n)}
        others = {*status.skipped, *status.unwanted, *status.failed}
        assert {*local} <= {*status.mirrored, *others}
        for step in {*status.mirrored} & {*local}:
            name = self.saves[local[step]].name
            assert self.copies[MIRROR].get(name) == local[step], status
        for name in status.of_other_branches:
            assert self.copies[MIRROR].get(name) == self.copies[self.here][name]

    @precondition(lambda self: any(self.copies.values()) and len(self.damaged) < 2)
    @rule(place=sampled_from(["here", "here", MIRROR]), age=integers(0, 2), file=integers(0, 99))
    def damage(self, place: str, age: int, file: int) -> None:
        """Flip a bit of a file of a checkpoint, and resume."""
        place = self.here if place == "here" else place
        newest_first = sorted(
            (number, name)
            for name, number in self.copies[place].items()
            if (place, name) not in self.damaged  # two flips of a bit are none
        )[::-1]
        if not newest_first:
            return
        _, name = newest_first[min(age, len(newest_first) - 1)]
        files = [path for path in sorted((self.folder(place) / name).rglob("*")) if path.is_file()]
        flip_byte(path := files[file % len(files)])
        with path.open("rb") as flipped:
            os.fsync(flipped.fileno())
        self.damaged.add((place, name))
        self.start("auto", ranks=1, down=False, pick=0, dies=None, power=False)

    @rule(lost=booleans(), request=sampled_from(["auto", "one"]), pick=integers(0, 99))
    def move(self, lost: bool, request: str, pick: int) -> None:
        """Go on with the other machine: this one's disk is lost, or the mirror has all of it."""
        self.session = None
        numbers = {n for n in self.present.values() if self.has(self.here, n)}
        mirrored = {number for number in numbers if self.has(MIRROR, number)}
        if lost:
            shutil.rmtree(self.run_of(self.here), ignore_errors=True)
            self.copies[self.here] = {}
            self.damaged = {key for key in self.damaged if key[0] != self.here}
            self.present = self.led
        elif not (self.led is self.present and numbers and numbers <= mirrored):
            return
        self.here = "machine_1" if self.here == "machine_0" else "machine_0"
        self.start(request, ranks=1, down=False, pick=pick, dies=None, power=False)


PROFILE = settings(
    max_examples=HISTORIES,
    stateful_step_count=LONGEST,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_histories() -> None:
    run_state_machine_as_test(Histories, settings=PROFILE)


@pytest.mark.slow
def test_many_histories() -> None:
    many = settings(PROFILE, max_examples=20 * HISTORIES, derandomize=False)
    run_state_machine_as_test(Histories, settings=many)
