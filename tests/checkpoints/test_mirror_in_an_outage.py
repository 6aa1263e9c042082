"""The mirror's process while the store fails; the client tries a request for about a minute."""

from __future__ import annotations

import signal

import pytest
from checkpoints.mirrored_run import Place, drain, until
from checkpoints.step_samples import make_step
from fakes import Emulator, Fault, Request

from refocused.checkpoints.mirror.mirror_status import MirrorStatus

pytestmark = [pytest.mark.slow, pytest.mark.bucket]

ALWAYS = 10_000
DOWN = Fault(status=503, message="down")


def begin(place: Place, emulator: Emulator, fault: Fault = DOWN) -> None:
    emulator.proxy.script(lambda request: True, fault, times=ALWAYS)
    place.mirror(bucket=emulator.url)
    until(lambda: emulator.proxy.requests)


def is_shard(request: Request) -> bool:
    """Whether it stores a file of a rank; the manifest, which is stored first, names them all."""
    return b"optim_states" in request.body and b'"created"' not in request.body


def test_steps_that_wait_and_the_reason_are_told_while_a_request_is_tried_again(
    place: Place, emulator: Emulator
) -> None:
    begin(place, emulator)
    place.says(lambda status: "HTTP 503 down" in (status.last_error or ""))
    make_step(place.checkpoints, 10)
    place.says(lambda status: status.waiting == (10,))
    seen: list[MirrorStatus | None] = []
    assert not drain(place.mirrors[0], 0.5, seen.append)
    assert seen[-1] is not None and "HTTP 503 down" in str(seen[-1].last_error)


def test_a_fault_that_has_passed_is_told_no_more(place: Place, emulator: Emulator) -> None:
    make_step(place.checkpoints, 10)
    emulator.proxy.script(lambda request: request.is_upload, DOWN, times=2)
    place.mirror(bucket=emulator.url)
    place.has_mirrored(10)


def test_a_mirror_with_nothing_to_send_waits_for_no_store_at_the_end(
    place: Place, emulator: Emulator
) -> None:
    begin(place, emulator)
    place.says(lambda status: status.last_error)
    assert drain(place.mirrors[0], 15)


@pytest.mark.parametrize("fault", [DOWN, Fault(delay_s=30.0)], ids=["tries again", "no answer"])
def test_a_signal_ends_it_in_the_middle_of_its_attempts(
    place: Place, emulator: Emulator, fault: Fault
) -> None:
    make_step(place.checkpoints, 10)
    begin(place, emulator, fault)
    place.says(lambda status: status.waiting == (10,))
    place.kill(signal.SIGTERM)


def test_a_signal_ends_the_attempts_to_send_a_file(place: Place, emulator: Emulator) -> None:
    make_step(place.checkpoints, 10)
    emulator.proxy.script(is_shard, DOWN, times=ALWAYS)
    place.mirror(bucket=emulator.url)
    place.says(lambda status: "HTTP 503 down" in (status.last_error or ""))
    place.kill(signal.SIGTERM)
