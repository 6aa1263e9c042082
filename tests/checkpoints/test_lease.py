"""The lease on a run: one holder, whatever dies, sleeps or is lost on the way."""

import contextlib
import email.utils
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints.mirrored_run import Place
from checkpoints.step_samples import PREFIX
from fakes import Emulator, Fault, Request
from ranks import until

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.mirror import lease as module
from refocused.checkpoints.mirror.lease import LEASE_FILE, LEASE_SECONDS, Lease, read_lease
from refocused.checkpoints.step.checkpoint_directory import Branch
from refocused.system.errors import BucketError, TrainingError
from refocused.system.processes import this_process

STORES = [pytest.param(name, marks=pytest.mark.bucket) for name in ("emulator", "s3_emulator")]


def lease_in(bucket: Bucket, token: str) -> Lease:
    return Lease(bucket, PREFIX, token=token, training=this_process())


@pytest.fixture(params=["folder", *STORES])
def store(request: pytest.FixtureRequest) -> Emulator | None:
    return None if request.param == "folder" else request.getfixturevalue(request.param)


@pytest.fixture
def bucket(store: Emulator | None, tmp_path: Path) -> Bucket:
    url = f"{store.url}/mirror" if store else str(tmp_path / "mirror")
    return open_bucket(url, retry=Retry(attempts=3, sleep=lambda seconds: None))


@pytest.fixture
def ages(store: Emulator | None, bucket: Bucket) -> Callable[[float], None]:
    """Let seconds pass on the store's clock only."""
    dated: dict[str, str] = {}

    def age(seconds: float) -> None:
        if store is None:
            os.utime(Path(bucket.url, PREFIX, LEASE_FILE), (0, time.time() - seconds))
        elif not dated:
            store.proxy.script(lambda asked: True, Fault(headers=dated), times=10_000)
        dated["Date"] = email.utils.formatdate(time.time() + seconds, usegmt=True)

    return age


def test_one_start_holds_it_until_it_releases_it(bucket: Bucket) -> None:
    first, second = lease_in(bucket, "first"), lease_in(bucket, "second")
    assert first.renew() is None and first.held
    there = second.renew()
    assert there is not None and there.token == "first" and not second.held
    assert second.renew(writes=False) == there
    assert first.renew() is None and second.renew() != there  # it was renewed
    first.close()
    assert second.renew() is None and second.held
    first.close()  # not the other's
    assert second.renew() is None and second.held


def test_a_renewal_during_the_release_does_not_prevent_it(tmp_path: Path) -> None:
    class Busy(DirectoryBucket):
        def write(self, name: str, content: bytes, **how: Any) -> BlobInfo:
            if b'"released":true' in content and renewals:
                renewals.pop()()
            return super().write(name, content, **how)

    bucket = Busy(tmp_path)
    trainer, mirror = lease_in(bucket, "same"), lease_in(bucket, "same")
    assert trainer.renew() is None and mirror.renew() is None
    renewals = [trainer.renew]
    mirror.release()
    assert trainer.renew() is None, "it does not take back what was released"
    assert lease_in(bucket, "next").renew() is None and not renewals


def test_it_expires_by_the_clock_of_the_store(
    bucket: Bucket, ages: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept meanwhile writes nothing, and ends with a message."""
    first, second = lease_in(bucket, "first"), lease_in(bucket, "second")
    assert first.renew() is None
    ages(LEASE_SECONDS - 10.0)
    assert second.renew() is not None and first.held
    awake = module._now_s
    monkeypatch.setattr(module, "_now_s", lambda: awake() + 3600.0)
    assert not first.held  # before it can learn more
    ages(LEASE_SECONDS + 10.0)
    assert second.renew() is None and second.held
    second.release()
    assert first.renew() is not None, "it does not build upon what the other has written"
    error = str(first.lost())
    assert f"process {os.getpid()}, since 20" in error and "run.name=" in error


def test_an_outage_and_a_lost_answer(emulator: Emulator, caplog: pytest.LogCaptureFixture) -> None:
    bucket = open_bucket(emulator.url, retry=Retry(attempts=3, sleep=lambda seconds: None))
    holder, starter = lease_in(bucket, "holder"), lease_in(bucket, "starter")
    for _ in range(2):  # creation, renewal
        emulator.proxy.script(lambda request: request.is_upload, Fault(lose_reply=True))
        assert holder.renew() is None and holder.held
    emulator.proxy.script(lambda request: True, Fault(status=503), times=9)
    with pytest.raises(BucketError):
        holder.renew()
    assert holder.held
    starter.acquire(cancelled=lambda: False)
    starter.close()
    assert not starter.held and "Cannot learn whether another machine trains" in caplog.text
    assert holder.renew() is None


def test_a_second_start_waits_and_then_exits(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("WAIT_SECONDS", 0.2), ("POLL_SECONDS", 0.05), ("RENEW_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    first, second = lease_in(bucket, "first"), lease_in(bucket, "second")
    first.acquire(cancelled=lambda: False)
    with pytest.raises(TrainingError, match=r"is trained by .* \(process \d+, since .*lease.json"):
        second.acquire(cancelled=lambda: False)
    assert "Waiting for it to end or expire" in caplog.text
    first.close()
    second.acquire(cancelled=lambda: False)
    second.close()


HOLD = """
import sys
from checkpoints.test_lease import lease_in, open_bucket
print(lease_in(open_bucket(sys.argv[1]), "killed").renew(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_holder_is_replaced_at_once_here_and_after_expiry_elsewhere(
    bucket: Bucket, ages: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path}{HOLD}", bucket.url]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "None\n"
        assert lease_in(bucket, "here").renew() is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "this_machine", lambda: "another boot or namespace")
        assert lease_in(bucket, "elsewhere").renew() is not None
    assert lease_in(bucket, "here").renew() is None
    monkeypatch.setattr(module, "this_machine", lambda: "another boot or namespace")
    other = lease_in(bucket, "elsewhere")
    assert other.renew() is not None
    awake = module._now_s
    monkeypatch.setattr(module, "_now_s", lambda: awake() + LEASE_SECONDS + 2.0)
    ages(LEASE_SECONDS + 2.0)
    assert other.renew() is None


def test_a_lease_with_a_wrong_date_is_judged_by_its_renewals(
    bucket: Bucket, ages: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, awake = 0.0, module._now_s
    monkeypatch.setattr(module, "_now_s", lambda: awake() + passed)
    holder, second = lease_in(bucket, "holder"), lease_in(bucket, "second")
    for _ in range(2):
        assert holder.renew() is None
        ages(-86_400.0)  # dated a day ahead
        assert second.renew() is not None, "it is renewed"
        passed += LEASE_SECONDS - 10.0
        assert second.renew() is not None, "not long enough"
    passed += 20.0
    assert second.renew() is None and second.held
    assert holder.renew() is not None and holder.taken_by is not None


def test_a_clock_that_is_set_ahead_takes_no_lease_in_a_folder(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path)
    assert lease_in(bucket, "holder").renew() is None
    os.utime(tmp_path / PREFIX / LEASE_FILE, (0, 0))
    assert lease_in(bucket, "second").renew() is not None


def test_a_damaged_lease_is_no_lease(tmp_path: Path) -> None:
    """Each flipped bit is noticed: the head in it decides what is resumed."""
    bucket, file = DirectoryBucket(tmp_path), tmp_path / PREFIX / LEASE_FILE
    mine = lease_in(bucket, "mine")
    mine.lead(lambda: (Branch(run_id="a", number=2, ancestry=((1, 20),)), 40))
    content = file.read_bytes()
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(BucketError, match=r"lease.json is no readable lease. If no machine"):
            mine.renew()


@pytest.mark.parametrize("times", [2, 3])
def test_a_lease_that_is_damaged_on_its_way_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    bucket = DirectoryBucket(tmp_path)
    mine, read, left = lease_in(bucket, "mine"), bucket.read, [times]
    mine.renew()

    def damaged(name: str, **part: Any) -> bytes:
        left[0] -= 1
        content = read(name, **part)
        return b"!" + content[1:] if left[0] >= 0 else content

    monkeypatch.setattr(bucket, "read", damaged)
    with pytest.raises(BucketError) if times == 3 else contextlib.nullcontext():
        assert mine.renew() is None


def test_a_run_that_began_without_the_lease_ends_where_another_is_ahead(tmp_path: Path) -> None:
    """It went on from its disk while the mirror was away; the head there stays as it is."""
    bucket = DirectoryBucket(tmp_path)
    first = lease_in(bucket, "first")
    first.lead(lambda: (Branch(run_id="a", number=2, ancestry=((1, 20),)), 90))
    first.release()
    stale = lease_in(bucket, "stale")
    stale.lead(lambda: (Branch(run_id="a"), 40))
    assert not stale.held and stale.taken_by is not None
    error = str(stale.lost())
    assert "on branch 1 to step 40" in error and "branch 2 (from step 20) to step 90" in error
    there, _ = read_lease(bucket, f"{PREFIX}/{LEASE_FILE}")
    assert there is not None and there.released and there.step == 90

    older = Lease(bucket, PREFIX, token="t", training=this_process(), known="first")
    older.lead(lambda: (Branch(run_id="a", number=3, ancestry=((1, 20), (2, 60))), 60))
    there, _ = read_lease(bucket, f"{PREFIX}/{LEASE_FILE}")
    assert older.held and there is not None and (there.trained_by, there.step) == ("t", 60)


def race(url: str, races: int, me: int, start: Any, results: Any) -> None:
    for number in range(races):
        won = []
        for again in range(2):  # absent, then released
            mine = Lease(
                open_bucket(url), str(number), token=f"{me} {again}", training=this_process()
            )
            start.wait()
            try:
                won.append(mine.renew() is None and mine.held)
            except BucketError:
                won.append(False)
            start.wait()
            if won[-1]:
                mine.release()
        results.put((number, won))


@pytest.mark.slow
def test_two_processes_race_for_it(bucket: Bucket) -> None:
    races = 10 if bucket.url.startswith("s3") else 50
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(2, timeout=30.0), spawn.Queue()
    for me in range(2):
        arguments = (bucket.url, races, me, start, results)
        spawn.Process(target=race, args=arguments, daemon=True).start()
    winners = [[0, 0] for _ in range(races)]
    for _ in range(2 * races):
        number, won = results.get(timeout=60.0)
        winners[number] = [sum(both) for both in zip(winners[number], won, strict=True)]
    assert winners == [[1, 1]] * races


@pytest.mark.slow
def test_the_mirror_writes_only_with_the_lease(tmp_path: Path) -> None:
    place = Place(tmp_path)
    bucket = DirectoryBucket(place.bucket)
    other, mine = lease_in(bucket, "other"), lease_in(bucket, "mine")
    assert other.renew() is None
    try:
        mirror = place.mirror(lease="mine")
        place.says(lambda status: "no upload without" in (status.last_error or ""))
        time.sleep(0.3)  # time for a first object, if it were written
        assert [blob.name for blob in bucket.list()] == [f"{PREFIX}/{LEASE_FILE}"]
        other.close()
        assert mine.renew() is None
        until(lambda: any(blob.name.endswith("README.txt") for blob in bucket.list()))
        mirror.request_drain(30.0)
        assert mirror.await_drain(30.0)
    finally:
        place.end()
    assert lease_in(bucket, "next").renew() is None, "the mirror releases it when it has finished"


@pytest.mark.bucket
def test_a_store_that_ignores_conditions_is_refused_at_the_start(s3_emulator: Emulator) -> None:
    bucket = open_bucket(f"{s3_emulator.url}/mirror")
    lease_in(bucket, "first").acquire(cancelled=lambda: False)

    def ignore(request: Request) -> bool:
        request.headers.pop("If-Match", None)
        return False

    lease_in(bucket, "first").close()
    s3_emulator.proxy.script(ignore, Fault())
    second = lease_in(bucket, "second")
    with pytest.raises(TrainingError, match=r"lease.json: the store ignores .* \(If-Match\)"):
        second.acquire(cancelled=lambda: False)
    there, _ = read_lease(bucket, f"{PREFIX}/{LEASE_FILE}")
    assert there is not None and there.released
