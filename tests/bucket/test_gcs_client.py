import json
import logging
import threading
from pathlib import Path
from typing import Any

import google.auth
import pytest
from fakes import ON_GS, Emulator
from google.auth import _default
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError

from refocused.bucket.bucket import ANONYMOUS
from refocused.bucket.gcs import GcsTransport, find_credentials
from refocused.bucket.open_bucket import Credentials, open_bucket
from refocused.bucket.retry import Retry
from refocused.system.errors import BucketError

really_default = google.auth.default


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's credentials."""

    def none_found(**_: Any) -> None:
        raise DefaultCredentialsError(_default._CLOUD_SDK_MISSING_CREDENTIALS)

    monkeypatch.setattr(google.auth, "default", none_found)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)


def write_key(path: Path, *, token_uri: str) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fields = {"type": "service_account", "private_key": pem.decode(), "token_uri": token_uri}
    fields["client_email"] = "trainer@project.iam.gserviceaccount.com"
    path.write_text(json.dumps(fields))
    return path


@ON_GS
def test_the_libraries_log_no_attempts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, emulator: Emulator
) -> None:
    key = write_key(tmp_path / "key.json", token_uri="https://127.0.0.1:1/token")
    assert find_credentials(key).identity.startswith("trainer@project.iam.gserviceaccount.com")
    policy = Retry(attempts=2, sleep=lambda _: None)
    with pytest.raises(BucketError, match=r": NewConnectionError: Failed to .* Connection refused"):
        list(open_bucket(emulator.url, Credentials(key), retry=policy).list())
    assert {record.name for record in caplog.records} <= {"refocused.bucket.retry"}


@pytest.mark.parametrize("text", [None, "{}", "not json", '{"type": "authorized_user"}'])
def test_a_missing_or_invalid_key_file_is_named(tmp_path: Path, text: str | None) -> None:
    wanted = r"key\.json cannot be read: No such file"
    if text is not None:
        (tmp_path / "key.json").write_text(text)
        wanted = r"key\.json is not the JSON key of a service account"
    with pytest.raises(BucketError, match=wanted):
        find_credentials(tmp_path / "key.json")


def test_requests_are_anonymous_without_credentials_and_to_the_emulator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = GcsTransport("bucket", "", key_file=None, project=None)
    with caplog.at_level(logging.INFO):
        assert [connection.login().identity, connection.login().identity] == [ANONYMOUS] * 2
    assert caplog.text.count("only public buckets can be read") == 1
    theirs = AnonymousCredentials()
    monkeypatch.setattr(google.auth, "default", lambda **_: (theirs, "project"))
    assert find_credentials(None).credentials is theirs
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert find_credentials(None).credentials is not theirs


def test_broken_credentials_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(google.auth, "default", really_default)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(BucketError, match=r"cannot be used: File .*absent\.json was not found"):
        find_credentials(None)


def test_each_thread_has_its_own_client_which_bills_the_project() -> None:
    connection = GcsTransport("bucket", "", key_file=None, project="payer")
    assert connection.bucket.user_project == "payer"
    theirs: list[Any] = []
    thread = threading.Thread(target=lambda: theirs.append(connection.bucket.client))
    thread.start()
    thread.join()
    assert connection.bucket.client is connection.bucket.client
    assert theirs[0] is not connection.bucket.client


@pytest.mark.bucket
def test_the_library_sends_no_requests_of_its_own(emulator: Emulator) -> None:
    assert list(open_bucket(emulator.url).list()) == []
    assert [request.is_listing for request in emulator.proxy.requests] == [True]
