from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, make_step

from refocused.bucket.directory import DirectoryBucket
from refocused.checkpoints.catalog import Catalog
from refocused.checkpoints.mirror import CheckpointMirror
from refocused.checkpoints.mirror_status import MirrorSettings, MirrorStatus
from refocused.checkpoints.mirror_waits import is_refusal, wait_seconds
from refocused.checkpoints.remote_steps import COMMITTED, RemoteSteps
from refocused.checkpoints.staging import remove_step
from refocused.checkpoints.step_directory import read_step, step_paths
from refocused.checkpoints.verify import verify
from refocused.errors import BucketError
from refocused.process_identity import ProcessIdentity, identify, this_process

pytestmark = pytest.mark.slow

PREFIX = "sample/checkpoints"
PATIENCE_SECONDS = 30


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Place:
    """A run with its bucket, and the mirrors between them."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.checkpoints = self.run / "checkpoints"
        self.bucket = root / "bucket"
        self.checkpoints.mkdir(parents=True)
        self.mirrors: list[CheckpointMirror] = []

    def mirror(
        self,
        training: ProcessIdentity | None = None,
        drain_seconds: float = 20.0,
        keep_remote: int | None = None,
    ) -> CheckpointMirror:
        mirror = CheckpointMirror(
            MirrorSettings(
                run=self.run,
                bucket=str(self.bucket),
                prefix=PREFIX,
                training=training or this_process(),
                drain_seconds=drain_seconds,
                scan_seconds=0.05,
                longest_wait_seconds=0.2,
                keep_remote=keep_remote,
            )
        )
        self.mirrors.append(mirror)
        return mirror

    def status(self) -> MirrorStatus:
        status = self.mirrors[-1].status()
        assert status is not None
        return status

    def says(self, condition: Callable[[MirrorStatus], object]) -> Callable[[], object]:
        def asked() -> object:
            status = self.mirrors[-1].status()
            return status is not None and condition(status)

        return asked

    def committed(self) -> list[int]:
        """The marked steps of the bucket, each of which must be whole."""
        root = self.bucket / PREFIX
        steps = []
        for path in step_paths(root):
            if (path / COMMITTED).exists():
                (path / COMMITTED).rename(root / f"{path.name}.marker")
                assert verify(read_step(path), deep=True) == []
                (root / f"{path.name}.marker").rename(path / COMMITTED)
                steps.append(read_step(path).step)
        return steps

    def kill(self) -> None:
        status = self.mirrors[-1].status()
        if status is not None and status.alive:
            os.kill(status.process.pid, signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for mirror in place.mirrors:
        process = mirror._process
        if process is not None and process.alive:
            os.kill(process.pid, signal.SIGKILL)


def test_new_steps_are_copied_and_the_queue_is_finished_at_the_end(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    make_step(place.checkpoints, 20)
    make_step(place.checkpoints, 30)
    assert mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == [10, 20, 30]
    status = place.status()
    assert (status.mirrored, status.waiting, status.last_error) == ((10, 20, 30), (), None)
    until(lambda: not status.alive)


def test_the_mirror_is_no_descendant_of_the_trainer_and_of_low_priority(place: Place) -> None:
    place.mirror().start()
    until(place.says(lambda status: status.alive))
    pid = place.status().process.pid
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in _descendants(os.getpid())
        assert pid not in _descendants(os.getpid())
        child.kill()
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19


def _descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}.union(*(_descendants(int(c)) for c in children))


def test_kill_9_at_any_moment_marks_nothing_that_is_not_whole(place: Place) -> None:
    mirror = place.mirror()
    mirror.start()
    generator = random.Random(1)
    partial = 0
    for step in range(1, 13):
        make_step(place.checkpoints, step, size=1_500_000, tiers=["epoch"])  # none is skipped
        begun = place.bucket / PREFIX / f"checkpoint_step_{step}"
        until(begun.exists)
        time.sleep(generator.uniform(0.0, 0.03))
        place.kill()
        until(lambda: not place.status().alive)
        partial += len(step_paths(place.bucket / PREFIX)) - len(place.committed())
        assert mirror.ensure_alive()
    assert partial > 0  # otherwise the kills hit nothing
    assert mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == list(range(1, 13))


def test_an_unusable_bucket_is_told_and_its_repair_is_found_out(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: (status.last_error or "").startswith("blocked: ")))
    assert place.status().waiting == (10,)
    assert not mirror.ensure_alive()
    place.bucket.unlink()
    until(place.says(lambda status: status.mirrored == (10,) and status.last_error is None))
    assert place.committed() == [10]


def test_an_unusable_bucket_is_told_before_the_first_step(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    place.mirror().start()
    until(place.says(lambda status: status.last_error is not None))


def test_it_finishes_the_queue_when_training_dies_and_then_ends(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"]) as training:
        place.mirror(identify(training.pid)).start()
        until(place.says(lambda status: status.alive))
        make_step(place.checkpoints, 10, size=500_000)
        training.kill()
    until(lambda: not place.status().alive)
    assert place.committed() == [10]


def test_its_time_after_training_is_bounded(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10)
    with subprocess.Popen(["sleep", "60"]) as training:
        place.mirror(identify(training.pid), drain_seconds=0.3).start()
        until(place.says(lambda status: status.last_error))
        training.kill()
    until(lambda: not place.status().alive)
    assert "with steps to copy" in str(place.status().last_error)
    assert place.status().waiting == (10,)


def test_drain_gives_up_when_its_time_is_over(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.waiting))
    seen: list[MirrorStatus | None] = []
    assert not mirror.drain(1.0, seen.append)
    assert seen[-1] is not None and seen[-1].waiting == (10,)


def test_drain_starts_a_mirror_that_has_died(place: Place) -> None:
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.alive))
    place.kill()
    make_step(place.checkpoints, 10)
    assert mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == [10]


def test_sigterm_ends_it_and_the_next_start_goes_on(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    os.kill(place.status().process.pid, signal.SIGTERM)
    until(lambda: not place.status().alive)
    make_step(place.checkpoints, 20)
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10, 20)))


def test_a_damaged_step_is_told_and_does_not_hold_up_the_others(place: Place) -> None:
    flip_byte(make_step(place.checkpoints, 10).trainer)
    make_step(place.checkpoints, 20)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (20,) and status.failed))
    assert "trainer.json has CRC-32C" in place.status().failed[10]
    assert not mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == [20]


def test_a_step_removed_while_it_is_copied_is_no_failure_and_gets_no_marker(place: Place) -> None:
    mirror = place.mirror()
    mirror.start()
    step = make_step(place.checkpoints, 10, size=4_000_000)
    until((place.bucket / PREFIX / "checkpoint_step_10" / "manifest.json").exists)
    remove_step(step.path)
    make_step(place.checkpoints, 20)
    until(place.says(lambda status: 20 in status.mirrored))
    assert place.status().failed == {}
    assert place.status().alive
    assert set(place.committed()) <= {10, 20}  # 10 only when all of it had been read before


def test_a_step_saved_again_is_copied_again(place: Place) -> None:
    old = make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    remove_step(old.path)
    again = make_step(place.checkpoints, 10, seed=99, created="2027-01-01T00:00:00Z")
    assert mirror.drain(PATIENCE_SECONDS)
    remote = RemoteSteps(DirectoryBucket(place.bucket), PREFIX)
    assert remote.manifest("checkpoint_step_10") == again.manifest


def test_what_an_earlier_mirror_said_about_another_bucket_does_not_count(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    assert mirror.drain(PATIENCE_SECONDS)
    place.bucket = place.bucket.with_name("another")
    other = place.mirror()
    assert mirror.status() is not None
    assert other.status() is None
    other.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    assert place.committed() == [10]


def test_one_mirror_at_a_time_works_on_a_run(place: Place) -> None:
    first, second = place.mirror(), place.mirror()
    first.start()
    until(place.says(lambda status: status.alive))
    working = place.status().process
    second.start()
    time.sleep(0.5)  # time for the second to take over, if it could
    until(place.says(lambda status: status.alive))
    assert place.status().process == working
    os.kill(working.pid, signal.SIGKILL)
    until(place.says(lambda status: status.alive and status.process != working))
    make_step(place.checkpoints, 10)
    until(place.says(lambda status: status.mirrored == (10,)))


def test_what_was_mirrored_can_be_fetched_on_another_machine(place: Place, tmp_path: Path) -> None:
    step = make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    assert mirror.drain(PATIENCE_SECONDS)
    other = Catalog(tmp_path / "other", DirectoryBucket(place.bucket), PREFIX)
    assert other.resolve("latest").step == 10
    assert other.fetch(10).manifest == step.manifest


def test_the_mirror_loads_no_torch() -> None:
    code = (
        "import sys, refocused.checkpoints.mirror, refocused.checkpoints.mirror_loop, "
        "refocused.checkpoints.catalog; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_waits_double_up_to_the_longest_and_a_refusal_waits_that_at_once() -> None:
    waits = [wait_seconds(failures, refused=False, longest=5.0) for failures in (1, 2, 3, 4, 99)]
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert wait_seconds(5000, refused=False, longest=5.0) == 5.0
    assert wait_seconds(1, refused=True, longest=5.0) == 5.0


def test_a_refusal_is_known_by_its_cause() -> None:
    try:
        try:
            raise PermissionError(13, "Permission denied")
        except PermissionError as error:
            raise BucketError("cannot write") from error
    except BucketError as error:
        assert is_refusal(error)
    assert not is_refusal(BucketError("given up after 10 attempts"))


def test_a_mirror_far_behind_takes_the_newest_and_skips_what_it_replaces(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10, tiers=["epoch"])
    for step in (20, 30, 40, 9500, 10000):
        make_step(place.checkpoints, step)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.blocked))
    status = place.status()
    said = status.heartbeat
    assert (status.waiting, status.skipped) == ((10000, 9500, 10), (40, 30, 20))
    assert (
        status.progress([10, 10000])
        == f"nothing mirrored yet, 2 behind, last error: {status.last_error}"
    )
    (place.run / "mirror.drain").write_text("x")  # at the end nobody waits for what is skipped
    until(place.says(lambda status: status.heartbeat > said))
    place.bucket.unlink()
    assert mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == [10, 9500, 10000]
    assert place.status().progress([10, 9500, 10000]) == "mirrored up to step 10,000"


def test_what_was_skipped_is_copied_once_nothing_newer_waits(place: Place) -> None:
    for step in (10, 20, 30, 40):
        make_step(place.checkpoints, step)
    place.mirror().start()
    until(place.says(lambda status: len(status.mirrored) == 4))
    assert place.committed() == [10, 20, 30, 40]


def test_the_newest_few_stay_in_the_bucket_and_the_pointer_names_the_newest(place: Place) -> None:
    for step in (10, 20, 30, 40):
        make_step(place.checkpoints, step, tiers=["epoch" if step == 10 else "rolling"])
    mirror = place.mirror(keep_remote=2)
    mirror.start()
    until(place.says(lambda status: {10, 30, 40} <= set(status.mirrored)))
    make_step(place.checkpoints, 9500)
    until(place.says(lambda status: status.mirrored == (10, 40, 9500)))
    assert mirror.drain(PATIENCE_SECONDS)
    assert place.committed() == [10, 40, 9500]
    assert {20, 30} <= {*place.status().unwanted, *place.status().skipped}
    pointer = json.loads((place.bucket / PREFIX / "latest" / "pointer.json").read_text())
    assert pointer == {"name": "checkpoint_step_9500", "step": 9500}
    names = sorted(path.name for path in (place.bucket / PREFIX).iterdir())
    assert names[-1] == "latest"  # what `ls | tail -1` shows
    again = place.mirror(keep_remote=2)  # a new start does not send again what was removed
    again.start()
    assert again.drain(PATIENCE_SECONDS)
    assert place.committed() == [10, 40, 9500]
