"""The lease on a run: of the machines that start it, one trains and writes to its bucket.

The lease is a small object that is replaced only in the generation that was read. It expires by
the store's clock, or once another start has watched it unchanged for as long by a clock of its own
that nobody sets: machines need no common clock, and a lease dated ahead expires, too. It also holds
the head of the run: the branch that was trained last, by whichever machine, and its newest step.
"""

import contextlib
import datetime
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pydantic

from refocused.bucket.bucket import Bucket, extended_crc32c
from refocused.checkpoints.step.checkpoint_directory import Branch
from refocused.system.errors import BucketError, CheckpointError, TrainingError
from refocused.system.processes import ProcessIdentity

logger = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
LEASE_SECONDS = 120.0  # after its last renewal, a lease is free
RENEW_SECONDS = 30.0
WAIT_SECONDS = 60.0  # for a holder that renews its lease
POLL_SECONDS = 2.0
_MAX_BYTES = 64 * 1024
_READS = 3  # with a wrong checksum, before a lease counts as damaged
_ATTEMPTS = 2  # that fail in a row, before a run starts without the lease


def this_machine() -> str:
    """Name this boot of the machine and its table of processes, as this user sees it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"


class Holder(pydantic.BaseModel, frozen=True):
    """The content of the lease."""

    token: str  # of one start of the run, its mirrors included
    host: str
    machine: str
    process: ProcessIdentity
    since: str  # by the holder's clock
    renewals: int = 0  # so that each renewal has other bytes
    released: bool = False
    # The head of the run: the branch trained last, its newest checkpoint, and the token of the
    # start that trained it, which may be an earlier holder.
    branch: Branch | None = None
    step: int = 0
    trained_by: str = ""

    def __str__(self) -> str:
        return f"{self.host} (process {self.process.pid}, since {self.since})"


def read_lease(bucket: Bucket, name: str) -> tuple[Holder | None, str | None]:
    """Return the lease and the generation that is at most as new; raise BucketError if damaged."""
    blob = bucket.info(name)
    if blob is None:
        return None, None
    for _ in range(_READS):  # it may be damaged on the way: ranges come without a checksum
        content, _, checksum = bucket.read(name, start=0, length=_MAX_BYTES).partition(b"\n")
        with contextlib.suppress(ValueError):
            if checksum == _checksum(content):
                return Holder.model_validate_json(content), blob.generation
    text = f"{bucket.url.rstrip('/')}/{name} is no readable lease. If no machine trains this "
    raise BucketError(f"{text}run, delete it.")


def _encoded(holder: Holder) -> bytes:
    content = holder.model_dump_json().encode()
    return b"\n".join([content, _checksum(content)])


def _checksum(content: bytes) -> bytes:
    return b"%08x" % extended_crc32c(0, content)


def present_head(
    recorded: Branch | None, *, known: str, lease: Holder | None, saved: Branch | None
) -> Branch | None:
    """Return the branch to continue: the one recorded on this machine, or a newer one elsewhere.

    Numbers of branches only grow, so another machine has begun a branch of a higher number later.

    Args:
        recorded: The branch that this machine trained last; None: it has trained none.
        known: Token of the last start whose head this machine knows.
        lease: The lease; None: there is none.
        saved: The branch of the highest number that the mirror has a checkpoint of, if any.

    Raises:
        CheckpointError: This machine and another one have both gone back, unknown to each other.
    """
    # The lease of an earlier run of this name, whose checkpoints were removed, does not count.
    run_id = (recorded or saved or Branch()).run_id
    heads = [] if saved is None else [saved]
    if lease is not None and lease.branch is not None and lease.trained_by != known:
        heads.insert(0, lease.branch)
    heads = [head for head in heads if head.run_id == run_id and head != recorded]
    newest = max(heads, key=lambda head: head.number, default=None)
    if recorded is None or newest is None:
        return newest or recorded
    if newest.number > recorded.number:
        text = "Another machine has trained this run since: following its %s in place of this "
        text += "machine's %s."
        logger.warning(text, newest, recorded)
        return newest
    if newest is saved and newest.number < recorded.number:
        return recorded
    raise CheckpointError(
        f"The run has two heads: this machine trained {recorded}, and another one {newest}; "
        "neither continues the other. Nothing was removed. To continue the other one, move this "
        "run's state.json away. To continue this one, start it as another run: --resume CHECKPOINT "
        "--as NAME."
    )


class Lease:
    """The lease as one process of the run sees it; `token` is the same in all of them."""

    def __init__(
        self, bucket: Bucket, prefix: str, *, token: str, training: ProcessIdentity, known: str = ""
    ) -> None:
        """Prepare, without a request; `prefix` is that of the run's checkpoints.

        `known` is the token of the last start whose head this machine knows.
        """
        self._bucket, self._name = bucket, f"{prefix}/{LEASE_FILE}".lstrip("/")
        self.url = f"{bucket.url.rstrip('/')}/{self._name}"
        self.token = token
        self.handed_over = False  # to the mirror, which releases it after the last copy
        self.taken_by: Holder | None = None  # another start, which has it now or is ahead
        self.other: Holder | None = None  # another start's record, as it was read last
        self.known = known
        self._head: Callable[[], tuple[Branch, int]] | None = None  # set once the run trains
        self._known_when_taken = known
        self.released = False  # by another process of this start of the run
        self._was_held = False
        self._held_until = self._due = self._unchanged_since = 0.0  # seconds since boot
        self._closed = threading.Event()
        self._one_at_a_time = threading.Lock()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        host, machine = socket.gethostname(), this_machine()
        self._mine = Holder(token=token, host=host, machine=machine, process=training, since=now)

    @property
    def held(self) -> bool:
        """Whether no other machine can have the lease, as far as this machine's timer shows."""
        return self.taken_by is None and _now_s() < self._held_until

    def renew(self, *, writes: bool = True) -> Holder | None:
        """Take the lease if it is free, or renew it; return another holder, if there is one.

        Without `writes`, only find out whether this start of the run has it.

        Raises:
            BucketError: The bucket cannot be read or written, or another machine was faster.
        """
        with self._one_at_a_time:
            began = _now_s()
            self._due = began + POLL_SECONDS
            current, generation = read_lease(self._bucket, self._name)
            if current is not None and current.token != self.token:
                is_renewed = self.other is not None and self.other != current
                if self.other != current:
                    self.other, self._unchanged_since = current, began
                is_dead = current.machine == this_machine() and not current.process.alive
                is_old = began - self._unchanged_since > LEASE_SECONDS
                is_held = self._was_held or not writes
                if not (is_held or current.released or is_dead or is_old):
                    is_held = self._bucket.age_s(self._name) <= LEASE_SECONDS
                if is_held or self._is_behind(current):
                    # A record that was found may be a dead machine's; one that changes is not.
                    if self._was_held or is_renewed or not is_held:
                        self.taken_by, self.released = current, False
                    return current
                head = {name: getattr(current, name) for name in ("branch", "step", "trained_by")}
                self._mine = self._mine.model_copy(update=head)
                self._known_when_taken = current.trained_by
            elif current is not None:
                is_renewed, self._mine = current.renewals != self._mine.renewals, current
                self.released = current.released
                if current.released or not (writes or is_renewed):
                    return None
            elif not writes:
                return None
            self.taken_by = None
            if writes:
                self._write(generation)
            self._was_held, self._held_until = True, began + LEASE_SECONDS
            self._due = began + RENEW_SECONDS
            return None

    def _is_behind(self, current: Holder) -> bool:
        """Whether the run was started without the lease, and lacks what others have trained."""
        if self._head is None or current.branch is None or current.trained_by == self.known:
            return False
        branch, step = self._head()
        return current.step > step or branch.holder(current.step) != current.branch.number

    def lead(self, head: Callable[[], tuple[Branch, int]]) -> None:
        """From now on, record a branch and its newest step as the head; first of all now.

        If the bucket cannot be written, a later renewal records it.
        """
        if self._head is None:
            self.known, self._head = self._known_when_taken, head
        with contextlib.suppress(BucketError):
            self.renew()

    @property
    def is_due(self) -> bool:
        """Whether it is time for `renew`."""
        return _now_s() >= self._due

    def acquire(self, *, cancelled: Callable[[], bool]) -> None:
        """Take the lease before a run starts, and keep it in the background.

        Waits for a holder that ends or expires. If the bucket cannot be used, the run starts
        without the lease: its mirror writes nothing before it has it.

        Raises:
            TrainingError: Another process holds and renews it, or the store cannot hold a lease.
        """
        failures, first, until = 0, None, time.monotonic() + WAIT_SECONDS
        while not cancelled() and failures < _ATTEMPTS:
            try:
                if (holder := self.renew()) is None:
                    break
            except BucketError as error:
                failures, problem = failures + 1, error
                continue
            failures = 0
            if first is None:
                first = holder
                logger.warning("The run is held by %s. Waiting for it to end or expire.", holder)
            if time.monotonic() >= until and self.taken_by is not None:
                raise self.lost()
            time.sleep(POLL_SECONDS)
        if failures >= _ATTEMPTS:
            text = "Cannot learn whether another machine trains this run: %s The run starts, and "
            text += "writes to the bucket only once it has the lease %s."
            logger.warning(text, problem, self.url)
        elif self.held and self._bucket.endpoint is not None:
            free = self._mine.model_copy(update={"released": True})
            with contextlib.suppress(BucketError):  # as it should be: there is none such
                self._bucket.write(self._name, _encoded(free), overwrite="1")
                raise TrainingError(
                    f"{self.url}: the store ignores the condition on a write (If-Match), so that "
                    "two machines could train this run at once. Use another store as "
                    "checkpoint.mirror."
                )
        threading.Thread(target=self._keep, daemon=True, name="lease").start()

    def lost(self) -> TrainingError:
        """Return the error of a run that another machine trains, or has trained further."""
        other = self.taken_by
        if self._head is not None and other is not None and self._is_behind(other):
            branch, step = self._head()
            return TrainingError(
                f"This run went on from this machine's disk, on {branch} to step {step:,}, while "
                f"its mirror could not be read. {other} has trained {other.branch} to step "
                f"{other.step:,} ({self.url}). Nothing more is written to the bucket from here, "
                "and nothing was removed. Start again to follow the newer one."
            )
        return TrainingError(
            f"This run is trained by {self.taken_by}, which holds {self.url}. Nothing more is "
            "written to the bucket from here. Stop that one, or give this run another name "
            f"(run.name=...). A machine that is gone loses the lease after {LEASE_SECONDS:.0f} s."
        )

    def close(self) -> None:
        """Stop renewing; release the lease unless the mirror does."""
        self._closed.set()
        if not self.handed_over:
            self.release()

    def release(self) -> None:
        """Let the next start have the lease at once; if that fails, it expires."""
        for _ in range(_ATTEMPTS):  # another process of this run may just renew it
            with contextlib.suppress(BucketError), self._one_at_a_time:
                current, generation = read_lease(self._bucket, self._name)
                if current is not None and current.token == self.token and not current.released:
                    self._mine = current.model_copy(update={"released": True})
                    self._write(generation)
                return

    def _keep(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            with contextlib.suppress(BucketError):  # each failed request is logged
                self.renew()
            if self.taken_by is not None:
                return

    def _write(self, generation: str | None) -> None:
        changes: dict[str, object] = {"renewals": self._mine.renewals + 1}
        if self._head is not None:
            changes["branch"], changes["step"] = self._head()
            changes["trained_by"] = self.token
        self._mine = self._mine.model_copy(update=changes)
        self._bucket.write(self._name, _encoded(self._mine), overwrite=generation or False)
        if self._head is not None:
            self.known = self.token


def _now_s() -> float:
    """Return the seconds since boot, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
