"""Failing requests to Google Cloud Storage: transient faults are retried, others explained."""

import socket
from pathlib import Path
from typing import Any

import pytest
import requests
from fakes import GARBLED, ON_GS, Emulator, Fault, Request
from google.auth.credentials import AnonymousCredentials

from refocused.bucket import gcs as gcs_transport
from refocused.bucket.bucket import ANONYMOUS
from refocused.bucket.open_bucket import Credentials, open_bucket
from refocused.bucket.retry import (
    Attempts,
    RefusedRequestError,
    Retry,
    fault_of_response,
    parsed_retry_after,
)
from refocused.bucket.retry import Fault as StoreFault
from refocused.bucket.store import Login, Store
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket


class Token(AnonymousCredentials):
    """Credentials of a fixed token, which cannot be refreshed here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.token = text

    def before_request(self, request: Any, method: Any, url: Any, headers: Any) -> None:
        headers["Authorization"] = f"Bearer {self.token}"

    def refresh(self, request: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        *((Fault(status=status), [0.5, 1.0]) for status in (408, 429, 500, 502, 503, 504)),
        (Fault(lose_reply=True), [0.5, 1.0]),
        (Fault(reply=GARBLED), [0.5, 1.0]),
        (Fault(status=429, headers={"Retry-After": "17"}), [17.0, 17.0]),
    ],
)
def test_transient_faults_are_retried(
    emulator: Emulator, gcs: Store, waits: list[float], fault: Fault, waited: list[float]
) -> None:
    emulator.put("some/prefix/x", b"1")
    emulator.proxy.script(lambda request: request.is_listing, fault, times=2)
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == waited


@ON_GS
def test_a_missing_permission_is_named_with_its_role_and_not_retried(
    emulator: Emulator, gcs: Store, waits: list[float]
) -> None:
    message = "me@x.com does not have storage.objects.list access to the bucket."
    emulator.proxy.script(lambda request: True, Fault(status=403, message=message))
    missing = r"permission storage.objects.list is missing.*roles/storage.objectViewer.*"
    with pytest.raises(BucketError, match=f"{missing}add-iam-policy-binding {emulator.url} "):
        list(gcs.list())
    assert waits == []
    # If the store does not name the permission, the message names what the request needs.
    emulator.proxy.script(lambda request: True, Fault(status=403, message="no"))
    with pytest.raises(BucketError, match=r"storage\.objects\.create is missing.*objectUser"):
        gcs.write("new", b"1")


@ON_GS
@pytest.mark.parametrize("project", [None, "payer"])
def test_a_right_in_the_project_is_granted_there(emulator: Emulator, project: str | None) -> None:
    bucket = open_bucket(emulator.url, Credentials(project=project))
    message = "me@x.com does not have serviceusage.services.use access to the Google Cloud project."
    emulator.proxy.script(lambda request: True, Fault(status=403, message=message))
    command = f"gcloud projects add-iam-policy-binding {project or 'PROJECT'} --member=WHO --role="
    with pytest.raises(BucketError, match=f"{command}roles/serviceusage.serviceUsageConsumer"):
        bucket.info("x")


@ON_GS
def test_a_bucket_whose_requester_pays_names_the_option(emulator: Emulator) -> None:
    message = "Bucket is a requester pays bucket but no user project provided."
    emulator.proxy.script(lambda request: True, Fault(status=400, message=message))
    with pytest.raises(BucketError, match=r"pays for the requests: --gcp-project PROJECT"):
        open_bucket(emulator.url).info("x")


@ON_GS
@pytest.mark.parametrize("kind", ["described", "bytes"])
def test_a_response_about_another_object_is_requested_again(
    emulator: Emulator, gcs: Store, waits: list[float], kind: str
) -> None:
    emulator.put("some/prefix/x", b"1")
    reply = b'{"name": "some/prefix/y", "size": "7", "generation": "5", "crc32c": "AAAAAA=="}'
    fault = Fault(reply=reply)
    if kind == "bytes":
        fault = Fault(reply=b"2", headers={"X-Goog-Generation": "5"})
    is_faulty = lambda request: request.is_download == (kind == "bytes")  # noqa: E731
    emulator.proxy.script(is_faulty, fault, times=2)
    assert gcs.read("x") == b"1"
    assert waits == [0.5, 1.0]
    emulator.proxy.script(lambda request: request.is_upload, Fault(reply=reply))
    assert gcs.write("z", b"3") == gcs.info("z")


@ON_GS
def test_renewed_credentials_are_read(
    emulator: Emulator, gcs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.put("some/prefix/x", b"1")

    def log_in(token: str) -> None:
        found = Login(Token(token), "me")
        monkeypatch.setattr("refocused.bucket.gcs.find_credentials", lambda _: found)

    def is_old(request: Request) -> bool:
        return "old" in request.headers.get("Authorization", "")

    log_in("old")
    assert gcs.read("x") == b"1"
    emulator.proxy.script(is_old, Fault(status=401), times=100)
    with pytest.raises(BucketError, match=r"of me were not accepted"):
        gcs.read("x")
    log_in("new")
    assert gcs.read("x") == b"1"
    emulator.proxy.script(
        lambda request: "new" in request.headers.get("Authorization", ""),
        Fault(status=401),
        times=100,
    )
    log_in("third")  # before a request is refused
    assert gcs.read("x") == b"1"
    none = Login(AnonymousCredentials(), ANONYMOUS)
    monkeypatch.setattr("refocused.bucket.gcs.find_credentials", lambda _: none)
    gcs.transport.forget()
    assert gcs.identity == "me"  # the metadata server may be away


@pytest.mark.parametrize(("status", "loads"), [(401, 2), (403, 1)])
def test_credentials_are_loaded_anew_once_and_not_for_a_missing_permission(
    emulator: Emulator, gcs: Store, monkeypatch: pytest.MonkeyPatch, status: int, loads: int
) -> None:
    loaded: list[int] = []
    load = gcs.transport.load

    def count() -> Login:
        loaded.append(1)
        return load()

    monkeypatch.setattr(gcs.transport, "load", count)
    emulator.proxy.script(lambda request: True, Fault(status=status), times=10)
    for expected in (loads, 2 * loads - 1):
        with pytest.raises(RefusedRequestError):
            gcs.write("x", b"1")
        assert len(loaded) == expected


def test_credentials_may_expire_again_during_a_long_download(
    emulator: Emulator, gcs: Store, large: Path, tmp_path: Path
) -> None:
    blob = gcs.upload(large, "x")
    for fault in (Fault(status=401), Fault(cut_after=2**20), Fault(status=401)):
        emulator.proxy.script(lambda request: request.is_download, fault)
    gcs.download(blob, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == large.read_bytes()


@ON_GS
def test_refused_credentials_are_reported_at_once(
    emulator: Emulator, gcs: Store, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.proxy.script(lambda request: True, Fault(status=401), times=10)
    with pytest.raises(BucketError, match=r"were not accepted.*Log in again"):
        list(gcs.list())
    assert waits == []
    none = Login(AnonymousCredentials(), ANONYMOUS)
    monkeypatch.setattr("refocused.bucket.gcs.find_credentials", lambda _: none)
    with pytest.raises(BucketError, match=r"No Google credentials were found.*gcloud auth"):
        list(open_bucket(emulator.url).list())


@ON_GS
def test_a_missing_bucket_is_reported(emulator: Emulator, gcs: Store) -> None:
    with pytest.raises(BucketError, match=r"gs://no-such-bucket/.*HTTP 404.*no such bucket"):
        list(open_bucket("gs://no-such-bucket").list())
    fault = Fault(status=404, message="The specified bucket does not exist.")
    emulator.proxy.script(lambda request: True, fault)
    with pytest.raises(BucketError, match="bucket does not exist"):  # not a missing object
        gcs.info("x")


def test_a_failed_token_refresh_is_transient_but_a_revoked_key_is_not() -> None:
    from google.auth.exceptions import RefreshError, TransportError

    transport = gcs_transport.GcsTransport("bucket", "", key_file=None, project=None)
    assert transport.fault_of(RefreshError("the metadata server is busy")).transient
    assert transport.fault_of(TransportError("no route")).transient
    revoked = transport.fault_of(RefreshError("invalid_grant: Invalid JWT Signature."))
    assert (revoked.transient, revoked.status) == (False, 401)


@ON_GS
def test_a_stores_message_is_printed_without_control_characters(
    emulator: Emulator, gcs: Store
) -> None:
    message = "no\x1b]0;title\x07 \x9b2J way\nCONFIRMED" + "!" * 10_000
    emulator.proxy.script(lambda request: True, Fault(status=400, message=message))
    with pytest.raises(BucketError) as raised:
        list(gcs.list())
    assert r"HTTP 400 no\x1b]0;title\x07 \x9b2J way CONFIRMED!!!" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gcs_transport.ONCE, "timeout", (5.0, 0.2))
    monkeypatch.setattr(gcs_transport, "TIMEOUT_S", (5.0, 0.2))
    monkeypatch.setattr("refocused.bucket.s3.TIMEOUT_S", (5.0, 0.2))


class Resolver:
    """Fails some lookups of names, as without a network."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self._resolve = socket.getaddrinfo

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._resolve(*arguments, **options)


def test_failed_name_lookups_are_retried(
    emulator: Emulator, gcs: Store, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.put("some/prefix/x", b"1")
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(2))
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == [0.5, 1.0]


def test_an_unknown_name_is_reported_after_the_attempts(
    emulator: Emulator, gcs: Store, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(1000))
    text = r": NameResolutionError: Failed to resolve .*gave up after 4 attempts.*Check the network"
    with pytest.raises(BucketError, match=text) as raised:
        list(gcs.list())
    assert "Max retries" not in str(raised.value)  # urllib3's words
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.usefixtures("short_timeouts")
def test_a_request_without_a_response_is_retried(
    emulator: Emulator, gcs: Store, waits: list[float]
) -> None:
    emulator.put("some/prefix/x", b"1")
    emulator.proxy.script(lambda request: request.is_listing, Fault(delay_s=1.0))
    assert [blob.name for blob in gcs.list()] == ["x"]
    assert waits == [0.5]


@pytest.mark.usefixtures("short_timeouts")
def test_an_upload_without_a_response_is_found_to_be_stored(
    emulator: Emulator, gcs: Store, small: Path
) -> None:
    emulator.proxy.script(lambda request: request.is_upload, Fault(delay_s=1.0))
    stored = gcs.upload(small, "x")
    assert gcs.read("x") == small.read_bytes()
    assert stored.size == small.stat().st_size


def test_waits_double_with_full_jitter() -> None:
    policy = Retry(initial_s=0.5, max_wait_s=30.0, draw=lambda: 1.0)
    waits = [policy.wait_s(failures) for failures in range(1, 9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert policy.wait_s(5000) == 30.0  # in an outage of days
    assert policy.wait_s(3, retry_after_s=1.0) == 2.0
    assert 0.0 <= Retry().wait_s(3) < 2.0


def test_a_wait_shorter_than_the_store_requests_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Retry(sleep=lambda _: None, max_wait_s=30.0)
    attempts = Attempts(policy, operation="request for gs://b/x")
    attempts.wait_after(StoreFault("HTTP 503", transient=True, retry_after_s=86400.0))
    assert "request for gs://b/x: HTTP 503; retrying in 30.0 s" in caplog.text
    assert "the store requests 86,400 s" in caplog.text
    caplog.clear()
    for kept in (30.0, 29.0, 0.0):  # those are not: the wait is as long, or longer by jitter
        long = Retry(sleep=lambda _: None, initial_s=30.0, max_wait_s=30.0, draw=lambda: 1.0)
        fault = StoreFault("HTTP 503", transient=True, retry_after_s=kept)
        Attempts(long, operation="request").wait_after(fault)
    assert len(caplog.records) == 3 and "the store requests" not in caplog.text


def test_progress_starts_the_count_of_failures_anew(waits: list[float]) -> None:
    policy = Retry(attempts=3, draw=lambda: 1.0, sleep=waits.append)
    attempts, fault = Attempts(policy, operation="request"), StoreFault("cut", transient=True)
    for _ in range(3):
        attempts.progressed()
        attempts.wait_after(fault)
        attempts.wait_after(fault)
    assert waits == [0.5, 1.0] * 3
    with pytest.raises(BucketError, match=r"gave up after 3 attempts"):
        attempts.wait_after(fault)


def test_a_response_without_a_message_is_described_by_its_reason_or_text() -> None:
    def reason(status: int, reason: str | None, content: bytes) -> str:
        response = requests.Response()
        response.status_code, response.reason, response._content = status, reason, content
        return fault_of_response(response).reason

    assert reason(502, "Bad Gateway", b"<html>") == "HTTP 502 Bad Gateway"
    assert reason(502, None, b"upstream") == "HTTP 502 upstream"
    assert reason(502, "Bad Gateway", b'{"error": {"message": "busy"}}') == "HTTP 502 busy"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("\u00b2", None),
        ("9" * 5000, None),
        ("Thu, 01 Jan 9999999999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, header: str | None, expected: float | None
) -> None:
    monkeypatch.setattr("time.time", lambda: 60.0)
    assert parsed_retry_after(header) == expected
