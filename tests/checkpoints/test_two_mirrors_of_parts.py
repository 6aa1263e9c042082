"""The mirrors of two machines, as processes: a part that is missing keeps the marker back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.mirrored_run import drain
from checkpoints.two_machines import Machines
from thread_ranks import results

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.copy_step import verify_remote
from refocused.checkpoints.mirror.mirror import CheckpointMirror
from refocused.checkpoints.mirror.mirror_status import MirrorSettings
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.system.processes import this_process

PREFIX = "sample/checkpoints"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_machine_whose_mirror_was_killed_is_waited_for(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    results(machines.save(10))
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    remote = RemoteSteps(DirectoryBucket(bucket), PREFIX)

    def objects(step: int) -> set[str]:
        return set(remote.objects(f"checkpoint_step_{step}"))

    mirrors = [
        CheckpointMirror(
            MirrorSettings(
                run=machines.folders[node].parent,
                bucket=str(bucket),
                prefix=PREFIX,
                training=this_process(),
                drain_seconds=60.0,
                scan_seconds=0.02,
                keep_remote=1,
                node=node,
                nodes=2,
            )
        )
        for node in range(2)
    ]
    try:
        for mirror in mirrors:
            mirror.start()
        until(lambda: COMMITTED in objects(10))
        killed = mirrors[1].process
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: not killed.alive)

        results(machines.save(20))
        until(lambda: "zero/rank_0.pt" in objects(20))
        request = mirrors[0].request_drain(60)
        assert mirrors[0].await_drain(request, 0.5) is None  # it does not end without the other
        assert "zero/rank_1.pt" not in objects(20) and COMMITTED not in objects(20)

        assert mirrors[1].ensure_alive()
        assert mirrors[0].await_drain(request, 60) is True
        assert drain(mirrors[1], 60)
        for step in (10, 20):
            assert COMMITTED in objects(step)
            assert verify_remote(remote, f"checkpoint_step_{step}", deep=True) == []
        assert [mirror.status().mirrored for mirror in mirrors if mirror.status()] == [(10, 20)] * 2
    finally:
        for mirror in mirrors:
            process = mirror.process
            if process is not None and process.alive:
                os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_goes_on_on_fewer_machines_does_not_wait_for_the_others(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    results(machines.save(10))
    (tmp_path / "bucket").mkdir()
    mirror = CheckpointMirror(
        MirrorSettings(
            run=machines.folders[0].parent,
            bucket=str(tmp_path / "bucket"),
            prefix=PREFIX,
            training=this_process(),
            drain_seconds=60.0,
            scan_seconds=0.02,
        )
    )
    try:
        mirror.start()
        assert drain(mirror, 60) is False
        status = mirror.status()
        assert status is not None
        assert "is node 0 of 2: its part, and the run is on 1 now" in status.failed[10]
    finally:
        process = mirror.process
        if process is not None and process.alive:
            os.kill(process.pid, signal.SIGKILL)
