"""Two machines that start one run: one trains, and neither writes into the other."""

import json
from pathlib import Path

import pytest
from ranks import ForkedRanks, metrics
from tiny import tiny_run

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror import lease
from refocused.checkpoints.mirror.lease import Lease
from refocused.system.errors import BucketError
from refocused.system.processes import this_process

pytestmark = pytest.mark.slow
PREFIX = "tiny/checkpoints"


def train_with_short_leases(arguments: list[str]) -> int:
    from refocused.commands.train import main

    lease.RENEW_SECONDS, lease.WAIT_SECONDS, lease.POLL_SECONDS = 0.5, 1.0, 0.1
    return main(arguments)


def machine(root: Path, name: str, *settings: str, count: int = 1) -> ForkedRanks:
    """Start the run on a machine with a disk of its own."""
    (root / name).mkdir(exist_ok=True)
    arguments = ["--config", str(tiny_run(root)), f"data.source={root / 'tokens'}", *settings]
    arguments += [f"checkpoint.mirror={root / 'mirror'}", "evaluation.interval=0"]
    return ForkedRanks(count, arguments, folder=root / name, command=train_with_short_leases)


def test_two_starts_of_one_run(tmp_path: Path) -> None:
    with machine(tmp_path, "first", "run.steps=100000", "checkpoint.interval=5", count=2) as first:
        run = tmp_path / "first" / "runs" / "tiny"
        first.wait_until(lambda: max(metrics(run), default=0) >= 10)
        second = machine(tmp_path, "second").wait(60)
        assert second.codes == [1], second.everything
        assert "This run is trained by" in second.err[0] and "Traceback" not in second.err[0]
        assert not (tmp_path / "second" / "runs" / "tiny" / "checkpoints").exists()

        # As if the first machine had slept until the lease had expired.
        other = Lease(
            DirectoryBucket(tmp_path / "mirror"), PREFIX, token="3", training=this_process()
        )

        def takes_it() -> bool:
            (tmp_path / "mirror" / PREFIX / lease.LEASE_FILE).unlink(missing_ok=True)
            try:
                return other.renew() is None
            except BucketError:  # the first was faster
                return False

        first.wait_until(takes_it)
        ended = first.wait(60)
    assert ended.codes == [1, 1], ended.everything
    assert ended.everything.count("This run is trained by") == 1, ended.everything
    assert "Nothing more is written" in ended.err[0] and "Traceback" not in ended.everything


def test_the_next_machine_starts_at_once_after_a_stop(tmp_path: Path) -> None:
    with machine(tmp_path, "first", "run.steps=100000") as first:
        run = tmp_path / "first" / "runs" / "tiny"
        first.wait_until(lambda: max(metrics(run), default=0) >= 3)
        (run / "STOP").touch()
        ended = first.wait(60)
    assert ended.codes == [130], ended.everything
    bucket = DirectoryBucket(tmp_path / "mirror")
    there, _ = lease.read_lease(bucket, f"{PREFIX}/{lease.LEASE_FILE}")
    state = json.loads((run / "state.json").read_text())
    assert there is not None and there.branch is not None, "the head of the run"
    assert (there.branch.run_id, there.trained_by) == (state["run_id"], state["lease"])
    last = Lease(bucket, PREFIX, token="next", training=this_process())
    first.wait_until(lambda: last.renew() is None)
