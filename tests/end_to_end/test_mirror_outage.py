"""A mirror that is down for the whole run: training continues, a later run completes the copy."""

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from fakes import Emulator, Fault, Request
from ranks import ForkedRanks, metrics, train, until
from tiny import tiny_run

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket

pytestmark = pytest.mark.slow
SETTINGS = ["--config", "tiny.yaml", "evaluation.interval=0", "checkpoint.drain_minutes=0.03"]
COPIED = {f"tiny/checkpoints/checkpoint_step_{step}/COMMITTED" for step in (10, 20)}


def test_a_mirror_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    obstacle = tmp_path / "mirror"
    obstacle.write_text("a file, so that nothing can be below it")
    settings = [*SETTINGS, "checkpoint.mirror=mirror/below"]
    ended = train(tmp_path, *settings, "--resume", "none", code=5)
    assert "mirror mirror/below: NOT complete yet, see runs/tiny/mirror.json" in ended.out[0]
    assert "Traceback" not in ended.everything
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == list(range(1, 21))

    obstacle.unlink()
    again = train(tmp_path, *settings)
    assert "resume   step 20" in again.out[0]
    assert "mirror mirror/below: everything is there" in again.out[0]
    assert mirrored(DirectoryBucket(tmp_path / "mirror" / "below")) >= COPIED


def test_the_command_at_the_end_waits_until_the_mirror_is_complete(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    obstacle, ended_with = tmp_path / "mirror", tmp_path / "ended"
    obstacle.write_text("a file, so that nothing can be below it")
    command = f"find mirror -name COMMITTED > {ended_with}.part; true SECRET"
    command += f"; mv {ended_with}.part {ended_with}"
    settings = [*SETTINGS, "checkpoint.mirror=mirror/below", f"run.on_end={command}"]
    ended = train(tmp_path, *settings, "--resume", "none", code=5)
    assert "run.on_end runs in the background, as soon as the mirror is complete" in ended.out[0]
    log = tmp_path / "runs" / "tiny" / "logs" / "training.log"
    until(lambda: "run.on_end still waits for the mirror (" in log.read_text(), said=log.read_text)
    assert not ended_with.exists()
    obstacle.unlink()
    until(ended_with.exists, seconds=120, said=log.read_text)
    assert {Path(line).parent.name for line in ended_with.read_text().split()} >= {
        "checkpoint_step_10",
        "checkpoint_step_20",
    }
    files = [path for place in ("runs", "mirror") for path in (tmp_path / place).rglob("*")]
    assert len(files) > 20
    assert not [path for path in files if path.is_file() and b"SECRET" in path.read_bytes()]


def mirrored(bucket: Bucket) -> set[str]:
    return {blob.name for blob in bucket.list("tiny/")}


@dataclasses.dataclass
class Outage:
    """Whether the store rejects uploads."""

    on: bool = True

    def meets(self, request: Request) -> bool:
        return self.on and request.method != "GET"


@pytest.mark.bucket
def test_a_store_that_rejects_uploads(tmp_path: Path, emulator: Emulator) -> None:
    tiny_run(tmp_path)
    outage = Outage()
    emulator.proxy.script(outage.meets, Fault(status=503, message="down"), times=10_000)
    environment = {"STORAGE_EMULATOR_HOST": emulator.proxy.url}
    settings = [*SETTINGS, f"checkpoint.mirror={emulator.url}/runs"]
    ended = train(tmp_path, *settings, environment=environment, code=5)
    assert f"mirror {emulator.url}/runs: NOT complete yet" in ended.out[0]
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == list(range(1, 21))
    bucket = open_bucket(f"{emulator.url}/runs")
    assert not mirrored(bucket)

    outage.on = False
    train(tmp_path, *settings, "checkpoint.drain_minutes=1", environment=environment)
    assert mirrored(bucket) >= COPIED


@pytest.mark.bucket
def test_a_signal_ends_the_wait_but_not_the_mirror(tmp_path: Path, emulator: Emulator) -> None:
    tiny_run(tmp_path)
    slowness = Outage()
    emulator.proxy.script(slowness.meets, Fault(delay_s=2.0), times=10_000)
    environment = {"STORAGE_EMULATOR_HOST": emulator.proxy.url}
    settings = [*SETTINGS, f"checkpoint.mirror={emulator.url}/runs", "checkpoint.drain_minutes=5"]
    settings.append("run.on_end=touch ended")  # not with a person at the terminal
    ranks = ForkedRanks(2, settings, folder=tmp_path, environment=environment)
    ranks.wait_until((tmp_path / "runs" / "tiny" / "mirror.drain").exists)
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [5, 5], ended.everything
    assert "NOT complete yet" in ended.out[0] and "Traceback" not in ended.everything
    state = json.loads((tmp_path / "runs" / "tiny" / "state.json").read_text())
    assert (state["status"], state["step"], state["mirrored"]) == ("finished", 20, False)

    slowness.on = False
    bucket = open_bucket(f"{emulator.url}/runs")
    log = tmp_path / "runs/tiny/logs/mirror.log"
    until(lambda: mirrored(bucket) >= COPIED, said=log.read_text)  # by the mirror alone
    assert "run.on_end runs" not in ended.out[0] and not log.with_name("on_end.log").exists()


@pytest.mark.bucket
def test_an_unlistable_store_is_ignored_with_a_local_checkpoint(
    tmp_path: Path, emulator: Emulator
) -> None:
    tiny_run(tmp_path)
    environment = {"STORAGE_EMULATOR_HOST": emulator.proxy.url}
    settings = [*SETTINGS, f"checkpoint.mirror={emulator.url}/runs"]
    no_entry = Fault(status=403, message="no entry")
    emulator.proxy.script(lambda request: True, no_entry, times=10_000)
    refused = train(tmp_path, *settings, environment=environment, code=1)
    assert refused.err[0].count("or from step 0 with --resume none") == 1
    train(tmp_path, *settings, "--resume", "none", "run.steps=10", environment=environment, code=5)
    resumed = train(tmp_path, *settings, environment=environment, code=5)
    assert "Using only the checkpoints on this disk." in resumed.err[0]
    assert "resume   step 10" in resumed.out[0]
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == list(range(1, 21))
