"""A network that is gone for a while: names that are not found, answers that never come."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from fakes import Emulator, Fault

from refocused.bucket import gcs_requests
from refocused.bucket.gcs import GcsBucket
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gcs_requests.ONCE, "timeout", (5.0, 0.2))


class Resolver:
    """Answers no lookup of a name for some times, as without a network."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self._ask = socket.getaddrinfo

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._ask(*arguments, **options)


def test_a_name_that_is_not_found_for_a_while_is_waited_out(
    emulator: Emulator, gcs: GcsBucket, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.put("some/prefix/x", b"1")
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(2))
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == [0.5, 1.0]


def test_a_name_that_stays_unknown_is_told(
    emulator: Emulator, gcs: GcsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(1000))
    with pytest.raises(BucketError, match="given up after 4 attempts") as told:
        list(gcs.list())
    assert "Check the network" in str(told.value)
    assert ": NameResolutionError: Failed to resolve " in str(told.value)
    assert "Max retries" not in str(told.value)  # of a layer below: it did not try again


@pytest.mark.usefixtures("short_timeouts")
def test_an_answer_that_never_comes_is_asked_for_again(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    emulator.put("some/prefix/x", b"1")
    emulator.proxy.script(lambda request: request.is_listing, Fault(delay_s=1.0))
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == [0.5]


@pytest.mark.usefixtures("short_timeouts")
def test_an_upload_whose_answer_never_comes_is_found_to_be_there(
    emulator: Emulator, gcs: GcsBucket, small: Path
) -> None:
    emulator.proxy.script(lambda request: request.is_upload, Fault(delay_s=1.0))
    stored = gcs.upload(small, "x")
    assert gcs.read("x") == small.read_bytes()
    assert stored.size == small.stat().st_size
