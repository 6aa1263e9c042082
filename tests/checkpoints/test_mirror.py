"""The mirror's process: how it starts, what it outlives, and when it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints.mirrored_run import PREFIX, Place, drain, until
from checkpoints.step_samples import make_step

from refocused.checkpoints.mirror.mirror import START_ATTEMPTS
from refocused.checkpoints.mirror.mirror_status import MirrorStatus
from refocused.checkpoints.step.branches import step_paths
from refocused.system.errors import CheckpointError
from refocused.system.processes import identify

pytestmark = pytest.mark.slow


def test_new_steps_are_copied_and_the_queue_is_finished_at_the_end(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    make_step(place.checkpoints, 20)
    make_step(place.checkpoints, 30)
    assert drain(mirror)
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


def test_the_mirror_loads_no_torch() -> None:
    code = (
        "import sys, refocused.checkpoints.mirror.mirror; "
        "import refocused.checkpoints.mirror.mirror_loop, "
        "refocused.checkpoints.resume.catalog; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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


def test_what_an_earlier_mirror_said_about_another_bucket_does_not_count(place: Place) -> None:
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    assert drain(mirror)
    place.bucket = place.bucket.with_name("another")
    other = place.mirror()
    assert mirror.status() is not None
    assert other.status() is None
    other.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    assert place.committed() == [10]


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
    assert drain(mirror)
    assert place.committed() == list(range(1, 13))


@pytest.mark.parametrize("kills", [2, 3])
def test_a_mirror_killed_while_it_starts_is_started_again(
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
    mirror = place.mirror()
    if kills < START_ATTEMPTS:
        mirror.start()
        assert drain(mirror)
        assert place.committed() == [10]
    else:
        with pytest.raises(CheckpointError, match=r"SIGKILL.*mirror\.log"):
            mirror.start()


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
    assert not drain(mirror, 1.0, seen.append)
    assert seen[-1] is not None and seen[-1].waiting == (10,)


def test_drain_starts_a_mirror_that_has_died(place: Place) -> None:
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.alive))
    place.kill()
    make_step(place.checkpoints, 10)
    assert drain(mirror)
    assert place.committed() == [10]


@pytest.mark.parametrize("text", ["a person's notes", "the words of another version"])
def test_a_readme_with_other_words_is_left_alone_and_nothing_fails(place: Place, text: str) -> None:
    """Found: nothing was mirrored any more."""
    readme = place.bucket / PREFIX / "README.txt"
    readme.parent.mkdir(parents=True)
    readme.write_text(text)
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    assert drain(mirror)
    assert place.committed() == [10]
    assert readme.read_text() == text
