from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints.mirrored_run import drain
from checkpoints.step_samples import make_step
from fakes import Emulator, Fault, Request

from refocused.checkpoints.mirror.mirror import CheckpointMirror
from refocused.checkpoints.mirror.mirror_status import MirrorSettings, MirrorStatus
from refocused.system.processes import this_process

pytestmark = [pytest.mark.slow, pytest.mark.bucket]

ALWAYS = 10_000
PATIENCE_SECONDS = 15  # the client tries a request for about a minute


class Outage:
    """A mirror between a run and a store that can be told to fail."""

    def __init__(self, folder: Path, emulator: Emulator) -> None:
        self.checkpoints = folder / "run" / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        self.emulator = emulator
        settings = MirrorSettings(
            run=folder / "run",
            bucket=emulator.url,
            prefix="run/checkpoints",
            training=this_process(),
            scan_seconds=0.05,
            longest_wait_seconds=0.2,
        )
        self.mirror = CheckpointMirror(settings)

    def begins(self, fault: Fault) -> None:
        self.emulator.proxy.script(lambda request: True, fault, times=ALWAYS)
        self.mirror.start()
        self.until(lambda: self.emulator.proxy.requests)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.mirror.status()
            time.sleep(0.02)

    def says(self, condition: Callable[[MirrorStatus], object]) -> None:
        self.until(lambda: (status := self.mirror.status()) is not None and condition(status))

    def terminate(self) -> None:
        status = self.mirror.status()
        assert status is not None
        os.kill(status.process.pid, signal.SIGTERM)
        self.says(lambda status: not status.alive)


@pytest.fixture
def outage(tmp_path: Path, emulator: Emulator) -> Iterator[Outage]:
    outage = Outage(tmp_path, emulator)
    yield outage
    process = outage.mirror.process
    if process is not None and process.alive:
        os.kill(process.pid, signal.SIGKILL)


DOWN = Fault(status=503, message="down")


def test_steps_that_wait_and_the_reason_are_told_while_a_request_is_tried_again(
    outage: Outage,
) -> None:
    outage.begins(DOWN)
    outage.says(lambda status: "HTTP 503 down" in (status.last_error or ""))
    make_step(outage.checkpoints, 10)
    outage.says(lambda status: status.waiting == (10,))
    seen: list[MirrorStatus | None] = []
    assert not drain(outage.mirror, 0.5, seen.append)
    assert seen[-1] is not None and "HTTP 503 down" in str(seen[-1].last_error)


def test_a_fault_that_has_passed_is_told_no_more(outage: Outage) -> None:
    make_step(outage.checkpoints, 10)
    outage.emulator.proxy.script(lambda request: request.is_upload, DOWN, times=2)
    outage.mirror.start()
    outage.says(lambda status: status.mirrored == (10,) and status.last_error is None)


def test_a_mirror_with_nothing_to_send_waits_for_no_store_at_the_end(outage: Outage) -> None:
    outage.begins(DOWN)
    outage.says(lambda status: status.last_error)
    assert drain(outage.mirror, PATIENCE_SECONDS)


@pytest.mark.parametrize("fault", [DOWN, Fault(delay_s=30.0)], ids=["tries again", "no answer"])
def test_a_signal_ends_it_in_the_middle_of_its_attempts(outage: Outage, fault: Fault) -> None:
    make_step(outage.checkpoints, 10)
    outage.begins(fault)
    outage.says(lambda status: status.waiting == (10,))
    outage.terminate()


def test_a_signal_ends_the_attempts_to_send_a_file(outage: Outage) -> None:
    make_step(outage.checkpoints, 10)
    outage.emulator.proxy.script(is_shard, DOWN, times=ALWAYS)
    outage.mirror.start()
    outage.says(lambda status: "HTTP 503 down" in (status.last_error or ""))
    outage.terminate()


def is_shard(request: Request) -> bool:
    """Whether it stores a file of a rank; the manifest, which is stored first, names them all."""
    return b"optim_states" in request.body and b'"created"' not in request.body
