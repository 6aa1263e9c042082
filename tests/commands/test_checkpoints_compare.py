from __future__ import annotations

from checkpoints.step_samples import flip_byte, make_readable_step
from commands.run_samples import SampleRun


def test_two_steps_are_shown_side_by_side(sample_run: SampleRun) -> None:
    sample_run.save_readable(10, settings={"optimizer": {"lr": 0.0003}}, loss=3.0)
    sample_run.save_readable(2000, settings={"optimizer": {"lr": 0.0006}}, loss=2.5)
    code, out, err = sample_run.command("compare", "10", "latest")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["A", "runs/one/checkpoints/checkpoint_step_10"]
    assert rows[1] == ["B", "runs/one/checkpoints/checkpoint_step_2000"]
    assert ["loss", "3.0000", "2.5000", "-0.5000"] in rows
    assert ["validation_loss", "unknown", "unknown"] in rows
    assert ["step", "10", "2,000"] in rows
    assert ["optimizer.lr", "0.0003", "0.0006"] in rows
    assert not [row for row in rows if row and row[0] == "world_size"]


def test_a_step_in_the_bucket_is_compared_with_one_of_another_run(sample_run: SampleRun) -> None:
    here = make_readable_step(sample_run.folder.parent / "two" / "checkpoints", 5).path
    step = sample_run.save_readable(10, settings={"run": {"name": "sample", "seed": 2}})
    sample_run.mirror(step, keep=False)
    content = sample_run.command_json("compare", "10", here, "--run", "one")
    assert content["a"].endswith("bucket/one/checkpoints/checkpoint_step_10")
    assert content["b"] == str(here)
    assert content["settings"] == [{"name": "run.seed", "a": 2, "b": None, "only_in": "a"}]
    assert content["losses"][0] == {"name": "loss", "a": 2.5, "b": 2.5, "change": 0.0}


def test_equal_settings_are_said_to_be_equal(sample_run: SampleRun) -> None:
    for step in (10, 20):
        sample_run.save_readable(step)
    assert "settings that differ: none" in sample_run.command("compare", "10", "20")[1]


def test_a_corrupt_or_missing_step_is_not_compared(sample_run: SampleRun) -> None:
    sample_run.save_readable(10)
    flip_byte(sample_run.save_readable(20).run)
    code, out, err = sample_run.command("compare", "10", "20")
    assert (code, out) == (1, "")
    assert "run.yaml has CRC-32C" in err
    code, _, err = sample_run.command("compare", "10", "30")
    assert code == 1
    assert "There is no checkpoint '30'" in err


def test_a_bucket_that_is_down_is_asked_and_told_once(sample_run: SampleRun) -> None:
    for step in (10, 20):
        sample_run.save_readable(step)
    code, out, err = sample_run.command("compare", "10", "20", "--bucket", "gone")
    assert code == 1
    assert "settings that differ: none" in out
    assert err.count("Only the local steps are looked at.") == 1
