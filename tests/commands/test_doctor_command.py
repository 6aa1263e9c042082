import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from end_to_end.tiny import tiny_run
from fakes import Fault
from ranks import ROOT

from refocused.bucket.open_bucket import open_bucket
from refocused.commands.doctor import lines_of
from refocused.commands.main import run_command
from refocused.data.formats import token_layout
from refocused.doctor import machine
from refocused.doctor.finding import Finding


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path)
    return tmp_path


def asked(capsys, *arguments, code=0):
    assert run_command("doctor", ["--config", "tiny.yaml", "--json", *arguments]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def of(report, check):
    return [
        (found["level"], found["text"]) for found in report["findings"] if found["check"] == check
    ]


def test_a_finding_is_wrapped():
    finding = Finding("bucket", "fail", "what was found " * 8, "what is to be done " * 5)
    lines = lines_of(finding, width=60)
    assert lines[0].startswith("fail  bucket       what was found")
    assert all(line.startswith(" " * 19) and len(line) <= 60 for line in lines[1:])
    assert sum("-> what" in line for line in lines) == 1


def test_a_missing_package_is_said_before_anything_imports_it(tiny, capsys, monkeypatch):
    (tiny / "pins.txt").write_text("not-needed==1.0\n")
    monkeypatch.setattr(machine, "PINS", tiny / "pins.txt")
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["no-such-package>=1"])
    report = asked(capsys, "run.device=cpu", code=3)
    assert [found["check"] for found in report["findings"]] == ["packages", "machine"]
    assert of(report, "packages") == [("fail", "missing: no-such-package")]


def test_a_store_that_cannot_be_found_is_one_finding(tiny, capsys, monkeypatch):
    monkeypatch.setattr("refocused.doctor.early.missing_store_name", lambda _: "store.example")
    places = ("data.source=gs://b42/x", "checkpoint.mirror=gs://b42/y")
    report = asked(capsys, "--quick", "run.device=cpu", *places, code=3)
    assert not of(report, "credentials") and not of(report, "bucket")
    ((level, text),) = of(report, "data")
    assert level == "fail"
    assert text.startswith("data.source, checkpoint.mirror: Unknown host store.example. Check")


def test_ids_beyond_the_model_and_no_mirror(tiny, capsys):
    np.save(tiny / "tokens" / "shard_001.npy", np.arange(4000, dtype=np.uint16) % 601)
    report = asked(capsys, "run.device=cpu", "checkpoint.mirror=null", code=3)
    assert (
        "the data hold the id 600, but a vocabulary of 512 ends at 511" in of(report, "data")[0][1]
    )
    assert [level for level, _ in of(report, "bucket")] == ["ok", "warn"]
    # Ranks would only fail at the same once more.
    assert of(report, "step")[0][0] == "warn" and not of(report, "allreduce")


def test_validation_that_leaks_and_tokens_in_no_sequence(tiny, capsys, monkeypatch):
    ids = np.arange(4000, dtype=np.uint16) % 512
    np.save(tiny / "tokens" / "val.npy", ids)
    for number in range(50):
        np.save(tiny / "tokens" / f"short_{number:02d}.npy", ids[:30])
    headers, read = Counter[str](), token_layout.read_npy_header

    def count(file, *, what):
        headers[what] += 1
        return read(file, what=what)

    monkeypatch.setattr(token_layout, "read_npy_header", count)
    report = asked(capsys, "--quick", "run.device=cpu")
    assert headers.total() == len(headers) + 1  # one is read where the right to read is tried
    found = [text for level, text in of(report, "data") if level == "warn"]
    assert "training files look held out (val.npy)" in found[0]
    assert "of the tokens of tokens are in no sequence" in found[1]


@pytest.mark.bucket
def test_a_mirror_that_may_not_be_cleaned(tiny, emulator, capsys):
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
def test_the_whole_of_it_with_real_ranks_leaves_only_shards(tiny, emulator):
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
def test_what_would_end_the_start_of_the_ranks_fails(tiny, capsys):
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
