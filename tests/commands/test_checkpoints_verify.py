from __future__ import annotations

import json

import pytest
from checkpoints.step_samples import flip_byte, reseal
from commands.run_samples import SampleRun

from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, SUPERSEDED
from refocused.checkpoints.step.staging import remove_step


def test_whole_steps_pass_in_both_places(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(9500), keep=False)
    sample_run.mirror(sample_run.save(10000))
    sample_run.save(10500)
    for deep in ([], ["--deep"]):
        code, out, err = sample_run.command("verify", "all", *deep)
        assert (code, err) == (0, "")
        assert out.splitlines()[:3] == [
            "checkpoint_step_10500   local ok   bucket -",
            "checkpoint_step_10000   local ok   bucket ok",
            "checkpoint_step_9500   local -   bucket ok",
        ]
        assert "3 of 3 steps are whole" in out


def test_a_flipped_byte_is_found_by_reading_every_byte(sample_run: SampleRun) -> None:
    flip_byte(sample_run.save(10).run)
    sample_run.save(20)
    code, out, _ = sample_run.command("verify", "all")
    assert code == 0
    assert "--deep reads every byte" in out
    code, out, _ = sample_run.command("verify", "all", "--deep")
    assert code == 3
    assert "local  run.yaml has CRC-32C" in out
    assert "1 of 2 steps are whole" in out
    assert sample_run.command("verify", "20", "--deep")[0] == 0
    assert sample_run.command("verify", "10", "--deep")[0] == 3


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_file_that_no_resume_could_load_is_found(sample_run: SampleRun, deep: list[str]) -> None:
    shard = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    reseal(sample_run.save(10).path, shard, b"what was written, and no states")
    reseal(sample_run.save(20).path, "trainer.json", b'{"step": 10}')
    sample_run.save(30)
    code, out, _ = sample_run.command("verify", "all", *deep)
    assert code == 3
    assert f"local  {shard} cannot be loaded" in out
    assert "local  trainer.json is of step 10, not of step 20" in out
    assert "1 of 3 steps are whole" in out


@pytest.mark.parametrize("file", ["manifest.json", "trainer.json", "ranks/rank_00001.pt"])
def test_a_file_lost_here_is_named(sample_run: SampleRun, file: str) -> None:
    (sample_run.save(10).path / file).unlink()
    [check] = sample_run.command_json("verify", "10", code=3)
    assert (check["local"], check["whole"]) == ("broken", False)
    assert [problem["file"] for problem in check["local_problems"]] == [file]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("manifest.json", "is missing"),
        ("trainer.json", "is missing"),
        (COMMITTED, "cannot be used: "),
    ],
)
def test_an_object_lost_or_spoilt_after_the_marker_is_named(
    sample_run: SampleRun, file: str, problem: str
) -> None:
    sample_run.mirror(sample_run.save(10))
    if file == COMMITTED:
        sample_run.there(10, file).write_text("")
    else:
        sample_run.there(10, file).unlink()
    [check] = sample_run.command_json("verify", "10", code=3)
    assert (check["local"], check["bucket"]) == ("ok", "broken")
    [found] = check["bucket_problems"]
    assert found["file"] == file
    assert found["problem"].startswith(problem)
    assert sample_run.command("verify", "10", "--local")[0] == 0


def test_another_manifest_and_a_changed_byte_in_the_bucket_are_found(sample_run: SampleRun) -> None:
    for step in (10, 20):
        sample_run.mirror(sample_run.save(step), keep=False)
    marker = sample_run.there(10, COMMITTED)
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"manifest_crc32c": 1}))
    code, out, _ = sample_run.command("verify", "10")
    assert code == 3
    assert "but COMMITTED says 00000001" in out
    flip_byte(sample_run.there(20, "model.json"))
    assert sample_run.command("verify", "20")[0] == 0
    code, out, _ = sample_run.command("verify", "20", "--deep")
    assert code == 3
    assert "bucket model.json has CRC-32C" in out


def test_objects_that_nobody_vouches_for_are_named(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(10))
    sample_run.there(10, "zero/stray.pt").write_text("x")
    [check] = sample_run.command_json("verify", "10", code=3)
    assert check["bucket_problems"] == [
        {"file": "zero/stray.pt", "problem": "is there but not in the manifest"}
    ]


def test_another_save_of_the_same_step_in_the_bucket_is_found(sample_run: SampleRun) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    remove_step(step.path)
    sample_run.save(10, seed=99, created="2026-11-28T00:00:00Z")
    code, out, _ = sample_run.command("verify", "10")
    assert code == 3
    assert "is of another save of this step than the one here" in out
    sample_run.there(10, SUPERSEDED).touch()
    assert sample_run.command("verify", "10")[0] == 0


def test_a_copy_still_under_way_is_wrong_only_when_nothing_else_is_whole(
    sample_run: SampleRun,
) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    sample_run.there(10, COMMITTED).unlink()
    sample_run.there(10, "run.yaml").unlink()
    [check] = sample_run.command_json("verify", "10")
    assert (check["local"], check["bucket"], check["whole"]) == ("ok", "85 %", True)
    remove_step(step.path)
    [check] = sample_run.command_json("verify", "10", code=3)
    assert (check["local"], check["bucket"], check["whole"]) == ("-", "85 %", False)
