"""The lease on a run: of the machines that start it, one trains and writes to its bucket.

The lease is a small object that is replaced only in the generation that was read. It expires by
the store's clock; machines need no common clock.
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

from refocused.bucket.bucket import Bucket
from refocused.system.errors import BucketError, TrainingError
from refocused.system.processes import ProcessIdentity

logger = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
LEASE_SECONDS = 120.0  # after its last renewal, a lease is free
RENEW_SECONDS = 30.0
WAIT_SECONDS = 60.0  # for a holder that renews its lease
POLL_SECONDS = 2.0
_MAX_BYTES = 4096
_ATTEMPTS = 2  # that fail in a row, before a run starts without the lease


def this_machine() -> str:
    """Name this boot of the machine and its table of processes, as this user sees it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"


class Holder(pydantic.BaseModel):
    """The content of the lease."""

    model_config = pydantic.ConfigDict(frozen=True)

    token: str  # of one start of the run, its mirrors included
    host: str
    machine: str
    process: ProcessIdentity
    since: str  # by the holder's clock
    renewals: int = 0  # so that each renewal has other bytes
    released: bool = False

    def __str__(self) -> str:
        return f"{self.host} (process {self.process.pid}, since {self.since})"


class Lease:
    """The lease as one process of the run sees it; `token` is the same in all of them."""

    def __init__(
        self, bucket: Bucket, prefix: str, *, token: str, training: ProcessIdentity
    ) -> None:
        """Prepare, without a request; `prefix` is that of the run's checkpoints."""
        self._bucket, self._name = bucket, f"{prefix}/{LEASE_FILE}".lstrip("/")
        self.url = f"{bucket.url.rstrip('/')}/{self._name}"
        self.token = token
        self.handed_over = False  # to the mirror, which releases it after the last copy
        self.taken_by: Holder | None = None  # another start, which has it now
        self._was_held = False
        self._held_until = self._due = 0.0  # seconds since boot
        self._closed = threading.Event()
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
        began = _now_s()
        self._due = began + POLL_SECONDS
        there, generation = self._read()
        if there is not None and there.token != self.token:
            is_dead = there.machine == this_machine() and not there.process.alive
            if (
                self._was_held
                or not writes
                or not (there.released or is_dead or self._bucket.age_s(self._name) > LEASE_SECONDS)
            ):
                self.taken_by = there
                return there
        elif there is not None:
            is_renewed, self._mine = there.renewals != self._mine.renewals, there
            if there.released or not (writes or is_renewed):
                return None
        elif not writes:
            return None
        self.taken_by = None
        if writes:
            self._write(generation)
        self._was_held, self._held_until = True, began + LEASE_SECONDS
        self._due = began + RENEW_SECONDS
        return None

    @property
    def is_due(self) -> bool:
        """Whether it is time for `renew`."""
        return _now_s() >= self._due

    def acquire(self, *, cancelled: Callable[[], bool]) -> None:
        """Take the lease before a run starts, and keep it in the background.

        Waits for a holder that ends or expires. If the bucket cannot be used, the run starts
        without the lease: its mirror writes nothing before it has it.

        Raises:
            TrainingError: Another process holds and renews it.
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
            if time.monotonic() >= until and holder != first:
                raise self.lost()
            time.sleep(POLL_SECONDS)
        if failures >= _ATTEMPTS:
            text = "Cannot learn whether another machine trains this run: %s The run starts, and "
            text += "writes to the bucket only once it has the lease %s."
            logger.warning(text, problem, self.url)
        threading.Thread(target=self._keep, daemon=True, name="lease").start()

    def lost(self) -> TrainingError:
        """Return the error of a run that another machine trains."""
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
            with contextlib.suppress(BucketError):
                there, generation = self._read()
                if there is not None and there.token == self.token and not there.released:
                    self._mine = there.model_copy(update={"released": True})
                    self._write(generation)
                return

    def _keep(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            with contextlib.suppress(BucketError):  # each failed request is logged
                if self.renew() is not None:
                    return

    def _read(self) -> tuple[Holder | None, int | None]:
        """Return the record and the generation that is at most as new."""
        blob = self._bucket.info(self._name)
        if blob is None:
            return None, None
        try:
            content = self._bucket.read(self._name, start=0, length=_MAX_BYTES)
            return Holder.model_validate_json(content), blob.generation
        except pydantic.ValidationError:
            text = f"{self.url} is no readable lease. If no machine trains this run, delete it."
            raise BucketError(text) from None

    def _write(self, generation: int | None) -> None:
        self._mine = self._mine.model_copy(update={"renewals": self._mine.renewals + 1})
        content = self._mine.model_dump_json().encode()
        self._bucket.write(self._name, content, overwrite=generation or False)


def _now_s() -> float:
    """Return the seconds since boot, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
