"""`checkpoints verify`: which damage it finds, where, and how it reports it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, reseal
from commands.run_samples import SampleRun

from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_checkpoint

SHARD = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"


def other_manifest(step: Path) -> None:
    content = json.loads((step / COMMITTED).read_text())
    (step / COMMITTED).write_text(json.dumps(content | {"manifest_crc32c": 1}))


def test_whole_steps_pass_in_both_places(sample_run: SampleRun) -> None:
    sample_run.mirror(sample_run.save(9500), keep=False)
    sample_run.mirror(sample_run.save(10000))
    sample_run.save(10500)
    for deep, how in (("", "--deep reads every byte"), ("--deep", "(read every byte)")):
        code, out, err = sample_run.command("verify", "all", *deep.split())
        assert (code, err) == (0, "")
        *lines, last = out.splitlines()
        assert lines == [
            "checkpoint_step_10500   local ok   bucket -",
            "checkpoint_step_10000   local ok   bucket ok",
            "checkpoint_step_9500   local -   bucket ok",
        ]
        assert "3 of 3 checkpoints are whole" in last and how in last


@pytest.mark.parametrize(
    ("place", "damage", "problem", "is_deep"),
    [
        ("local", lambda step: flip_byte(step / "run.yaml"), "run.yaml has CRC-32C", True),
        ("local", lambda at: reseal(at, SHARD, b"no states"), f"{SHARD} cannot be loaded", False),
        ("local", lambda at: reseal(at, "trainer.json", b'{"step": 9}'), "of step 9, not", False),
        *(
            ("local", lambda step, file=file: (step / file).unlink(), file, False)
            for file in ("manifest.json", "trainer.json", "ranks/rank_00001.pt")
        ),
        *(
            ("bucket", lambda step, file=file: (step / file).unlink(), f"{file} is missing", False)
            for file in ("manifest.json", "trainer.json")
        ),
        ("bucket", lambda step: (step / COMMITTED).write_text(""), "COMMITTED is unusable", False),
        ("bucket", other_manifest, "but COMMITTED says 00000001", False),
        ("bucket", lambda step: flip_byte(step / "model.json"), "model.json has CRC-32C", True),
        (
            "bucket",
            lambda at: (at / "zero/x").touch(),
            "zero/x exists but is not in the man",
            False,
        ),
    ],
)
def test_an_object_lost_or_spoilt_after_the_marker_is_named(
    sample_run: SampleRun, place: str, damage: Callable[[Path], None], problem: str, is_deep: bool
) -> None:
    step = sample_run.save(10)
    if place == "bucket":
        sample_run.mirror(step)
    sample_run.save(20)
    damage(step.path if place == "local" else sample_run.there(10))
    deep = ["--deep"] if is_deep else []
    assert sample_run.command("verify", "10")[0] == (0 if is_deep else 3)
    code, out, _ = sample_run.command("verify", "all", *deep)
    assert code == 3
    assert f"  {place:<6} " in out and problem in out
    assert "1 of 2 checkpoints are whole" in out
    assert sample_run.command("verify", "20", *deep)[0] == 0
    [check] = sample_run.command_json("verify", "10", *deep, code=3)
    assert (check[place], check["whole"]) == ("broken", False)
    [found] = check[f"{place}_problems"]
    assert f"{found['file']} {found['problem']}".find(problem) >= 0
    if place == "bucket":
        assert check["local"] == "ok"
        assert sample_run.command("verify", "10", *deep, "--local")[0] == 0


def test_another_save_of_the_same_step_in_the_bucket_is_found(sample_run: SampleRun) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    remove_checkpoint(step.path)
    sample_run.save(10, seed=99, created="2026-11-28T00:00:00Z")
    code, out, _ = sample_run.command("verify", "10")
    assert code == 3
    assert "belongs to another save of this step than the local one" in out


def test_a_copy_still_under_way_is_wrong_only_when_nothing_else_is_whole(
    sample_run: SampleRun,
) -> None:
    step = sample_run.save(10)
    sample_run.mirror(step)
    sample_run.there(10, COMMITTED).unlink()
    sample_run.there(10, "run.yaml").unlink()
    [check] = sample_run.command_json("verify", "10")
    assert (check["local"], check["bucket"], check["whole"]) == ("ok", "85 %", True)
    remove_checkpoint(step.path)
    [check] = sample_run.command_json("verify", "10", code=3)
    assert (check["local"], check["bucket"], check["whole"]) == ("-", "85 %", False)
