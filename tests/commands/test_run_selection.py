"""Checkpoints and models named by their address in an object store, and their local copies."""

import json
from pathlib import Path

import pytest
from evaluate.small_models import small_model

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.commands.main import run_command
from refocused.commands.run_selection import RunChoice, local_step
from refocused.evaluate.export_copy import upload_folder
from refocused.system.errors import CheckpointError

pytestmark = pytest.mark.bucket
OPTIONS = RunChoice()


def test_a_step_is_fetched_by_its_address_unless_another_has_its_name(sample_run, emulator):
    step = sample_run.save_readable(10, validation_loss=1.0)
    bucket = f"{emulator.url}/mirror"
    assert sample_run.command_json("upload", "10", "--bucket", bucket)["uploaded"] == [10]
    for role in ("best", "latest"):
        assert local_step(f"{bucket}/one/checkpoints/{role}", OPTIONS).path == step.path
    address = f"{bucket}/one/checkpoints/checkpoint_step_10/"
    assert local_step(address, OPTIONS).path == step.path  # the copy that is here
    remove_checkpoint(step.path)
    assert sample_run.command_json("info", address)["local"] == "-"
    assert local_step(address, OPTIONS).path == Path("runs/one/checkpoints/checkpoint_step_10")
    assert step.path.is_dir()
    with pytest.raises(CheckpointError, match=r"no checkpoint 'checkpoint_step_11'.*Nearest"):
        local_step(address.removesuffix("10/") + "11", OPTIONS)
    remove_checkpoint(step.path)
    mine = sample_run.save_readable(10, loss=1.0)
    before = (mine.path / "trainer.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"checkpoint_step_10 exists and is not a copy of"):
        local_step(address, OPTIONS)
    assert (mine.path / "trainer.json").read_bytes() == before


def test_a_run_that_is_only_in_a_bucket_gets_the_folder_that_is_named(sample_run, tmp_path):
    sample_run.mirror(sample_run.save_readable(10), keep=False)
    for run, folder in (("one", Path("runs/one")), ("elsewhere/one", Path("elsewhere/one"))):
        found = sample_run.command_json(
            "download", 10, "--run", run, "--bucket", tmp_path / "bucket"
        )
        assert found["path"] == str(folder / "checkpoints" / "checkpoint_step_10")


@pytest.mark.parametrize("lost", ["COMMITTED", "model.json"])
def test_a_half_uploaded_step_is_neither_measured_nor_asked(sample_run, emulator, lost, capsys):
    step = sample_run.save_readable(10)
    bucket = f"{emulator.url}/mirror"
    sample_run.command("upload", "10", "--bucket", bucket)
    remove_checkpoint(step.path)
    open_bucket(bucket).delete(f"one/checkpoints/checkpoint_step_10/{lost}")
    Path("story.txt").write_text("once upon a time")
    address = f"{bucket}/one/checkpoints/checkpoint_step_10"
    for request in ([address], ["10", "--run", "one", "--bucket", bucket]):
        for command, arguments in (
            ("evaluate", ["--tasks", "story.txt", "--device", "cpu"]),
            ("generate", ["once", "--device", "cpu"]),
        ):
            assert run_command(command, [*request, *arguments]) == 1
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)
            assert "checkpoint_step_10 cannot be read: " in err
            assert lost == "COMMITTED" or "unusable: bucket: 1 of 7 files" in err
    assert not step.path.exists()


def test_an_export_in_a_bucket_is_measured_and_asked(tmp_path, emulator, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = small_model()
    model.network.save_pretrained("model")
    model.tokenizer.save_pretrained("model")
    upload_folder(Path("model"), open_bucket(f"{emulator.url}/mirror"), "one/final_model")
    address = f"{emulator.url}/mirror/one/final_model"
    Path("story.txt").write_text("once upon a time")
    options = ["--tasks", "story.txt", "--device", "cpu", "--json"]
    told = []
    for source in (address, "model"):
        assert run_command("evaluate", [source, *options]) == 0
        told.append(json.loads(capsys.readouterr().out))
    here = Path("data/models") / emulator.bucket / "mirror/one/final_model"
    assert told[0]["model"] == str(here)
    perplexities = [one["tasks"]["story"]["perplexity"] for one in told]
    assert perplexities[0] == perplexities[1]
    done = len(emulator.proxy.requests)
    assert run_command("generate", [address, "once", "--tokens", "3", *options[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3
    again = [one.path for one in emulator.proxy.requests[done:] if one.is_download]
    assert [path.rpartition("/")[2] for path in again] == ["COMMITTED"]  # the copy was taken
    open_bucket(address).delete("COMMITTED")
    assert run_command("evaluate", [address, "--tasks", "story.txt", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert f"{address} has no COMMITTED object" in err
