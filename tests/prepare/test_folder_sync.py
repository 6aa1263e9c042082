import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import npy_bytes, prepare, settings
from fakes import ON_EACH, ON_S3, Fault, Request

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.partial_files import part_path
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.doctor.storage import check_source
from refocused.prepare.sync import SyncResult, sync_folder, upload_folder
from refocused.system.errors import BucketError, ShardError

REPOSITORY = Path(__file__).parents[2]
KILLS = int(os.environ.get("REFOCUSED_KILLS", "10"))


def fill(bucket: Bucket, *, number: int = 5, size: int = 1000) -> dict[str, bytes]:
    """Store shards with their manifest; return what is there."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 60_000, size).astype(np.uint16) for _ in range(number)]
    files = {f"{'nested/' * (n % 2)}t_{n:03d}.npy": array for n, array in enumerate(ids)}
    prepare(bucket, files, vocabulary=60_000)
    there = {name: npy_bytes(array) for name, array in files.items()}
    return there | {"manifest.json": bucket.read("manifest.json")}


def sync(bucket: Bucket, folder: Path, **selection: Any) -> SyncResult:
    shown: list[tuple[int, int]] = []
    result = sync_folder(
        bucket,
        folder,
        **selection,
        threads=3,
        show=lambda done, total, _note: shown.append((done, total)),
    )
    assert shown[-1][0] == shown[-1][1]
    return result


def upload(folder: Path, bucket: Bucket) -> SyncResult:
    return upload_folder(folder, bucket, threads=3, show=lambda _done, _total, _note: None)


def content_of(folder: Path) -> dict[str, bytes]:
    bucket = DirectoryBucket(folder)
    return {blob.name: bucket.read(blob.name) for blob in bucket.list()}


@pytest.fixture
def source(tmp_path):
    return DirectoryBucket(tmp_path / "source")


def test_a_folder_becomes_equal_and_a_second_start_moves_nothing(source, tmp_path):
    there = fill(source)
    first = sync(source, tmp_path / "to")
    assert content_of(tmp_path / "to") == there
    assert (first.objects, first.moved_objects) == (5, 5)
    second = sync(source, tmp_path / "to")
    assert (second.objects, second.moved_objects, second.moved_bytes) == (5, 0, 0)


@pytest.mark.parametrize("times_kept", [True, False])
@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_damaged_files_are_fetched_again(source, tmp_path, damage, times_kept):
    there = fill(source)
    sync(source, tmp_path / "to")
    path = tmp_path / "to" / "t_002.npy"
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + (b"" if damage == "short" else b"\xee"))
    if not times_kept:
        (tmp_path / "to" / ".sync" / "index.json").unlink()
    assert sync(source, tmp_path / "to").moved_objects == 1
    assert content_of(tmp_path / "to") == there


def test_some_files_get_a_manifest_of_their_own(source, tmp_path):
    fill(source)
    source.write("recipe.json", b"{}")
    sync(source, tmp_path / "to", max_files=2)
    assert set(content_of(tmp_path / "to")) == {
        "manifest.json",
        "nested/t_001.npy",
        "nested/t_003.npy",
        "recipe.json",
    }
    data = build_manifest(DirectoryBucket(tmp_path / "to"), settings())
    assert (len(data.shards), data.vocabulary) == (2, 60_000)
    sync(source, tmp_path / "to")
    data = build_manifest(DirectoryBucket(tmp_path / "to"), settings())
    assert len(data.shards) == 5


@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_a_selected_shard_that_the_source_has_lost_is_an_error(source, tmp_path, damage):
    there = fill(source)
    sync(source, tmp_path / "to")
    path = tmp_path / "source" / "t_002.npy"
    path.unlink() if damage == "gone" else path.write_bytes(there["t_002.npy"][:-1])
    if damage == "changed":  # its checksum is known to the manifest alone
        path.write_bytes(there["t_002.npy"][:-1] + b"\xee")
        (tmp_path / "to" / "t_002.npy").unlink()
    said = "read, .* expected" if damage == "changed" else r"t_002\.npy (is m|has 2,127 b)"
    for include in ((), ("t_*",)):  # also where the manifest is not selected itself
        with pytest.raises((BucketError, ShardError), match=said):
            sync(source, tmp_path / "to", include=include)
    assert content_of(tmp_path / "to")["manifest.json"] == there["manifest.json"]
    for selection in ({"max_files": 3}, {"exclude": ("t_002.npy",)}):
        sync(source, tmp_path / "chosen", **selection)
    data = build_manifest(DirectoryBucket(tmp_path / "chosen"), settings())
    assert len(data.shards) == 4


def test_metadata_of_other_chunks_are_not_copied(source, tmp_path):
    for folder in ("a", "b"):
        source.write(f"{folder}/metadata.json", b'{"num_chunks": 2}')
        for number in range(2):
            source.write(f"{folder}/chunk_{number:06d}.pt", b"x")
    sync(source, tmp_path / "to", max_files=3)
    assert sorted(content_of(tmp_path / "to")) == [
        "a/chunk_000000.pt",
        "a/chunk_000001.pt",
        "a/metadata.json",
        "b/chunk_000000.pt",
    ]


def test_patterns_select_and_an_empty_selection_is_refused(source, tmp_path):
    fill(source)
    result = sync(source, tmp_path / "to", include=("nested/*",), exclude=("*_003.npy",))
    assert (result.objects, list(content_of(tmp_path / "to"))) == (1, ["nested/t_001.npy"])
    with pytest.raises(ShardError, match="none of its 6 objects is selected"):
        sync(source, tmp_path / "to", include=("x*",))


def test_a_sync_imports_nothing_that_it_does_not_need_before_the_first_byte():
    check = (
        "import sys, refocused.commands.prepare_data, refocused.prepare.sync;"
        "import refocused.bucket.open_bucket;"
        "print([m for m in ('numpy', 'pydantic', 'google.cloud.storage') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.bucket
@pytest.mark.parametrize("without", [None, "unlisted", "undescribed"])
def test_a_bucket_that_lists_no_checksums_is_fetched_and_uploaded(emulator, tmp_path, without):
    there = fill(DirectoryBucket(tmp_path / "from"))
    if without is not None:
        setattr(emulator.proxy, without, frozenset({"crc32c"}))
    bucket = open_bucket(f"{emulator.url}/data")
    assert upload(tmp_path / "from", bucket).moved_objects == 6
    *_, last = (request for request in emulator.proxy.requests if request.is_upload)
    assert "manifest.json" in last.body.decode("latin-1") + str(last.query)
    unlisted = sync(bucket, tmp_path / "alone", exclude=("manifest.json",))
    assert unlisted.size_only == (5 if without == "undescribed" else 0)
    result = sync(bucket, tmp_path / "to")
    assert content_of(tmp_path / "to") == there
    assert (result.moved_objects, result.size_only) == (5, 0)  # the manifest has the checksums
    assert upload(tmp_path / "from", bucket).moved_objects == 0
    before = len(emulator.proxy.requests)
    assert sync(bucket, tmp_path / "to").moved_objects == 0
    if without is None:
        again = [r.path for r in emulator.proxy.requests[before:] if r.is_download]
        assert all("manifest.json" in path for path in again)
    (tmp_path / "to" / "t_000.npy").write_bytes(bytes(len(there["t_000.npy"])))
    assert sync(bucket, tmp_path / "to").moved_objects == 1
    assert content_of(tmp_path / "to") == there


@pytest.mark.bucket
@ON_EACH
def test_data_with_a_manifest_are_read_where_listing_is_not_allowed(emulator, tmp_path):
    bucket = open_bucket(f"{emulator.url}/data")
    there = fill(bucket)
    listed = build_manifest(bucket, settings())
    emulator.proxy.script(lambda request: request.is_listing, Fault(status=403), times=100)
    found = build_manifest(bucket, settings())
    assert found.fingerprint == listed.fingerprint and found.shards == listed.shards
    bucket.download(found.shards[0].blob, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == there[found.shards[0].name]
    (finding,) = check_source(bucket, "data.source")
    assert finding.level == "warn" and "list failed" in finding.text
    for exclude in ("manifest.json", "nothing"):
        if exclude == "nothing":
            bucket.delete("manifest.json")
        with pytest.raises(BucketError, match="HTTP 403"):
            build_manifest(bucket, settings(exclude=[exclude]))


@pytest.mark.bucket
@ON_S3
def test_objects_of_other_tools_are_read_once(emulator, tmp_path):
    there = {f"{number}.txt": b"text %d" % number for number in range(6)}
    for name, content in there.items():
        emulator.put(f"data/{name}", content, algorithm=None)
    emulator.proxy.script(lambda request: request.is_download, Fault(flip_byte=0))
    bucket = open_bucket(f"{emulator.url}/data")
    result = sync(bucket, tmp_path / "to")
    assert (result.moved_objects, result.size_only) == (6, 0)
    assert content_of(tmp_path / "to") == there
    asked = [request.method for request in emulator.proxy.requests if not request.is_listing]
    assert (asked.count("HEAD"), asked.count("GET")) == (6, 7)
    del emulator.proxy.requests[:]
    assert sync(bucket, tmp_path / "to").moved_objects == 0
    assert all(request.is_listing for request in emulator.proxy.requests)
    (tmp_path / "to" / ".sync" / "index.json").unlink()  # as after a kill
    assert sync(bucket, tmp_path / "to").moved_objects == 0
    assert upload(tmp_path / "to", bucket).moved_objects == 0
    assert not any(request.is_download for request in emulator.proxy.requests)
    emulator.put("data/3.txt", b"TEXT 3", algorithm=None)  # of the same size
    assert sync(bucket, tmp_path / "to").moved_objects == 1
    assert (tmp_path / "to" / "3.txt").read_bytes() == b"TEXT 3"


@pytest.mark.bucket
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("a/b.bin", "a//b.bin"),
            r"'a//b\.bin' and 'a/b\.bin' cannot both .*: they would be one file",
        ),
        (("a", "a/b"), "'a/b' and 'a' cannot both .* one a folder of the other"),
        (("a/./b", "a/b"), r"'a/\./b' would be written outside"),
        (("x" * 251,), "xxx' has a part longer than 250 bytes"),
        (("." + "0" * 32 + ".part",), "is reserved for this program's temporary files"),
        ((".sync",), r"'\.sync/index\.json' and '\.sync' cannot both be|'\.sync' cannot both"),
        (("a/",), "the object name 'a/' is that of a folder"),
    ],
)
def test_objects_that_cannot_each_be_a_file_are_refused_before_the_first_is_fetched(
    emulator, tmp_path, names, told
):
    for name in (*names, "good.bin"):
        emulator.put(f"data/{name}", name.encode())
    bucket = open_bucket(f"{emulator.url}/data")
    with pytest.raises(BucketError, match=told):
        sync(bucket, tmp_path / "to")
    assert not any(request.is_download for request in emulator.proxy.requests)
    assert sync(bucket, tmp_path / "to", exclude=names[:1]).objects == len(names)


@pytest.mark.bucket
@ON_EACH
def test_an_object_that_the_store_does_not_describe_may_be_excluded(emulator, tmp_path):
    reply = {
        "gs": b'{"items": [{"name": "data/a"}, {"name": "data/bad"}]}',
        "s3": b"<ListBucketResult><Contents><Key>data/a</Key></Contents>"
        b"<Contents><Key>data/bad</Key></Contents></ListBucketResult>",
    }[emulator.url[:2]]
    emulator.put("data/a", b"1")
    emulator.put("data/bad", b"1")
    emulator.proxy.script(lambda request: request.is_listing, Fault(reply=reply), times=100)
    fault = Fault(reply=b'{"name": "data/bad"}')
    if emulator.url.startswith("s3"):
        fault = Fault(status=403, message="AccessDenied: of another account")
    is_bad = lambda request: request.path.endswith("bad")  # noqa: E731
    emulator.proxy.script(is_bad, fault, times=100)
    bucket = open_bucket(f"{emulator.url}/data")
    with pytest.raises(BucketError, match=r"data/bad: .*(no size|AccessDenied)"):
        sync(bucket, tmp_path / "to")
    assert sync(bucket, tmp_path / "to", exclude=("bad",)).objects == 1
    assert sync(bucket, tmp_path / "to", include=("a",)).objects == 1


@pytest.mark.bucket
@pytest.mark.parametrize("left", [None, ".part", "ours"])
def test_an_object_named_like_a_part_of_another_arrives_beside_it(emulator, tmp_path, left):
    there = {"a.npy": b"1" * 1000, "a.npy.part": b"2" * 1000, "b.npy": b"3" * 1000}
    for name, content in there.items():
        emulator.put(f"data/{name}", content)
    emulator.proxy.script(  # so that the other object is there first
        lambda request: request.is_download and request.path.endswith("a.npy"), Fault(delay_s=0.5)
    )
    folder = tmp_path / "to"
    if left is not None:  # of a killed sync: of an earlier version, of this one
        folder.mkdir()
        part = folder / "a.npy.part" if left == ".part" else part_path(folder / "a.npy")
        part.write_bytes(b"1" * 300)
    bucket = open_bucket(f"{emulator.url}/data")
    assert sync(bucket, folder).objects == 3
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == there
    assert sync(bucket, folder).moved_objects == 0


@pytest.mark.bucket
def test_records_of_a_sync_that_were_copied_to_a_bucket_are_not_fetched(emulator, tmp_path):
    emulator.put("data/.sync/index.json", b"of the folder that was copied here")
    emulator.put("data/a.npy", b"1")
    bucket = open_bucket(f"{emulator.url}/data")
    assert sync(bucket, tmp_path / "to").objects == 1
    assert sync(bucket, tmp_path / "to").moved_objects == 0


def test_upload_refuses_before_it_sends(tmp_path):
    (tmp_path / "from").mkdir()
    to = DirectoryBucket(tmp_path / "to")
    with pytest.raises(ShardError, match="no files to upload"):
        upload(tmp_path / "from", to)
    fill(DirectoryBucket(tmp_path / "from"))
    path = tmp_path / "from" / "t_000.npy"
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"\xee")
    with pytest.raises(ShardError, match=r"1 of . objects differ from .*: t_000\.npy"):
        upload(tmp_path / "from", to)
    assert not (tmp_path / "to").exists()
    path.write_bytes(right)
    to.write("t_004.npy", b"other")
    with pytest.raises(BucketError, match=r"1 objects have other bytes .*: t_004\.npy"):
        upload(tmp_path / "from", to)
    assert list(content_of(tmp_path / "to")) == ["t_004.npy"]
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "from" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BucketError, match="outside the folder"):
        upload(tmp_path / "from", to)
    with pytest.raises(BucketError, match="outside the folder"):
        sync(DirectoryBucket(tmp_path / "from"), tmp_path / "down")
    assert sync(DirectoryBucket(tmp_path / "from"), tmp_path / "down", exclude=("l*",)).objects == 5


@pytest.mark.bucket
@pytest.mark.parametrize(
    "fault",
    [Fault(stall_after=500, stall_s=100.0), Fault(status=503, headers={"Retry-After": "99"})],
)
def test_ctrl_c_does_not_wait_for_transfers(emulator, tmp_path, fault):
    bucket = open_bucket(f"{emulator.url}/data")
    there = fill(bucket)

    def is_transfer(request: Request) -> bool:
        return request.is_download and not request.path.endswith(MANIFEST_NAME)

    emulator.proxy.script(is_transfer, fault, times=4)
    running = subprocess.Popen(
        [
            sys.executable,
            REPOSITORY / "launch" / "prepare_data.py",
            *("sync", f"{emulator.url}/data", tmp_path / "to", "--threads", "4"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while sum(map(is_transfer, emulator.proxy.requests)) < 4:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, printed = running.communicate(timeout=20)  # a silent request times out after 60 s
    finally:
        running.kill()
    assert running.returncode == 130
    assert printed.splitlines()[-1] == "Interrupted. Run the same command again."
    assert "Traceback" not in printed
    sync(bucket, tmp_path / "to")
    assert content_of(tmp_path / "to") == there


@pytest.mark.slow
@pytest.mark.bucket
def test_kills_leave_no_wrong_file_and_fetch_no_right_one_twice(emulator, tmp_path, chance):
    bucket = open_bucket(f"{emulator.url}/data")
    there = fill(bucket, number=3 * KILLS, size=40_000)
    emulator.proxy.script(lambda r: r.is_download, Fault(delay_s=0.15), times=10**6)
    folder = tmp_path / "to"
    command = ["prepare_data.py", "sync", f"{emulator.url}/data", folder, "--threads", "2"]
    whole: set[str] = set()
    kills = 0
    for attempt in range(KILLS + 1):
        before = len(emulator.proxy.requests)
        running = subprocess.Popen(
            [sys.executable, REPOSITORY / "launch" / command[0], *command[1:]],
            stdout=subprocess.DEVNULL,
        )
        if attempt < KILLS:
            while len(emulator.proxy.requests) == before and running.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.6))
            kills += running.poll() is None
            running.kill()
        running.wait(120)
        fetched = [r for r in emulator.proxy.requests[before:] if r.is_download]
        assert not [r.path for r in fetched for name in whole if r.path.endswith(name)]
        here = content_of(folder) if folder.exists() else {}
        assert here.items() <= there.items()
        whole = set(here) - {"manifest.json"}
    assert running.returncode == 0
    assert here == there
    assert kills > KILLS // 2
