"""The mirror process: what it copies, in which order, and when it exits."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from checkpoints.mirrored_run import Place, drain
from checkpoints.step_samples import PREFIX, copied, flip_byte, make_step
from checkpoints.two_machines import Machines
from ranks import until
from thread_ranks import results

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.copies import verify_remote
from refocused.checkpoints.mirror.lease import Lease
from refocused.checkpoints.mirror.mirror import START_ATTEMPTS, MirrorStatus
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_directory import Branch
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.system.errors import CheckpointError
from refocused.system.processes import ProcessIdentity, identify

slow = pytest.mark.slow


def test_the_mirror_loads_no_torch() -> None:
    code = (
        "import sys, refocused.checkpoints.mirror.mirror; "
        "import refocused.checkpoints.mirror.mirror_loop, "
        "refocused.checkpoints.resume.catalog; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@slow
def test_it_says_which_checkpoints_of_other_branches_the_bucket_has(place: Place) -> None:
    """Retention removes only these."""
    place.bucket.mkdir()
    remote = RemoteCheckpoints(DirectoryBucket(place.bucket), PREFIX)
    for step in (10, 20, 30, 40):
        made = make_step(place.checkpoints, step)
        assert step != 30 or copied(remote, made)
    assert copied(remote, make_step(place.run.parent / "another", 40, seed=7))
    place.mirror(branch=Branch(number=2, ancestry=((1, 20),)))
    place.says(lambda status: status.of_other_branches == ("checkpoint_step_30",))
    assert place.status().mirrored == (10, 20)


@slow
def test_new_checkpoints_are_copied_and_the_queue_is_finished(place: Place, tmp_path: Path) -> None:
    readme = place.bucket / PREFIX / "README.txt"
    readme.parent.mkdir(parents=True)
    readme.write_text("a person's notes")  # regression: this stopped the mirror
    for step in (10, 20, 30, 40):
        made = make_step(place.checkpoints, step)
    mirror = place.mirror()
    place.has_mirrored(10, 20, 30, 40)  # also skipped ones, once idle
    make_step(place.checkpoints, 50)
    assert drain(mirror)
    assert place.committed() == [10, 20, 30, 40, 50]
    status = place.status()
    assert (status.mirrored, status.waiting) == ((10, 20, 30, 40, 50), ())
    until(lambda: not status.alive)
    other = Catalog(tmp_path / "other machine", DirectoryBucket(place.bucket), PREFIX)
    assert other.fetch("checkpoint_step_40").manifest == made.manifest
    assert readme.read_text() == "a person's notes"


@slow
def test_one_mirror_at_a_time_copies_a_run(place: Place) -> None:
    place.mirror()
    place.says(lambda status: status.alive)
    working = place.status().process
    assert os.getpid() not in [parent.pid for parent in psutil.Process(working.pid).parents()]
    assert os.getsid(working.pid) != os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, working.pid) == 19
    place.mirror()
    time.sleep(0.5)  # time for the second to start copying, if it could
    place.says(lambda status: status.alive)
    assert place.status().process == working
    os.kill(working.pid, signal.SIGKILL)
    place.says(lambda status: status.alive and status.process != working)
    make_step(place.checkpoints, 10)
    place.has_mirrored(10)


@slow
def test_the_status_of_another_bucket_is_ignored(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    assert drain(mirror)
    place.bucket = place.bucket.with_name("another")
    place.close()
    place.mirror()
    place.says(lambda status: status.waiting == (10,))
    assert mirror.status() is None
    place.open()
    place.has_mirrored(10)
    assert place.committed() == [10]


@slow
@pytest.mark.parametrize("kills", [2, 3])
def test_a_mirror_killed_while_starting_is_restarted(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int
) -> None:
    interpreter, starts = tmp_path / "python", tmp_path / "starts"
    interpreter.write_text(
        f"#!/bin/sh\necho >> {starts}\n"
        f'[ "$(wc -l < {starts})" -le {kills} ] && kill -9 $$\nexec {sys.executable} "$@"\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    make_step(place.checkpoints, 10)
    if kills < START_ATTEMPTS:
        assert drain(place.mirror())
        assert place.committed() == [10]
    else:
        with pytest.raises(CheckpointError, match=r"SIGKILL.*mirror\.log"):
            place.mirror()


@slow
def test_it_finishes_the_queue_when_training_dies_and_exits(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"]) as training:
        place.mirror(training=identify(training.pid))
        place.says(lambda status: status.alive)
        make_step(place.checkpoints, 10, size=500_000)
        training.kill()
    until(lambda: not place.status().alive)
    assert place.committed() == [10]


@slow
def test_the_time_after_training_is_bounded(place: Place) -> None:
    place.close()
    make_step(place.checkpoints, 10)
    with subprocess.Popen(["sleep", "60"]) as training:
        place.mirror(training=identify(training.pid), drain_seconds=0.3)
        place.says(lambda status: status.last_error)
        training.kill()
    until(lambda: not place.status().alive)
    assert "with steps to copy" in str(place.status().last_error)
    assert place.status().waiting == (10,)


@slow
@pytest.mark.parametrize("then", ["repaired", "saved by another start", "started again"])
def test_it_is_complete_once_the_last_log_lines_are_there(place: Place, then: str) -> None:
    log = place.run / "logs" / "events.jsonl"
    log.parent.mkdir()
    logs = (place.bucket / PREFIX).parent / "logs"
    logs.parent.mkdir(parents=True)
    logs.write_text("a file, so that no log can be written below it")
    make_step(place.checkpoints, 10)
    with subprocess.Popen(["sleep", "infinity"]) as training:
        process = identify(training.pid)
        assert process is not None
        bucket = DirectoryBucket(place.bucket)
        assert Lease(bucket, PREFIX, token="mine", training=process).renew() is None
        place.mirror(lease="mine", training=process)
        place.has_mirrored(10)
        log.write_text("the last line\n")
        training.kill()
    place.says(lambda status: "the last log lines: " in (status.last_error or ""))
    first = place.status()
    assert not first.complete and first.alive
    if then == "started again":  # else its mirror would wait as long as the bucket refuses logs
        place.mirror()
        place.has_mirrored(10)
        assert place.status().process != first.process
        return
    if then != "repaired":
        make_step(place.checkpoints, 20)
        place.says(lambda status: status.waiting == (20,))
    logs.unlink()
    until(lambda: not place.status().alive)
    assert (logs / socket.gethostname() / log.name).read_text() == "the last line\n"
    status = place.status()
    assert (status.complete, status.last_error) == (then == "repaired", None)


@slow
def test_a_machine_that_ends_after_node_0_has_released_the_lease_completes(place: Place) -> None:
    make_step(place.checkpoints, 10)
    assert drain(place.mirror())
    until(lambda: not place.status().alive)
    ended = ProcessIdentity(pid=1, started=-1)
    lease = Lease(DirectoryBucket(place.bucket), PREFIX, token="mine", training=ended)
    assert lease.renew() is None
    lease.release()
    place.mirror(lease="mine", training=ended, node=1, nodes=2)
    place.says(lambda status: status.complete and status.mirrored == (10,))


@slow
def test_an_unusable_bucket_and_its_repair_are_reported(place: Place) -> None:
    place.close()
    mirror = place.mirror()
    place.says(lambda status: status.blocked)  # before the first step
    make_step(place.checkpoints, 10)
    place.says(lambda status: status.waiting == (10,))
    assert not mirror.ensure_alive()
    seen: list[MirrorStatus | None] = []
    assert not drain(mirror, 1.0, seen.append)  # timed out
    assert seen[-1] is not None and seen[-1].waiting == (10,)
    place.open()
    place.has_mirrored(10)
    assert place.committed() == [10]


@slow
def test_a_mirror_far_behind_copies_the_newest_first(place: Place) -> None:
    place.close()
    make_step(place.checkpoints, 10, tiers=["epoch"])
    for step in (20, 30, 40, 9500, 10000):
        make_step(place.checkpoints, step)
    mirror = place.mirror()
    place.says(lambda status: status.blocked)
    status = place.status()
    assert (status.waiting, status.skipped) == ((10000, 9500, 10), (40, 30, 20))
    behind = f"nothing mirrored yet, 2 behind, last error: {status.last_error}"
    assert status.progress([10, 10000]) == behind
    (place.run / "mirror.drain").write_text("x")  # a drain does not copy skipped ones
    place.says(lambda now: now.heartbeat > status.heartbeat)
    place.open()
    assert drain(mirror)
    assert place.committed() == [10, 9500, 10000]
    assert place.status().progress([10, 9500, 10000]) == "mirrored up to step 10,000"


@slow
def test_the_newest_few_stay_in_the_bucket_and_the_pointer_names_the_newest(place: Place) -> None:
    for step in (10, 20, 30, 40):
        make_step(place.checkpoints, step, tiers=["epoch" if step == 10 else "rolling"])
    mirror = place.mirror(keep_remote=2)
    place.says(lambda status: {10, 30, 40} <= set(status.mirrored))
    make_step(place.checkpoints, 9500)
    place.has_mirrored(10, 40, 9500)
    assert drain(mirror)
    assert place.committed() == [10, 40, 9500]
    assert {20, 30} <= {*place.status().unwanted, *place.status().skipped}
    pointer = json.loads((place.bucket / PREFIX / "latest" / "pointer.json").read_text())
    assert pointer == {"name": "checkpoint_step_9500", "step": 9500}
    names = sorted(path.name for path in (place.bucket / PREFIX).iterdir())
    assert names[-1] == "latest"  # what `ls | tail -1` shows
    again = place.mirror(keep_remote=2)  # a restart does not upload removed ones again
    assert drain(again)
    assert place.committed() == [10, 40, 9500]


@slow
def test_a_failing_copy_is_reported_and_does_not_block_others(place: Place) -> None:
    old = make_step(place.checkpoints, 10)
    mirror = place.mirror()
    place.has_mirrored(10)
    remove_checkpoint(old.path)
    make_step(place.checkpoints, 10, seed=99, created="2027-01-01T00:00:00Z")
    flip_byte(make_step(place.checkpoints, 20).path / "trainer.json")
    make_step(place.checkpoints, 30)
    assert not drain(mirror)
    failed = place.status().failed
    assert "is another checkpoint" in failed[10]
    assert "trainer.json has CRC-32C" in failed[20]
    assert place.committed() == [10, 30]


@slow
def test_a_checkpoint_removed_while_copied_is_no_failure(place: Place) -> None:
    place.mirror()
    step = make_step(place.checkpoints, 10, size=4_000_000)
    until((place.bucket / PREFIX / "checkpoint_step_10" / "manifest.json").exists)
    remove_checkpoint(step.path)
    make_step(place.checkpoints, 20)
    place.says(lambda status: 20 in status.mirrored)
    assert place.status().failed == {}
    assert place.status().alive
    assert set(place.committed()) <= {10, 20}  # 10 only when all of it had been read before


@slow
def test_a_machine_whose_mirror_was_killed_is_waited_for(place: Place, tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    results(machines.save(10))
    remote = RemoteCheckpoints(DirectoryBucket(place.bucket), PREFIX)

    def objects(step: int) -> set[str]:
        return set(remote.objects(f"checkpoint_step_{step}")) if place.bucket.exists() else set()

    settings = {"drain_seconds": 60.0, "scan_seconds": 0.02, "keep_remote": 1, "nodes": 2}
    first, second = (
        place.mirror(run=machines.folders[node].parent, node=node, **settings) for node in range(2)
    )
    until(lambda: COMMITTED in objects(10))
    place.kill()
    results(machines.save(20))
    until(lambda: "zero/rank_0.pt" in objects(20))
    first.request_drain(60)
    assert first.await_drain(0.5) is None  # it waits for the other machine
    assert "zero/rank_1.pt" not in objects(20) and COMMITTED not in objects(20)

    assert second.ensure_alive()
    assert first.await_drain(60) is True
    assert drain(second, 60)
    for step in (10, 20):
        assert COMMITTED in objects(step)
        assert verify_remote(remote, f"checkpoint_step_{step}", deep=True) == []


@slow
def test_a_run_on_fewer_machines_does_not_wait_for_the_others(place: Place, tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    results(machines.save(10))
    assert drain(place.mirror(run=machines.folders[0].parent)) is False
    assert "is node 0 of 2: its part, but the run now has 1 machines" in place.status().failed[10]
