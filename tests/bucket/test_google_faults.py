from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Emulator, Fault
from google.auth.credentials import AnonymousCredentials

from refocused.bucket.gcs import GcsBucket
from refocused.bucket.gcs_client import ANONYMOUS, Credentials
from refocused.bucket.gcs_errors import fault_of
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket


def test_a_missing_permission_is_named_with_its_role_and_not_tried_again(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    message = "me@x.com does not have storage.objects.list access to the bucket."
    emulator.proxy.script(lambda request: True, Fault(status=403, message=message))
    with pytest.raises(BucketError) as raised:
        list(gcs.list())
    assert "The permission storage.objects.list is missing" in str(raised.value)
    assert "roles/storage.objectViewer" in str(raised.value)
    assert f"add-iam-policy-binding {emulator.url} " in str(raised.value)
    assert waits == []


def test_a_403_without_a_permission_names_the_one_the_request_needs(
    emulator: Emulator, gcs: GcsBucket, tmp_path: Path
) -> None:
    emulator.proxy.script(lambda request: request.is_upload, Fault(status=403, message="no"))
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(BucketError, match=r"storage\.objects\.create is missing.*objectUser"):
        gcs.upload(tmp_path / "x", "x")


def test_a_failed_download_for_want_of_permission_leaves_no_final_file(
    emulator: Emulator, gcs: GcsBucket, tmp_path: Path
) -> None:
    emulator.put("some/prefix/x", b"1")
    (blob,) = gcs.list()
    emulator.proxy.script(lambda request: request.is_download, Fault(status=403))
    with pytest.raises(BucketError, match=r"storage\.objects\.get is missing"):
        gcs.download(blob, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_refused_credentials_are_told_at_once(
    emulator: Emulator, gcs: GcsBucket, waits: list[float]
) -> None:
    emulator.proxy.script(lambda request: True, Fault(status=401), times=10)
    with pytest.raises(BucketError, match=r"were not accepted.*Log in again"):
        list(gcs.list())
    assert waits == []


def test_a_private_bucket_without_credentials_says_how_to_log_in(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Credentials(AnonymousCredentials(), ANONYMOUS)
    monkeypatch.setattr("refocused.bucket.gcs_client.find_credentials", lambda _: none)
    emulator.proxy.script(lambda request: True, Fault(status=401), times=10)
    with pytest.raises(BucketError, match=r"No Google credentials were found.*gcloud auth"):
        list(GcsBucket(emulator.url).list())


def test_a_missing_bucket_is_told(emulator: Emulator) -> None:
    with pytest.raises(BucketError, match=r"gs://no-such-bucket/.*HTTP 404.*no such bucket"):
        list(GcsBucket("gs://no-such-bucket").list())


def test_no_info_from_a_missing_bucket_is_an_error_not_an_absence(
    emulator: Emulator, gcs: GcsBucket
) -> None:
    fault = Fault(status=404, message="The specified bucket does not exist.")
    emulator.proxy.script(lambda request: True, fault)
    with pytest.raises(BucketError, match="bucket does not exist"):
        gcs.info("x")


def test_a_token_that_cannot_be_had_may_pass_but_a_revoked_key_does_not() -> None:
    from google.auth.exceptions import RefreshError, TransportError

    assert fault_of(RefreshError("the metadata server is busy")).transient
    assert fault_of(TransportError("no route")).transient
    revoked = fault_of(RefreshError("invalid_grant: Invalid JWT Signature."))
    assert (revoked.transient, revoked.status) == (False, 401)
