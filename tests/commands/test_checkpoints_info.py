from __future__ import annotations

from checkpoints.step_samples import flip_byte, make_readable_step
from commands.run_samples import SampleRun


def test_a_step_is_shown_with_all_that_its_files_say(sample_run: SampleRun) -> None:
    sample_run.save_readable(
        9500, validation_loss=2.0, best_loss=1.9, best_step=9000, seconds=5400.0, cost_usd=12.5
    )
    code, out, err = sample_run.command("info", "9500")
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert lines[0] == ["checkpoint_step_9500", "latest, best"]
    rows = dict(lines[1:])
    assert rows["alias"] == "checkpoint-epoch0-step9500-files950"
    assert rows["saved"].startswith("2026-11-27 22:20:00 UTC (")
    assert rows["trained"] == "9,500 steps, 9.73 M tokens, epoch 0, 950 of its files done"
    assert rows["loss"] == ("training 2.5000, validation 2.0000, best so far 1.9000 at step 9,000")
    assert rows["spent"] == "1 h 30 min, $12.50"
    assert "1,000 parameters, 2 ranks, ZeRO stage 3, bf16" in rows["form"]
    assert "ranks/ 2.0 kB in 2, zero/ 2.0 kB in 2" in rows["files"]
    assert rows["local"] == "ok, runs/one/checkpoints/checkpoint_step_9500"
    assert "bucket" not in rows


def test_a_step_only_in_the_bucket_is_read_from_there(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save_readable(10, settings={"run": {"seed": 7}}), keep=False)
    content = sample_run.command_json("info", "latest")
    assert content["local"] == "-"
    assert content["read_from"].endswith("bucket/one/checkpoints/checkpoint_step_10")
    assert content["settings"] == {"run.seed": 7}
    assert content["trainer"]["tokens"] == 10240
    assert content["manifest"]["world_size"] == 2


def test_a_step_is_found_by_its_path_in_another_run(sample_run: SampleRun) -> None:
    path = make_readable_step(sample_run.folder.parent / "two" / "checkpoints", 7).path
    assert sample_run.command_json("info", path)["step"] == 7


def test_a_broken_step_is_shown_as_far_as_it_can_be(sample_run: SampleRun) -> None:
    sample_run.save_readable(10).path.joinpath("ranks/rank_00001.pt").unlink()
    code, out, _ = sample_run.command("info", "10")
    assert code == 0
    assert "incomplete: local: ranks/rank_00001.pt is missing" in out
    assert "alias" not in out
    assert sample_run.command_json("info", "10")["local"].startswith("broken")


def test_a_corrupt_training_state_is_not_shown(sample_run: SampleRun) -> None:
    flip_byte(sample_run.save_readable(10).trainer)
    code, out, err = sample_run.command("info", "10")
    assert (code, out) == (1, "")
    assert "trainer.json has CRC-32C" in err
    assert "verify --deep 10" in err


def test_an_unknown_step_is_refused_with_near_ones(sample_run: SampleRun) -> None:
    sample_run.save(9000)
    code, _, err = sample_run.command("info", "9001")
    assert code == 1
    assert "Nearest: checkpoint_step_9000." in err


def test_a_bucket_that_is_down_is_told_and_the_disk_is_shown(sample_run: SampleRun) -> None:
    sample_run.save_readable(10)
    code, out, err = sample_run.command("info", "10", "--bucket", "gone")
    assert code == 1
    assert "local      ok" in out
    assert "Only the local steps are looked at." in err
    assert sample_run.command("info", "10", "--bucket", "gone", "--local")[0] == 0
