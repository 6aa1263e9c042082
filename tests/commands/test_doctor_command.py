import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end.tiny import tiny_run
from fakes import Emulator, Fault
from ranks import ROOT

from refocused.bucket.open_bucket import open_bucket
from refocused.commands.doctor import lines_of
from refocused.commands.main import run_command
from refocused.data.formats import token_layout
from refocused.doctor import machine
from refocused.doctor.finding import Finding


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path)
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run_command("doctor", ["--config", "tiny.yaml", "--json", *arguments]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def of(report: dict[str, Any], check: str) -> list[tuple[str, str]]:
    return [
        (found["level"], found["text"]) for found in report["findings"] if found["check"] == check
    ]


def test_a_run_that_could_begin(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tiny.rglob("*"))
    report = asked(capsys, "--quick", "run.device=cpu")
    assert report["ok"] and report["run"] == "tiny"
    ours = [found for found in report["findings"] if found["check"] != "packages"]  # any that fit
    assert {found["level"] for found in ours} == {"ok"}
    tokens = "3 files, 12,000 tokens, ids 0 to 511 of 512 (12,000 read)"
    assert of(report, "data") == [("ok", f"data.source tokens: {tokens}")]
    assert sorted(tiny.rglob("*")) == before


def test_an_interval_of_what_cannot_be_measured_is_a_warning(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["data.validation_fraction=0", "evaluation.task_interval=5"]
    settings += ["evaluation.sample_interval=6"]
    warned = of(asked(capsys, "--quick", "run.device=cpu", *settings), "data")[:-1]
    assert [level for level, _ in warned] == ["warn"] * 3
    (validation, tasks, sample) = (text for _, text in warned)
    assert validation.startswith("evaluation.interval is 10: no data are held out")
    assert "evaluation.task_interval is 5: no task is named" in tasks
    assert "evaluation.sample_interval is 6: no prompt" in sample
    settings = ["data.validation_fraction=0", "evaluation.interval=0"]
    assert len(of(asked(capsys, "--quick", "run.device=cpu", *settings), "data")) == 1


def test_it_is_read_at_eighty_columns(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(
        "doctor", ["--config", "tiny.yaml", "--quick", "--gpus", "8", "zero.offload_optimizer=cpu"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"done  1 failed, \d warned, \d+ checks, [\d.]+ s", lines[-1])
    starts = [line for line in lines[1:-1] if not line.startswith(" ")]
    assert all(re.match(r"(ok|warn|fail) +[a-z]+ +\S", line) for line in starts)
    finding = Finding("bucket", "fail", "what was found " * 8, "what is to be done " * 5)
    lines = lines_of(finding, width=60)
    assert lines[0].startswith("fail  bucket       what was found")
    assert all(line.startswith(" " * 19) and len(line) <= 60 for line in lines[1:])
    assert sum("-> what" in line for line in lines) == 1


def test_a_missing_package_is_said_before_anything_imports_it(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "pins.txt").write_text("not-needed==1.0\n")
    monkeypatch.setattr(machine, "PINS", tiny / "pins.txt")
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["no-such-package>=1"])
    report = asked(capsys, "run.device=cpu", code=3)
    assert [found["check"] for found in report["findings"]] == ["packages", "machine"]
    assert of(report, "packages") == [("fail", "missing: no-such-package")]


def test_a_wrong_run_file_is_wrong_use(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("doctor", ["--config", "tiny.yaml", "optimizer.lrr=1"]) == 2
    assert "optimizer.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "check", "words"),
    [
        ("data.source=nowhere", "data", "data.source: nowhere: the folder does not exist"),
        (
            "batch.micro_batch_size=auto batch.gradient_accumulation_steps=null "
            "batch.global_batch_size=3",
            "plan",
            "not a multiple of 2",
        ),
        (
            "model.preset=gpt2_1b model.sequence_length=2048 batch.micro_batch_size=256",
            "memory",
            "of this machine's memory (2 CPU ranks: ",
        ),
        (
            "run.device=auto precision.dtype=auto model.preset=gpt2_124m",
            "plan",
            "124 M parameters on the CPU",
        ),
        ("run.directory=tiny.yaml/runs", "disk", "tiny.yaml is read-only or a file. Make it"),
        ("data.cache=tiny.yaml/cache", "disk", "data.cache: tiny.yaml/cache cannot be written"),
        (
            "data.tokenizer=bytes evaluation.tasks=[hellaswag=gone.jsonl]",
            "tasks",
            "evaluation.tasks: gone.jsonl: there is no such file",
        ),
        ("model.start_from=gone", "start_from", "model.start_from = 'gone' is neither a folder"),
        ("model.start_from=other", "start_from", "other has no model.safetensors"),
        ("checkpoint.mirror=tiny.yaml", "bucket", "checkpoint.mirror: write failed."),
        ("data.source=gs://X", "data", "data.source: 'gs://X' is not the address"),
        ("tracking.wandb=p", "packages", "tracking.wandb: needs wandb. Install it: "),
        ("tracking.tensorboard=true", "packages", "tracking.tensorboard: needs tensorboard. Inst"),
    ],
)
def test_what_fails_is_named_and_the_rest_is_looked_at(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    settings: str,
    check: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("wandb", "tensorboard"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, package, None)
    (tiny / "other").mkdir()
    (tiny / "other" / "config.json").write_text("{}")
    report = asked(capsys, "--quick", "run.device=cpu", *settings.split(), code=3)
    assert not report["ok"] and of(report, "data") and of(report, "bucket")
    assert any(level == "fail" and words in text for level, text in of(report, check)), report


def test_a_run_is_checked_for_gpus_that_are_not_here(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "full").write_text("")
    settings = ["model.preset=gpt2_124m", "data.cache=full/cache", "model.start_from=gone"]
    report = asked(capsys, "--for", "2xA100-40GB", "--per-hour", "3", *settings, code=3)
    ((_, plan),) = of(report, "plan")
    assert " of 42.9 GB a rank (" in plan and "2 ranks; expected: " in plan
    ((level, cost),) = of(report, "cost")
    hours, dollars = (
        float(number) for number in re.findall(r"about ([\d.]+) .* and \$([\d.]+)", cost)[0]
    )
    assert level == "ok" and hours > 0 and dollars > 0 and cost.endswith("A100 40GB, without tasks")
    assert [level for level, _ in of(report, "memory") + of(report, "disk")] == ["ok", "ok"]
    assert of(report, "start_from")[0][0] == "fail" and of(report, "data")[0][0] == "warn"
    assert not of(report, "allreduce")
    ((level, missing),) = of(report, "step")
    assert (level, "NOT CHECKED without the GPUs" in missing) == ("warn", True)
    command = report["findings"][-1]["fix"]  # of the same run
    assert command.endswith(" --config=tiny.yaml " + " ".join(settings))
    again = asked(capsys, "--for", "2xA100", *settings, "log.on_alarm=https://h/SECRET", code=3)
    assert "log.on_alarm=https://h/..." in again["findings"][-1]["fix"]
    huge = ["model.preset=gpt2_1b", "batch.micro_batch_size=256", "model.sequence_length=2048"]
    ((level, _),) = of(asked(capsys, "--for", "1xL4", *huge, code=3), "plan")
    assert level == "fail"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--for H100", "--for H100: expected a number and a GPU, as 8xH100."),
        ("--for 0xH100", "--for 0xH100: expected"),
        ("--for 8xZ1", "--for 8xZ1: 'Z1' is not a known GPU. Choose one of: A100 40GB"),
        ("--for 8xH100 --gpus 8", "--gpus has no effect with --for."),
        ("--per-hour 8", "--per-hour needs --for."),
    ],
)
def test_gpus_to_rent_that_are_not_understood(
    given: str, words: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("doctor", ["--config", "tiny.yaml", *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_store_that_cannot_be_found_is_one_finding(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refocused.doctor.early.missing_store_name", lambda _: "store.example")
    places = ("data.source=gs://b42/x", "checkpoint.mirror=gs://b42/y")
    report = asked(capsys, "--quick", "run.device=cpu", *places, code=3)
    assert not of(report, "credentials") and not of(report, "bucket")
    ((level, text),) = of(report, "data")
    assert level == "fail"
    assert text.startswith("data.source, checkpoint.mirror: Unknown host store.example. Check")


def test_ids_beyond_the_model_and_no_mirror(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tiny / "tokens" / "shard_001.npy", np.arange(4000, dtype=np.uint16) % 601)
    report = asked(capsys, "run.device=cpu", "checkpoint.mirror=null", code=3)
    assert (
        "the data hold the id 600, but a vocabulary of 512 ends at 511" in of(report, "data")[0][1]
    )
    assert [level for level, _ in of(report, "bucket")] == ["ok", "warn"]
    # Ranks would only fail at the same once more.
    assert of(report, "step")[0][0] == "warn" and not of(report, "allreduce")


def test_validation_that_leaks_and_tokens_in_no_sequence(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(4000, dtype=np.uint16) % 512
    np.save(tiny / "tokens" / "val.npy", ids)
    for number in range(50):
        np.save(tiny / "tokens" / f"short_{number:02d}.npy", ids[:30])
    headers, read = Counter[str](), token_layout.read_npy_header

    def count(file: Any, *, what: str) -> Any:
        headers[what] += 1
        return read(file, what=what)

    monkeypatch.setattr(token_layout, "read_npy_header", count)
    report = asked(capsys, "--quick", "run.device=cpu")
    assert headers.total() == len(headers) + 1  # one is read where the right to read is tried
    found = [text for level, text in of(report, "data") if level == "warn"]
    assert "training files look held out (val.npy)" in found[0]
    assert "of the tokens of tokens are in no sequence" in found[1]


@pytest.mark.bucket
def test_a_mirror_that_may_not_be_cleaned(
    tiny: Path, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = ("--quick", "run.device=cpu", f"checkpoint.mirror={emulator.url}/runs")
    report = asked(capsys, *mirror)
    assert [level for level, _ in of(report, "bucket")] == ["ok", "ok"]
    ((level, clock),) = of(report, "clock")
    assert level == "ok" and clock.endswith("the same as the store's")
    ((level, who),) = of(report, "credentials")
    assert (level, who) == ("ok", "an anonymous client (STORAGE_EMULATOR_HOST is set)")
    emulator.proxy.script(lambda request: request.method == "DELETE", Fault(status=403), times=9)
    for kept, code in (("all", 0), ("5", 3)):  # only who removes needs the right to
        report = asked(capsys, *mirror, f"checkpoint.keep_remote={kept}", code=code)
        assert [level for level, _ in of(report, "bucket")] == ["ok", "fail" if code else "warn"]


@pytest.mark.slow
@pytest.mark.bucket
def test_the_whole_of_it_with_real_ranks_leaves_only_shards(tiny: Path, emulator: Emulator) -> None:
    for shard in sorted((tiny / "tokens").iterdir()):
        emulator.put(f"data/{shard.name}", shard.read_bytes())
    before = sorted(tiny.rglob("*"))
    temporary = tiny.parent / f"{tiny.name}-temporary"
    temporary.mkdir()
    command = [
        *(sys.executable, ROOT / "launch" / "doctor.py", "--config", "tiny.yaml"),
        *("run.device=cpu", f"data.source={emulator.url}/data"),
        f"checkpoint.mirror={emulator.url}/runs",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "allreduce gloo, 2 ranks:" in said
    assert "step 1, 256 tokens, took" in said
    cache = tiny / "cache"
    assert [one for one in sorted(tiny.rglob("*")) if cache not in (one, *one.parents)] == before
    assert not list(temporary.glob("refocused*"))
    assert not list(open_bucket(emulator.url).list("runs/"))


@pytest.mark.slow
def test_what_would_end_the_start_of_the_ranks_fails(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("run.device=cpu", "--gpus", "1")
    train = [sys.executable, ROOT / "launch" / "train.py", "--config", "tiny.yaml", alone[0]]
    subprocess.run([*train, "run.steps=2"], check=True, capture_output=True)
    # It resumes as a start does, which then reads no model.
    report = asked(capsys, *alone, "run.steps=3", "model.start_from=gone")
    assert not of(report, "start_from")
    assert of(report, "step")[0][1].startswith("3, 128 tokens, took")
    report = asked(capsys, *alone, "run.steps=2")
    assert of(report, "step") == [("ok", "the run is finished; it can be opened and loaded")]
    report = asked(capsys, *alone, "run.steps=3", "optimizer.kind=muon", code=3)
    assert "optimizer.kind" in of(report, "step")[0][1]
