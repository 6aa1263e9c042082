"""The mirror process during an outage; the client retries a request for about a minute."""

import signal

import pytest
from checkpoints.mirrored_run import Place, drain
from checkpoints.step_samples import make_step
from fakes import Emulator, Fault, Request
from ranks import until

from refocused.checkpoints.mirror.mirror import MirrorStatus

pytestmark = [pytest.mark.slow, pytest.mark.bucket]

ALWAYS = 10_000
DOWN = Fault(status=503, message="down")


def begin(place: Place, emulator: Emulator, fault: Fault = DOWN) -> None:
    emulator.proxy.script(lambda request: True, fault, times=ALWAYS)
    place.mirror(bucket=emulator.url)
    until(lambda: emulator.proxy.requests)


def is_shard(request: Request) -> bool:
    """Whether the request uploads a rank's file, not the manifest that names them."""
    return b"optim_states" in request.body and b'"created"' not in request.body


def test_waiting_steps_and_the_error_are_reported_during_retries(
    place: Place, emulator: Emulator
) -> None:
    begin(place, emulator)
    place.says(lambda status: "HTTP 503 down" in (status.last_error or ""))
    make_step(place.checkpoints, 10)
    place.says(lambda status: status.waiting == (10,))
    seen: list[MirrorStatus | None] = []
    assert not drain(place.mirrors[0], 0.5, seen.append)
    assert seen[-1] is not None and "HTTP 503 down" in str(seen[-1].last_error)


def test_a_past_error_is_no_longer_reported(place: Place, emulator: Emulator) -> None:
    make_step(place.checkpoints, 10)
    emulator.proxy.script(lambda request: request.is_upload, DOWN, times=2)
    place.mirror(bucket=emulator.url)
    place.has_mirrored(10)


def test_an_idle_mirror_exits_during_an_outage(place: Place, emulator: Emulator) -> None:
    begin(place, emulator)
    place.says(lambda status: status.last_error)
    assert drain(place.mirrors[0], 15)


@pytest.mark.parametrize("fault", [DOWN, Fault(delay_s=30.0)], ids=["tries again", "no answer"])
def test_a_signal_ends_the_retries(place: Place, emulator: Emulator, fault: Fault) -> None:
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
