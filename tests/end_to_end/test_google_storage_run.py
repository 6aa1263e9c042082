"""A run with data and mirror on gs:// or s3://: resumed after its machine is lost."""

import shutil
from pathlib import Path

import pytest
from fakes import ON_EACH, Emulator, Fault
from ranks import train
from tiny import losses, tiny_run, wait_for_the_mirror

from refocused.bucket.open_bucket import open_bucket

pytestmark = [pytest.mark.slow, pytest.mark.bucket]


@ON_EACH
def test_a_lost_machine_loses_no_mirrored_step(tmp_path: Path, emulator: Emulator) -> None:
    tiny_run(tmp_path)
    for shard in sorted((tmp_path / "tokens").iterdir()):
        emulator.put(f"data/{shard.name}", shard.read_bytes())
    shutil.rmtree(tmp_path / "tokens")
    settings = [
        "--config",
        "tiny.yaml",
        f"data.source={emulator.url}/data",
        f"checkpoint.mirror={emulator.url}/runs",
    ]
    environment = emulator.environment
    emulator.proxy.script(lambda request: request.is_download, Fault(cut_after=100), times=2)
    emulator.proxy.script(lambda request: request.is_upload, Fault(lose_reply=True), times=2)
    emulator.proxy.script(lambda request: request.is_upload, Fault(status=503), times=2)
    run = tmp_path / "runs" / "tiny"
    ended = train(tmp_path, *settings, ranks=2, environment=environment)
    assert f"mirror {emulator.url}/runs: everything is there" in ended.out[0]
    wanted = losses(run)
    assert sorted(wanted) == list(range(1, 21))

    wait_for_the_mirror(run)
    bucket = open_bucket(f"{emulator.url}/runs")
    for blob in list(bucket.list("tiny/checkpoints/checkpoint_step_20/")):
        bucket.delete(blob.name)  # as if the machine had been lost
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "cache")
    resumed = train(tmp_path, *settings, ranks=2, environment=environment)
    assert "Downloading checkpoint_step_10 from the bucket" in resumed.out[0]
    assert "resume   step 10 " in resumed.out[0]
    assert losses(run) == wanted  # including those before step 10
    names = {blob.name for blob in bucket.list("tiny/checkpoints/")}
    for step in (10, 20):
        assert f"tiny/checkpoints/checkpoint_step_{step}/COMMITTED" in names

    # Another run imports the checkpoint.
    address = f"{emulator.url}/runs/tiny/checkpoints/checkpoint_step_10"
    branch = [*settings, "--run", "other", "--resume", address, "--max-steps", "12"]
    refused = train(tmp_path, *branch, ranks=1, environment=environment, code=1)
    assert "add --trust" in refused.err[0], refused.everything
    taken = train(tmp_path, *branch, "--trust", ranks=1, environment=environment)
    assert "resume   step 10 " in taken.out[0]
    assert sorted(losses(tmp_path / "runs" / "other")) == [11, 12]
    committed = "other/checkpoints/checkpoint_step_10/COMMITTED"
    assert committed in {blob.name for blob in bucket.list("other/checkpoints/")}
