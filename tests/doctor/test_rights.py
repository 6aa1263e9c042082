from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import Emulator, Fault, Request

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.gcs import GcsBucket
from refocused.bucket.gcs_client import ANONYMOUS
from refocused.doctor.storage import (
    judge_credentials,
    judge_rights,
    judge_wandb,
    probe_mirror,
    probe_source,
)

MIRROR = "checkpoint.mirror"
WHEN: dict[str, Callable[[Request], bool]] = {
    "list": lambda request: request.is_listing,
    "read": lambda request: request.is_download,
    "write": lambda request: request.is_upload,
    "delete": lambda request: request.method == "DELETE",
}


@pytest.mark.bucket
@pytest.mark.parametrize("missing", [None, *WHEN])
def test_rights_in_a_mirror(emulator: Emulator, missing: str | None) -> None:
    if missing is not None:
        emulator.proxy.script(WHEN[missing], Fault(status=403, message="no"), times=10)
    bucket = GcsBucket(f"{emulator.url}/runs")
    rights = probe_mirror(bucket, MIRROR, prefix="tiny/checkpoints")
    assert list(rights.refused) == ([] if missing is None else [missing])
    assert (rights.left is not None) == (missing == "delete")
    (unneeded,), (needed,) = (list(judge_rights(rights, wanted=w)) for w in ((), WHEN))
    if missing is None:
        assert set(rights.allowed) == set(WHEN) and list(bucket.list()) == []
        assert unneeded.level == needed.level == "ok"
        return
    assert (unneeded.level, needed.level) == ("warn", "fail")
    assert "Grant the role" in rights.refused[missing]
    assert f"{missing} does not work." in needed.text
    assert (f"{rights.left} stays there" in needed.text) == (missing == "delete")


@pytest.mark.bucket
@pytest.mark.parametrize("verb", ["list", "read"])
def test_a_source_that_may_not_be_read(emulator: Emulator, verb: str) -> None:
    emulator.put("tokens/a.npy", b"1")
    bucket = GcsBucket(f"{emulator.url}/tokens")
    assert probe_source(bucket, "data.source").allowed == ["list", "read"]
    emulator.proxy.script(WHEN[verb], Fault(status=403), times=10)
    assert list(probe_source(bucket, "data.source").refused) == [verb]


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    mirror = tmp_path / "deep" / "mirror"
    rights = probe_mirror(DirectoryBucket(mirror), MIRROR, prefix="run/checkpoints")
    assert rights.refused == {}
    assert list(tmp_path.iterdir()) == []
    mirror.mkdir(parents=True)
    probe_mirror(DirectoryBucket(mirror), MIRROR, prefix="run/checkpoints")
    assert list(tmp_path.rglob("*")) == [mirror.parent, mirror]


def test_a_folder_in_whose_place_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_bytes(b"")
    rights = probe_mirror(DirectoryBucket(tmp_path / "mirror"), MIRROR, prefix="tiny")
    assert list(rights.refused) == ["write"]  # a listing would only say the same


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
def test_credentials(
    tmp_path: Path, identity: str | None, writes: bool, mode: int, level: str
) -> None:
    key = tmp_path / "key.json"
    key.touch()
    key.chmod(mode)
    assert judge_credentials(identity, writes=writes, key=key).level == level


def test_wandb() -> None:
    assert judge_wandb(None).level == "ok"
    finding = judge_wandb("offline, no key")
    assert (finding.level, finding.text) == (
        "warn",
        "offline, no key: everything is written to RUN/wandb",
    )
