from collections.abc import Callable

import pytest
from fakes import Fault, Request

from refocused.bucket.bucket import ANONYMOUS
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.doctor.storage import check_mirror, check_source, judge_credentials

MIRROR = "checkpoint.mirror"
WHEN: dict[str, Callable[[Request], bool]] = {
    "list": lambda request: request.is_listing,
    "read": lambda request: request.is_download,
    "write": lambda request: request.is_upload,
    "delete": lambda request: request.method == "DELETE",
}


@pytest.mark.bucket
@pytest.mark.parametrize("missing", [None, *WHEN])
def test_rights_in_a_mirror(emulator, missing):
    if missing is not None:
        emulator.proxy.script(WHEN[missing], Fault(status=403, message="no"), times=10)
    bucket = open_bucket(f"{emulator.url}/runs")
    for removes in (False, True):
        (found,) = check_mirror(bucket, MIRROR, prefix="tiny/checkpoints", removes=removes)
        if missing is None:
            assert found.text.endswith("/runs: write, list, read, replace, delete")
            assert list(bucket.list()) == []
            continue
        assert found.level == ("warn" if missing == "delete" and not removes else "fail")
        assert f"{missing} failed." in found.text and "Grant the" in found.text
        assert ("txt stays there" in found.text) == (missing == "delete")


@pytest.mark.bucket
@pytest.mark.parametrize("answer", [501, "ignored"])
def test_a_store_without_conditional_replacement_holds_no_lease(s3_emulator, monkeypatch, answer):
    def is_conditional(request):
        if answer == "ignored":
            request.headers.pop("If-Match", None)
        return answer == 501 and request.method == "PUT" and "If-Match" in request.headers

    s3_emulator.proxy.script(
        is_conditional, Fault(status=501, message="NotImplemented: no"), times=100
    )
    for name, value in s3_emulator.environment.items():
        monkeypatch.setenv(name, value)
    bucket = open_bucket(f"{s3_emulator.url}/runs")
    (found,) = check_mirror(bucket, MIRROR, prefix="tiny/checkpoints", removes=True)
    assert found.level == "fail" and "replace failed." in found.text
    assert "If-Match" in found.text
    assert list(bucket.list()) == []


@pytest.mark.bucket
@pytest.mark.parametrize("verb", ["list", "read"])
def test_a_source_that_may_not_be_read(emulator, verb):
    emulator.put("tokens/a.npy", b"1")
    bucket = open_bucket(f"{emulator.url}/tokens")
    (found,) = check_source(bucket, "data.source")
    assert found.text.endswith("/tokens: list, read")
    emulator.proxy.script(WHEN[verb], Fault(status=403), times=10)
    (found,) = check_source(bucket, "data.source")
    assert found.level == "fail" and f"{verb} failed" in found.text


def test_a_folder_is_left_as_it_was(tmp_path):
    mirror = tmp_path / "deep" / "mirror"
    for _ in range(2):
        before = list(tmp_path.rglob("*"))
        found = check_mirror(DirectoryBucket(mirror), MIRROR, prefix="run/a", removes=True)
        assert [one.level for one in found] == ["ok"]
        assert list(tmp_path.rglob("*")) == before
        mirror.mkdir(parents=True, exist_ok=True)


def test_a_folder_in_whose_place_a_file_is(tmp_path):
    (tmp_path / "mirror").write_bytes(b"")
    bucket = DirectoryBucket(tmp_path / "mirror")
    (found,) = check_mirror(bucket, MIRROR, prefix="tiny", removes=True)
    assert "write failed" in found.text  # a listing would only say the same


@pytest.mark.parametrize(
    ("identity", "writes", "mode", "level"),
    [
        (None, False, 0o600, "ok"),
        (ANONYMOUS, True, 0o600, "fail"),
        (ANONYMOUS, False, 0o600, "ok"),
        ("trainer@x", True, 0o600, "ok"),
        ("trainer@x", True, 0o644, "warn"),
    ],
)
def test_credentials(tmp_path, identity, writes, mode, level):
    key = tmp_path / "key.json"
    key.touch()
    key.chmod(mode)
    assert judge_credentials(identity, writes=writes, key=key).level == level
