from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints.step_samples import make_step

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.copy_step import StepCopier
from refocused.checkpoints.mirror.mirror_status import MirrorFiles, MirrorStatus
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.step.staging import remove_step
from refocused.commands.main import VERBS, run_command
from refocused.system.processes import this_process

main = functools.partial(run_command, "checkpoints")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run `new` below runs/, and an older one."""
    monkeypatch.chdir(tmp_path)
    for name, when in (("old", 1_000_000), ("new", 2_000_000)):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        for path in (tmp_path / "runs" / name / "checkpoints", tmp_path / "runs" / name):
            os.utime(path, (when, when))
    return tmp_path / "runs" / "new"


def mirror(run: Path, bucket: Path, step: int) -> None:
    """Mirror a step as the run's own mirror would."""
    bucket.mkdir(exist_ok=True)
    remote = RemoteSteps(DirectoryBucket(bucket), f"{run.name}/checkpoints")
    copier = StepCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
    copier.copy(make_step(run / "checkpoints", step, size=3_000_000, validation_loss=2.0))
    status = MirrorStatus(
        bucket=str(bucket), prefix=f"{run.name}/checkpoints", process=this_process(), heartbeat=0.0
    )
    MirrorFiles(run).status.write_text(status.model_dump_json())


def test_an_export_refuses_a_folder_that_exists_before_it_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from refocused.commands.main import run_command;"
        "code = run_command('checkpoints', sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "export", "latest", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"{tmp_path} exists already. Remove it, or name another folder.\n"


def test_the_table_shows_both_places_newest_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror(run, tmp_path / "bucket", 9500)
    remove_step(run / "checkpoints" / "checkpoint_step_9500")
    make_step(run / "checkpoints", 10000, loss=2.8702, created="2026-01-01T00:00:00Z")
    make_step(run / "checkpoints", 10500).trainer.unlink()
    (run / "checkpoints" / ".tmp-checkpoint_step_11000-ab").mkdir()
    (run / "checkpoints" / ".tmp-checkpoint_step_11000-ab" / "part").write_bytes(b"x" * 5000)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "STEP",
        "SAVED",
        "SIZE",
        "LOCAL",
        "BUCKET",
        "LOSS",
        "VALIDATION",
        "NOTE",
    ]
    assert lines[1].startswith("10,500")
    assert "broken" in lines[1]
    assert "trainer.json is missing; ignored by resume" in lines[1]
    assert lines[2].split()[-6:] == ["kB", "ok", "-", "2.8702", "-", "latest"]
    assert lines[3].split()[-6:] == ["MB", "-", "ok", "2.5000", "2.0000", "best"]
    assert "5.0 kB in interrupted or running saves" in lines[4]
    assert lines[5] == f"bucket   21.0 MB in {tmp_path}/bucket/new/checkpoints"


def test_the_json_holds_every_step_ascending(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10000, 9500):
        make_step(run / "checkpoints", step)
    assert main(["list", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in content["steps"]] == [9500, 10000]
    assert content["bucket"] is None
    assert content["steps"][0]["created"].startswith("2026-11-27T22:20:00")
    assert content["disk_bytes"]["steps"] > 14000


def test_one_place_alone_can_be_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror(run, tmp_path / "bucket", 10)
    make_step(run / "checkpoints", 20)

    def steps(*options: str) -> list[tuple[int, str]]:
        assert main(["list", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)["steps"]
        return [(step["step"], step["bucket"]) for step in found]

    assert steps("--local") == [(10, "-"), (20, "-")]
    assert steps("--remote") == [(10, "ok")]


def test_a_run_that_is_only_in_a_bucket_is_listed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror(run, tmp_path / "bucket", 10)
    run.rename(tmp_path / "elsewhere")
    assert (
        run_command(
            "checkpoints", ["list", "--run", "new", "--bucket", str(tmp_path / "bucket"), "--json"]
        )
        == 0
    )
    assert [step["step"] for step in json.loads(capsys.readouterr().out)["steps"]] == [10]


def test_a_bucket_that_cannot_be_read_is_told_and_the_disk_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_step(run / "checkpoints", 10)
    gone = str(tmp_path / "gone")
    assert main(["list", "--bucket", gone]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].startswith("10 ")
    assert "does not exist" in shown.err
    assert "Only the local steps are looked at." in shown.err
    assert main(["list", "--bucket", gone, "--remote"]) == 1
    assert capsys.readouterr().out == ""


def test_a_run_without_steps_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--run", "old"]) == 0
    assert capsys.readouterr().out.startswith("No checkpoints in runs/old/checkpoints.\n")


def test_an_unknown_run_is_refused_with_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--run", "olds"]) == 2
    assert "Near: old." in capsys.readouterr().err


def test_without_any_run_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["list"]) == 2
    assert "--run" in capsys.readouterr().err


def test_remote_without_a_known_bucket_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--remote"]) == 2
    assert "--bucket gs://bucket/prefix" in capsys.readouterr().err


def test_the_script_runs_from_any_folder_and_loads_no_torch(run: Path) -> None:
    make_step(run / "checkpoints", 10)
    script = str(REPOSITORY / "launch" / "checkpoints.py")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", script, "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("10 ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "refocused.checkpoints.resume.catalog" in imported
    assert not imported & {"torch", "google.cloud.storage", "checkpoints"}


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS["checkpoints"])])
def test_help_imports_nothing_but_the_command(run: Path, verb: list[str]) -> None:
    script = str(REPOSITORY / "launch" / "checkpoints.py")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", script, *verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: checkpoints" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "matplotlib", "google", "numpy", "yaml", "pydantic"}


def test_without_a_mirrors_word_the_run_files_own_mirror_is_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror(run, tmp_path / "bucket", 10)
    MirrorFiles(run).status.unlink()
    text = f"run: {{name: new}}\ncheckpoint: {{mirror: {tmp_path / 'bucket'}}}\n"
    (run / "run.yaml").write_text(text)
    assert main(["list", "--json"]) == 0
    assert [step["bucket"] for step in json.loads(capsys.readouterr().out)["steps"]] == ["ok"]


def test_help_names_the_verbs_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert "show every step" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["lst"]) == 2
    assert "'lst' is no verb. There are: list" in capsys.readouterr().err
