"""`checkpoints list`, `info`, `compare`, `plot`, and what every verb says to a mistake."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints.step_samples import flip_byte, make_readable_step
from commands.run_samples import SampleRun
from ranks import ROOT

from refocused.checkpoints.mirror.mirror import MirrorFiles
from refocused.checkpoints.step.staging import write_manifest
from refocused.metrics.jsonl import JsonLines
from refocused.system.errors import CheckpointError

HEADINGS = ("STEP", "SAVED", "SIZE", "LOCAL", "BUCKET", "LOSS", "VALIDATION", "NOTE")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("", 2, ""),
        ("show", 2, "unknown verb 'show'. Verbs: list, info, verify, prune, compare"),
        ("lst", 2, "unknown verb 'lst'. Did you mean list?"),
        (
            "list --run ones",
            2,
            "--run ones: no such folder, and no runs/ones. Did you mean one, new?",
        ),
        ("list --remote", 2, "has no mirror. Name the bucket: --bucket gs://bucket/prefix"),
        ("list --remote --bucket gone", 1, "does not exist"),
        ("info 11", 1, "Nearest: checkpoint_step_10"),
        ("info 20", 1, "trainer.json is corrupt: it has CRC-32C"),
        ("compare 10 30", 1, "run.yaml is corrupt: it has CRC-32C"),
        ("verify 40", 1, "There is no checkpoint '40'"),
        ("plot", 1, "runs/one/logs/training_metrics.jsonl cannot be read (No such file"),
        ("plot --run new", 1, "runs/new/logs/training_metrics.jsonl has no step yet"),
        ("plot --out loss.pdf", 2, "--out loss.pdf: the name must end in .png"),
        ("download 10", 2, "has no mirror. Name the bucket: --bucket gs://bucket/prefix"),
        ("upload 10", 2, "has no mirror. Name the bucket: --bucket gs://bucket/prefix"),
        ("download ./10 --bucket empty", 2, "names a local checkpoint. Give its step or name"),
        ("prune --remote --keep 2 --yes", 2, "has no mirror. Name the bucket"),
        ("prune", 2, "--keep"),
        ("export latest runs", 2, "runs exists. Remove it or name another folder."),
        ("list", 2, "is only in a bucket: --run NAME --bucket gs://"),
    ],
)
def test_each_mistake_has_one_message(
    sample_run: SampleRun, command: str, code: int, message: str
) -> None:
    sample_run.save_readable(10)
    flip_byte(sample_run.save_readable(20).path / "trainer.json")
    flip_byte(sample_run.save_readable(30).path / "run.yaml")
    JsonLines(Path("runs/new/logs/training_metrics.jsonl")).close()
    os.utime("runs/new", (1, 1))
    Path("empty").mkdir()
    if command == "list":  # the runs are elsewhere
        Path("runs").rename("moved")
    found, out, err = sample_run.command(*command.split())
    assert found == code
    assert message in err and "Traceback" not in err
    assert out == "" or not command


def test_the_table_shows_both_places_newest_first(sample_run: SampleRun) -> None:
    mirrored = sample_run.save(9500, size=3_000_000, validation_loss=2.0)
    sample_run.mirror(mirrored, keep=False)
    sample_run.save(10000, loss=2.8702, created="2026-01-01T00:00:00Z")
    (sample_run.save(10500).path / "trainer.json").unlink()
    (sample_run.checkpoints / ".tmp-checkpoint_step_11000-ab").mkdir()
    (sample_run.checkpoints / ".tmp-checkpoint_step_11000-ab" / "part").write_bytes(b"x" * 5000)
    code, out, err = sample_run.command("list")
    assert (code, err) == (0, "")
    heading, broken, local, remote, run, disk, bucket = out.splitlines()
    assert tuple(heading.split()) == HEADINGS
    assert broken.startswith("10,500") and "broken" in broken
    assert "trainer.json is missing; ignored by resume" in broken
    assert local.split()[-6:] == ["kB", "ok", "-", "2.8702", "-", "latest"]
    assert remote.split()[-6:] == ["MB", "-", "ok", "2.5000", "2.0000", "best"]
    assert run == "run      runs/one, which changed last; --run NAME chooses another"
    assert "5.0 kB in unfinished saves" in disk
    assert bucket == f"bucket   21.0 MB in {sample_run.bucket}/one/checkpoints"
    content = sample_run.command_json("list")
    assert [step["step"] for step in content["steps"]] == [9500, 10000, 10500]  # ascending
    assert content["steps"][1]["created"].startswith("2026-01-01T00:00:00")


def test_the_steps_of_either_place_and_of_a_run_only_in_a_bucket(sample_run: SampleRun) -> None:
    def steps(*options: object) -> list[tuple[int, str]]:
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


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("list", "\n10 "),
        ("info 10", "local      ok"),
        ("compare 10 20", "settings that differ: none"),
        ("verify all", "2 of 2 checkpoints are whole"),
    ],
)
def test_a_bucket_that_is_down_is_reported_once_and_the_disk_is_shown(
    sample_run: SampleRun, command: str, printed: str
) -> None:
    for step in (10, 20):
        sample_run.save_readable(step)
    code, out, err = sample_run.command(*command.split(), "--bucket", "gone")
    assert code == 1
    assert printed in out
    assert "does not exist" in err
    assert err.count("Using only the local checkpoints.") == 1
    assert sample_run.command(*command.split(), "--local")[0] == 0


def test_the_script_runs_from_any_folder_and_loads_no_torch(sample_run: SampleRun) -> None:
    sample_run.save(10)
    command = [sys.executable, "-X", "importtime", ROOT / "launch" / "checkpoints.py", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith("10 ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "refocused.checkpoints.resume.catalog" in imported
    assert not imported & {"torch", "google.cloud.storage", "checkpoints"}


def test_a_step_is_shown_with_all_that_its_files_say(sample_run: SampleRun) -> None:
    told = {"best_loss": 1.9, "best_step": 9000, "seconds": 5400.0, "cost_usd": 12.5}
    sample_run.save_readable(9500, validation_loss=2.0, **told)
    code, out, err = sample_run.command("info", "9500")
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert lines[0] == ["checkpoint_step_9500", "latest, best"]
    rows = dict(lines[1:])
    assert rows["alias"] == "checkpoint-epoch0-step9500-files950"
    assert rows["saved"].startswith("2026-11-27 22:20:00 UTC (")
    assert rows["trained"] == "9,500 steps, 9.73 M tokens, epoch 0, 950 of its files done"
    assert rows["loss"] == "training 2.5000, validation 2.0000, best so far 1.9000 at step 9,000"
    assert rows["time"] == "90.0 min, $12.50"
    assert "1,000 parameters, 2 ranks, ZeRO stage 3, bf16" in rows["size"]
    assert "ranks/ 2.0 kB in 2, zero/ 2.0 kB in 2" in rows["files"]
    assert rows["local"] == "ok, runs/one/checkpoints/checkpoint_step_9500"
    assert "bucket" not in rows
    sample_run.save_readable(10).path.joinpath("ranks/rank_00001.pt").unlink()
    code, out, _ = sample_run.command("info", "10")  # a broken one as far as it can be read
    assert code == 0 and "alias" not in out
    assert "incomplete: local: ranks/rank_00001.pt is missing" in out


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
    here = make_readable_step(Path("runs/two/checkpoints"), 5).path
    step = sample_run.save_readable(10, settings={"run": {"name": "sample", "seed": 2}})
    sample_run.mirror(step, keep=False)
    content = sample_run.command_json("info", "latest", "--run", "one")
    assert content["read_from"].endswith("bucket/one/checkpoints/checkpoint_step_10")
    assert content["settings"]["run.seed"] == 2 and content["manifest"]["world_size"] == 2
    content = sample_run.command_json("compare", "10", here, "--run", "one")
    assert content["a"].endswith("bucket/one/checkpoints/checkpoint_step_10")
    assert content["b"] == str(here)
    assert content["settings"] == [{"name": "run.seed", "a": 2, "b": None, "only_in": "a"}]
    assert content["losses"][0] == {"name": "loss", "a": 2.5, "b": 2.5, "change": 0.0}


def test_the_losses_of_a_run_that_went_back_are_drawn(sample_run: SampleRun) -> None:
    file = JsonLines(sample_run.folder / "logs" / "training_metrics.jsonl")
    for step, loss in ((1000, 3.0), (2000, 2.0), (3000, 1.0), (2000, 2.2)):
        file.write({"kind": "step", "step": step, "loss": loss})
    file.write({"kind": "validation", "step": 2000, "validation_loss": 2.4})
    file.close()
    code, out, err = sample_run.command("plot")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs/one/loss.png: 2 steps, 1 validation",
        "  last training   2.2000 at step 2,000",
        "  last validation 2.4000 at step 2,000",
        "  best validation 2.4000 at step 2,000",
    ]
    assert (sample_run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    content: Any = sample_run.command_json("plot", "--out", "pictures/one.PNG")
    assert content["file"] == "pictures/one.PNG"
    assert content["training"] == [{"step": 1000, "loss": 3.0}, {"step": 2000, "loss": 2.2}]
    assert content["best"] == {"step": 2000, "loss": 2.4}
    assert Path("pictures/one.PNG").is_file()
    Path("file").touch()
    code, _, err = sample_run.command("plot", "--out", "file/loss.png")
    assert code == 1
    assert "file/loss.png cannot be written" in err


def test_control_characters_of_a_foreign_manifest_are_escaped(sample_run: SampleRun) -> None:
    step = sample_run.save_readable(10)
    write_manifest(step.path, step.manifest.model_copy(update={"run": "\x1b]52;c;cHduZWQ=\x07"}))
    code, out, _ = sample_run.command("info", "10")
    assert code == 0 and "by run \\x1b]52;c;cHduZWQ=\\x07" in out
    assert "\x1b" not in out and "\x07" not in out
    error = CheckpointError("saved by run \x1b[2J\nand another line")
    assert str(error) == "saved by run \\x1b[2J\nand another line"
