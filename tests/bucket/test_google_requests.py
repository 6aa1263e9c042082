from __future__ import annotations

import pytest
from fakes import GARBLED, Emulator, Fault

from refocused.bucket.gcs import GcsBucket
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket


def test_passing_errors_are_waited_out_with_growing_waits(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    emulator.put("some/prefix/x", b"1")
    emulator.proxy.script(lambda request: request.is_listing, Fault(status=503), times=2)
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 504])
def test_these_statuses_pass(emulator: Emulator, gcs: GcsBucket, status: int) -> None:
    emulator.proxy.script(lambda request: True, Fault(status=status))
    assert list(gcs.list()) == []


@pytest.mark.parametrize("fault", [Fault(lose_reply=True), Fault(reply=GARBLED)])
def test_broken_answers_pass(emulator: Emulator, gcs: GcsBucket, fault: Fault) -> None:
    emulator.proxy.script(lambda request: True, fault)
    assert list(gcs.list()) == []


def test_the_wait_that_the_store_asks_for_is_kept(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    emulator.proxy.script(lambda request: True, Fault(status=429, headers={"Retry-After": "17"}))
    list(gcs.list())
    assert waits == [17.0]


def test_a_refused_port_is_given_up_after_the_attempts(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    list(gcs.list())
    emulator.proxy.script(lambda request: True, Fault(lose_reply=True), times=100)
    with pytest.raises(BucketError, match=r"given up after 4 attempts in a row without progress"):
        list(gcs.list())
    assert waits == [0.5, 1.0, 2.0]
