from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, make_step
from commands.run_samples import SampleRun
from fakes import Emulator

from refocused.checkpoints.mirror.mirror_status import MirrorFiles
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.system.locks import FileLock


def test_a_step_is_downloaded_verified_into_the_run(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(9500, validation_loss=2.0), keep=False)
    sample_run.mirror(sample_run.save(10000), keep=False)
    code, out, err = sample_run.command("download", "best")
    assert (code, err) == (0, "")
    path = sample_run.checkpoints / "checkpoint_step_9500"
    assert out.startswith(f"{path}: 7 files, 7.0 kB, all verified, downloaded in ")
    assert sample_run.local_steps() == [9500]
    assert verify(read_step(path), deep=True) == []


def test_a_step_that_is_here_is_not_downloaded_unless_a_byte_is_wrong(
    sample_run: SampleRun,
) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    assert sample_run.command_json("download", "latest")["downloaded"] is False
    flip_byte(step.trainer)
    content = sample_run.command_json("download", "checkpoint_step_10")
    assert (content["downloaded"], content["bytes"]) == (True, 7000)
    assert verify(step, deep=True) == []


def test_a_run_that_is_only_in_the_bucket_gets_a_folder(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(10))
    sample_run.folder.rename("elsewhere")
    code, _, err = sample_run.command(
        "download", "10", "--run", "one", "--bucket", sample_run.bucket
    )
    assert (code, err) == (0, "")
    assert sample_run.local_steps() == [10]


def test_another_folder_can_be_named_and_keeps_what_it_has(
    sample_run: SampleRun, tmp_path: Path
) -> None:
    sample_run.mirror(sample_run.save(10), keep=False)
    sample_run.mirror(sample_run.save(20), keep=False)
    other = make_step(tmp_path / "copies", 10, seed=99)
    assert sample_run.command("download", "latest", "--to", "copies")[0] == 0
    assert sample_run.local_steps() == []
    assert verify(read_step(tmp_path / "copies" / "checkpoint_step_20"), deep=True) == []
    code, _, err = sample_run.command("download", "10", "--to", "copies")
    assert code == 1
    assert "exists and is not a copy of" in err
    assert verify(other, deep=True) == []
    assert sample_run.command_json("download", "20", "--to", "copies")["downloaded"] is False


def test_a_damaged_object_is_refused_and_nothing_appears(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(10), keep=False)
    flip_byte(sample_run.there(10, "trainer.json"))
    code, _, err = sample_run.command("download", "10")
    assert code == 1
    assert "damaged: trainer.json has CRC-32C" in err
    assert sample_run.local_steps() == []


@pytest.mark.parametrize("verb", ["download", "upload"])
def test_without_a_bucket_one_is_asked_for(sample_run: SampleRun, verb: str) -> None:
    sample_run.save(10)
    code, _, err = sample_run.command(verb, "10")
    assert code == 2
    assert "--bucket gs://bucket/prefix" in err


@pytest.mark.parametrize("verb", ["download", "upload"])
def test_a_path_is_not_what_these_verbs_take(sample_run: SampleRun, verb: str) -> None:
    sample_run.tell_of_mirror()
    code, _, err = sample_run.command(verb, sample_run.save(10).path)
    assert code == 2
    assert "give its number or name" in err


def test_an_upload_completes_what_is_missing_newest_first(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(10))
    interrupted = sample_run.save(20)
    sample_run.mirror(interrupted)
    sample_run.there(20, COMMITTED).unlink()
    sample_run.there(20, "trainer.json").unlink()
    sample_run.save(30)
    content = sample_run.command_json("upload", "all")
    assert (content["uploaded"], content["there"], content["failed"]) == ([30, 20], [10], {})
    assert [step["bucket"] for step in sample_run.command_json("list")["steps"]] == ["ok"] * 3
    assert sample_run.there(20, "trainer.json").read_bytes() == interrupted.trainer.read_bytes()


def test_one_step_alone_is_uploaded_to_a_bucket_of_choice(
    sample_run: SampleRun, tmp_path: Path
) -> None:
    for step in (10, 20):
        sample_run.save(step)
    (tmp_path / "bucket").mkdir()
    code, out, err = sample_run.command("upload", "10", "--bucket", tmp_path / "bucket")
    assert (code, err) == (0, "")
    assert out.startswith("uploaded: 10\n")
    assert "1 of 1 steps are whole there" in out
    assert sample_run.there(10, COMMITTED).is_file()
    assert not sample_run.there(20).exists()


def test_a_copy_that_lost_an_object_after_its_marker_is_repaired(sample_run: SampleRun) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    sample_run.there(10, "run.yaml").unlink()
    assert sample_run.command_json("upload", "10")["uploaded"] == [10]
    assert sample_run.there(10, "run.yaml").read_bytes() == step.run.read_bytes()


def test_a_step_damaged_here_fails_and_does_not_keep_the_others_back(sample_run: SampleRun) -> None:
    sample_run.tell_of_mirror()
    sample_run.save(10)
    flip_byte(sample_run.save(20).trainer)
    sample_run.save(30).model.unlink()
    content = sample_run.command_json("upload", "all", code=1)
    assert content["uploaded"] == [10]
    assert "trainer.json has CRC-32C" in content["failed"]["20"]
    assert "model.json is missing" in content["failed"]["30"]
    assert not sample_run.there(20, COMMITTED).exists()


def test_a_step_that_is_only_in_the_bucket_cannot_be_uploaded(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(10), keep=False)
    code, _, err = sample_run.command("upload", "10")
    assert code == 1
    assert "there is nothing to upload" in err


def test_an_upload_does_not_work_beside_the_runs_mirror(sample_run: SampleRun) -> None:
    sample_run.tell_of_mirror()
    sample_run.save(10)
    lock = FileLock(MirrorFiles(sample_run.folder).lock)
    assert lock.acquire()
    code, _, err = sample_run.command("upload", "all")
    assert code == 1
    assert "its mirror, or another upload" in err
    lock.release()
    assert sample_run.command("upload", "all")[0] == 0


@pytest.mark.bucket
def test_an_object_store_gets_steps_shows_damage_and_gives_them_back(
    sample_run: SampleRun, emulator: Emulator
) -> None:
    bucket = ("--bucket", f"{emulator.url}/mirror")
    for step in (10, 20, 30):
        sample_run.save(step)
    assert sample_run.command_json("upload", "all", *bucket)["uploaded"] == [30, 20, 10]
    assert sample_run.command_json("prune", "--keep", "2", "--yes", *bucket)["removed"] == [10]
    assert sample_run.command("verify", "all", *bucket)[0] == 0
    emulator.put("mirror/one/checkpoints/checkpoint_step_20/trainer.json", b"x" * 1000)
    code, out, _ = sample_run.command("verify", "all", *bucket)
    assert code == 3
    assert "bucket trainer.json has CRC-32C" in out
    assert sample_run.command_json("upload", "20", *bucket)["uploaded"] == [20]
    assert sample_run.command_json("download", "10", *bucket)["downloaded"] is True
    assert sample_run.command("verify", "all", "--deep", *bucket)[0] == 0
