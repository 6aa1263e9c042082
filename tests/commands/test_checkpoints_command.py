"""`checkpoints`: what is found, moved, removed and kept; the transcript shows what it prints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, reseal
from checkpoints.two_machines import Machines
from ranks import ROOT
from thread_ranks import results

from refocused.checkpoints.mirror.mirror import MirrorFiles
from refocused.checkpoints.step.checkpoint_directory import checkpoint_paths, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_checkpoint, set_aside, write_manifest
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import CheckpointError
from refocused.system.locks import FileLock


def test_the_steps_of_either_place_and_of_a_run_only_in_a_bucket(sample_run):
    def steps(*options):
        found = sample_run.command_json("list", *options)["steps"]
        return [(step["step"], step["bucket"]) for step in found]

    assert sample_run.command("list")[1].startswith("No checkpoints in runs/one/checkpoints.\n")
    sample_run.mirror(sample_run.save(10))
    sample_run.save(20)
    assert steps("--local") == [(10, "-"), (20, "-")]
    assert steps("--remote") == [(10, "ok")]
    MirrorFiles(sample_run.folder).status.unlink()
    assert steps() == [(10, "-"), (20, "-")]
    settings = f"run: {{name: one}}\ncheckpoint: {{mirror: {sample_run.bucket}}}\n"
    (sample_run.folder / "run.yaml").write_text(settings)
    assert steps() == [(10, "ok"), (20, "-")]
    sample_run.folder.rename("elsewhere")
    assert steps("--run", "one", "--bucket", sample_run.bucket) == [(10, "ok")]


def test_the_script_runs_from_any_folder_and_loads_no_torch(sample_run):
    sample_run.save(10)
    command = [sys.executable, "-X", "importtime", ROOT / "launch" / "checkpoints.py", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith("10 ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "refocused.checkpoints.resume.catalog" in imported
    assert not imported & {"torch", "google.cloud.storage", "checkpoints"}


def test_control_characters_of_a_foreign_manifest_are_escaped(sample_run):
    step = sample_run.save_readable(10)
    write_manifest(step.path, step.manifest.model_copy(update={"run": "\x1b]52;c;cHduZWQ=\x07"}))
    code, out, _ = sample_run.command("info", "10")
    assert code == 0 and "by run \\x1b]52;c;cHduZWQ=\\x07" in out
    assert "\x1b" not in out and "\x07" not in out
    error = CheckpointError("saved by run \x1b[2J\nand another line")
    assert str(error) == "saved by run \\x1b[2J\nand another line"


SHARD = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"


def other_manifest(step):
    content = json.loads((step / COMMITTED).read_text())
    (step / COMMITTED).write_text(json.dumps(content | {"manifest_crc32c": 1}))


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
    sample_run, place, damage, problem, is_deep
):
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


def test_another_save_of_the_same_step_in_the_bucket_is_found(sample_run):
    step = sample_run.save(10)
    sample_run.mirror(step)
    remove_checkpoint(step.path)
    sample_run.save(10, seed=99, created="2026-11-28T00:00:00Z")
    code, out, _ = sample_run.command("verify", "10")
    assert code == 3
    assert "belongs to another save of this step than the local one" in out


def test_a_copy_still_under_way_is_wrong_only_when_nothing_else_is_whole(sample_run):
    step = sample_run.save(10)
    sample_run.mirror(step)
    sample_run.there(10, COMMITTED).unlink()
    sample_run.there(10, "run.yaml").unlink()
    [check] = sample_run.command_json("verify", "10")
    assert (check["local"], check["bucket"], check["whole"]) == ("ok", "85 %", True)
    remove_checkpoint(step.path)
    [check] = sample_run.command_json("verify", "10", code=3)
    assert (check["local"], check["bucket"], check["whole"]) == ("-", "85 %", False)


def test_a_step_is_downloaded_verified_into_the_run(sample_run):
    sample_run.mirror(sample_run.save(9500, validation_loss=2.0), keep=False)
    sample_run.mirror(sample_run.save(10000), keep=False)
    flip_byte(sample_run.there(10000, "trainer.json"))
    code, _, err = sample_run.command("download", "10000")
    assert code == 1 and "corrupt: trainer.json has CRC-32C" in err
    assert sample_run.local_steps() == []
    flip_byte(sample_run.there(10000, "trainer.json"))
    code, out, err = sample_run.command("download", "best")
    assert (code, err) == (0, "")
    path = sample_run.checkpoints / "checkpoint_step_9500"
    assert out.startswith(f"{path}: 7 files, 7.0 kB, all verified, downloaded in ")
    assert sample_run.local_steps() == [9500]
    assert verify(read_checkpoint(path), deep=True) == []
    sample_run.folder.rename("elsewhere")
    options = ("--run", "one", "--bucket", sample_run.bucket)
    assert sample_run.command("download", "10000", *options)[0] == 0
    assert sample_run.local_steps() == [10000]


def test_an_upload_completes_what_is_missing_newest_first(sample_run):
    sample_run.mirror(sample_run.save(10))
    interrupted = sample_run.save(20)
    sample_run.mirror(interrupted)
    sample_run.there(20, COMMITTED).unlink()
    sample_run.there(20, "trainer.json").unlink()
    sample_run.save(30)
    content = sample_run.command_json("upload", "all")
    assert (content["uploaded"], content["there"], content["failed"]) == ([30, 20], [10], {})
    assert [step["bucket"] for step in sample_run.command_json("list")["steps"]] == ["ok"] * 3
    assert (
        sample_run.there(20, "trainer.json").read_bytes()
        == (interrupted.path / "trainer.json").read_bytes()
    )


def test_an_upload_does_not_work_beside_the_runs_mirror(sample_run):
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
def test_an_object_store_gets_steps_shows_damage_and_gives_them_back(sample_run, emulator):
    bucket = ("--bucket", f"{emulator.url}/mirror")
    sample_run.save_all(10, 20, 30)
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


@pytest.fixture
def machines(tmp_path, sample_run):
    """Two machines with disks of their own, each with its part of step 10."""
    found = Machines(tmp_path)
    results(found.save(10))
    sample_run.tell_of_mirror()
    return found


def be_on(node, machines, run):
    """Let the run's folder be that of one machine; return its step."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    shutil.copytree(machines.folders[node], run.checkpoints)
    return run.checkpoints / "checkpoint_step_10"


def test_a_part_is_called_one(machines, sample_run):
    path = be_on(1, machines, sample_run)
    code, out, _ = sample_run.command("list")
    assert code == 0
    assert out.splitlines()[1].split("   ")[3].strip() == "node 1 of 2"
    assert "unusable: local: node 1 of 2: its part" in out
    code, out, _ = sample_run.command("verify", "all", "--deep")
    assert code == 0
    assert "checkpoint_step_10   local node 1 of 2: its part   bucket -" in out
    flip_byte(path / "zero/rank_1.pt")
    code, out, _ = sample_run.command("verify", "10", "--deep")
    assert code == 3 and "zero/rank_1.pt has CRC-32C" in out


def test_each_machine_sends_its_part_and_a_download_makes_it_whole(machines, sample_run):
    for node, code in ((0, 5), (1, 5), (0, 0), (1, 0)):
        path = be_on(node, machines, sample_run)
        found, out, err = sample_run.command("upload", "all")
        assert (found, err) == (code, ""), out
        assert ("without the parts of other machines: 10" in out) == (code == 5)
        assert sample_run.there(10, COMMITTED).exists() == (code == 0)
    (entry,) = sample_run.command_json("list")["steps"]
    assert (entry["local"], entry["bucket"]) == ("node 1 of 2: its part", "ok")
    assert sample_run.command("download", "10")[0] == 0
    assert (path / "zero/rank_0.pt").exists() and not (path / "part.json").exists()
    (entry,) = sample_run.command_json("list")["steps"]
    assert (entry["local"], entry["bucket"]) == ("ok", "ok")


def test_the_newest_and_the_best_stay_and_what_the_disk_does_not_let_go(sample_run, monkeypatch):
    rename = Path.rename

    def refusing(path, target):
        if path.name == "checkpoint_step_900":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    for step, loss in ((900, 3.0), (1000, 2.0), (8000, None), (9500, 2.5), (10000, 2.6)):
        sample_run.save(step, validation_loss=loss)
    content = sample_run.command_json("prune", "--keep", "2", "--yes", code=1)
    assert (content["removed"], content["kept"]) == ([8000], [1000, 9500, 10000])
    assert (content["failed"], content["bytes"]) == ({"900": "Permission denied"}, 7000)
    assert sample_run.local_steps() == [900, 1000, 9500, 10000]


def test_what_the_mirror_lacks_is_never_removed(sample_run):
    for step in (10, 20, 30, 40, 50, 60):
        saved = sample_run.save(step)
        if step in (10, 30, 40):
            sample_run.mirror(saved)
    sample_run.there(30, COMMITTED).unlink()
    remove_checkpoint(sample_run.checkpoints / "checkpoint_step_40")
    sample_run.save(40, seed=99, created="2026-11-28T00:00:00Z")  # the bucket has another save
    content = sample_run.command_json("prune", "--keep", "2", "--yes")
    assert (content["removed"], content["unmirrored"]) == ([10], [20, 30, 40])
    assert sample_run.local_steps() == [20, 30, 40, 50, 60]
    sample_run.bucket.rename("away")  # and when it cannot be read, everything stays
    code, out, err = sample_run.command("prune", "--keep", "2", "--yes")
    assert (code, out) == (1, "")
    assert "does not exist" in err
    assert sample_run.local_steps() == [20, 30, 40, 50, 60]


def test_in_the_bucket_the_same_stay_and_what_is_on_its_way_too(sample_run):
    for step in (10, 20, 30, 40, 50, 60):
        changes = {"validation_loss": 1.0} if step == 10 else {}
        tiers = ["epoch"] if step == 20 else ["rolling"]
        sample_run.mirror(sample_run.save(step, tiers=tiers, **changes), keep=step > 50)
    sample_run.there(30, COMMITTED).unlink()  # half of an upload that nobody finishes
    content = sample_run.command_json("prune", "--remote", "--keep", "2", "--yes")
    assert (content["removed"], content["kept"]) == ([30, 40], [10, 20, 50, 60])
    assert content["where"] == f"{sample_run.bucket}/one/checkpoints"
    assert not sample_run.there(40).exists()
    assert sample_run.local_steps() == [60]
    listed = sample_run.command_json("list")
    assert [step["step"] for step in listed["steps"]] == [10, 20, 50, 60]
    assert listed["bucket_bytes"] > 4 * 7000


def test_what_was_set_aside_is_shown_and_removed_without_counting_as_kept(sample_run):
    sample_run.save_all(10, 20, 30)
    aside = [set_aside(sample_run.save(step).path) for step in (40, 50)]
    names = [path.name for path in aside]
    size = sum(file.stat().st_size for path in aside for file in path.rglob("*"))
    size -= sum(folder.stat().st_size for path in aside for folder in path.rglob("*/"))
    listed = sample_run.command_json("list")
    assert [step["step"] for step in listed["steps"]] == [10, 20, 30]
    assert listed["disk_bytes"]["aside"] == size
    assert " set aside (removed by checkpoints prune)" in sample_run.command("list")[1]
    content = sample_run.command_json("prune", "--keep", "2", "--dry-run")
    assert content["aside"] == names
    assert content["bytes"] == size + listed["steps"][0]["size"]
    assert all(path.exists() for path in aside)
    code, out, _ = sample_run.command("prune", "--keep", "2", "--yes")
    assert code == 0 and f"removed: {names[0]}, {names[1]}" in out
    assert sample_run.local_steps() == [20, 30]
    assert not any(path.exists() for path in aside)
    path = set_aside(sample_run.save(40).path)  # it alone is asked about too
    code, _, err = sample_run.command("prune", "--keep", "2")
    assert code == 2 and f"remove 0 of 2 checkpoints and {path.name}" in err
    assert path.exists()


def test_the_steps_of_a_branch_that_was_left_go_but_for_epochs(sample_run):
    sample_run.save_all(10, 20, 30)
    sample_run.save(40, tiers=["epoch"])
    sample_run.save(25, branch=2, ancestry=((1, 20),))
    sample_run.tell_of_mirror()
    code, _, err = sample_run.command("prune", "--keep", "9", "--yes")
    assert code == 0 and "checkpoint_step_30 is kept: the mirror lacks it" in err
    sample_run.mirror(read_checkpoint(sample_run.checkpoints / "checkpoint_step_30"))
    content = sample_run.command_json("prune", "--keep", "9", "--yes")
    assert (content["removed"], content["aside"]) == ([], ["checkpoint_step_30"])
    assert list(checkpoint_paths(sample_run.checkpoints)) == [
        *(f"checkpoint_step_{step}" for step in (10, 20, 40)),
        "branch-2/checkpoint_step_25",
    ]
