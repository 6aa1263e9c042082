import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitor.watched_run import GPU, WatchedRun, new_run
from ranks import until

from refocused.commands import monitor
from refocused.system.processes import liveness_of, this_process

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "monitor.py"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """The run `one` below runs/ of the current folder, which this process trains."""
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "runs")
    run.begin(pid=this_process().pid, pid_started=this_process().started)
    run.gpus(GPU)
    return run


def test_a_run_elsewhere_is_shown_from_its_bucket(run: WatchedRun, capsys: Capture) -> None:
    run.mirror(mirrored=[900])
    for path in (*run.folder.glob("*.json"), *run.folder.glob("logs/*.jsonl")):
        copy = Path("mirror", "far", "logs", "host7", path.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert monitor.main(["far", "--bucket", "mirror", "--once"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(" one  ") and "step 1,000/2,000" in out and "48.4/79.6" in out
    assert " saved 900  at risk 100 steps" in out
    assert monitor.main(["--bucket", "mirror"]) == 2
    assert "--bucket needs the name of a run" in capsys.readouterr().err


def test_each_form_shows_the_runs_that_are_asked_for(run: WatchedRun, capsys: Capture) -> None:
    older = new_run(Path("runs"), "older")
    older.begin(run="older", status="finished", exit_code=0)
    os.utime(older.folder / "state.json", (1, 1))
    assert monitor.main(["--once"]) == 0  # the one that changed last
    out = capsys.readouterr().out
    assert out.startswith(" one  TRAINING  step 1,000/2,000 50.0%")
    assert "saved nothing" in out  # its checkpoints have no manifest
    assert "48.4/79.6" in out and "older" not in out and "\x1b" not in out
    assert monitor.main(["--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["one", "older"]
    assert monitor.main(["--json", "one", "older"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["status"] for record in records] == ["training", "finished"]
    for name, status in (("one", "TRAINING"), ("runs/one", "TRAINING"), ("soon", "STARTING")):
        assert monitor.main(["--wait", "--once", name]) == 0
        assert status in capsys.readouterr().out.splitlines()[0]
    assert monitor.main(["onne"]) == 2
    assert capsys.readouterr().err.startswith("error: onne: no such folder, and no runs/onne. ")
    assert monitor.main(["--collect", "one", "two"]) == 2
    assert "one folder" in capsys.readouterr().err
    assert monitor.main(["--collect", "--bucket", "x", "one"]) == 2
    assert "--bucket has no effect with --collect." in capsys.readouterr().err
    for wrong, said in {
        "--once --web": "--once and --web exclude each other. Keep one",
        "--page x.html --summary": "--summary and --page exclude each other",
        "--list --collect": "--list and --collect exclude each other",
        "--web 99999": "'99999': a port is from 1 to 65535",
        "--web 0": "'0': expected a whole number of at least 1",
    }.items():
        with pytest.raises(SystemExit):
            monitor.main(["one", *wrong.split()])
        assert said in capsys.readouterr().err


def test_without_any_run_no_option_is_named_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert monitor.main([]) == 2
    said = capsys.readouterr().err
    assert "No run in " in said and "--" not in said


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"pid": 1, "pid_started": -1}, "gone"),
        ({"pid": 1, "pid_started": -1, "host": "another"}, "elsewhere"),
        ({}, None),
        ({"pid": "x", "pid_started": 1}, None),
    ],
)
def test_the_process_of_a_state_is_looked_for(
    state: dict[str, object], expected: str | None
) -> None:
    assert liveness_of(state) == expected


def test_no_form_of_it_imports_torch_nor_writes(run: WatchedRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    program = (
        "import sys; from refocused.commands.monitor import main;"
        "codes = [main([form, 'one']) for form in ('--once', '--json', '--list')];"
        "import refocused.monitor.screen.live_screen;"
        "assert not {'torch', 'deepspeed', 'matplotlib'} & set(sys.modules); sys.exit(sum(codes))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("locale", "found"),
    [({}, b"caf?"), ({"LC_ALL": "C"}, b"caf?"), ({"LC_ALL": "C.UTF-8"}, "caf\u00e9".encode())],
)
def test_a_locale_without_utf8_gets_ascii(
    run: WatchedRun, locale: dict[str, str], found: bytes
) -> None:
    run.line("events", time.time(), {"kind": "note", "text": "caf\u00e9"})
    bare = {name: os.environ[name] for name in os.environ if not name.startswith(("LC_", "LANG"))}
    command = [sys.executable, str(SCRIPT), "--once", "one"]
    done = subprocess.run(command, capture_output=True, env={**bare, **locale})
    assert done.returncode == 0, done.stderr
    assert found in done.stdout


@pytest.mark.parametrize(
    ("encoding", "environment", "expected"),
    [
        ("UTF-8", {"LANG": "en_US.UTF-8"}, True),
        ("UTF-8", {"LC_ALL": "C.UTF-8"}, True),
        ("UTF-8", {"LC_CTYPE": "C.UTF-8", "LANG": "de_DE"}, True),
        ("UTF-8", {"LC_CTYPE": "C.UTF-8"}, False),  # Python's own, in the C locale
        ("UTF-8", {"LC_CTYPE": "C.UTF-8", "LANG": "C"}, False),
        ("ISO-8859-1", {"LANG": "de_DE"}, False),
    ],
)
def test_what_python_sets_for_itself_says_nothing_of_the_terminal(
    encoding: str, environment: dict[str, str], expected: bool
) -> None:
    assert monitor.has_utf8_terminal(encoding, environment) is expected


@pytest.mark.slow
def test_collect_samples_a_machine_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--collect", "mine", "--interval", "0.1"]
    samples = tmp_path / "runs" / "mine" / "logs" / "gpu_metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as collecting:
        try:
            until(lambda: samples.exists() and len(samples.read_text().splitlines()) > 2)
            second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert (second.returncode, second.stdout) == (1, "")
            assert "Another process records this machine in" in second.stderr
            collecting.send_signal(signal.SIGINT)
            _, said = collecting.communicate(timeout=60)
        finally:
            collecting.kill()
    assert collecting.returncode == 0
    assert "until Ctrl+C" in said and "Traceback" not in said
    assert {json.loads(line)["kind"] for line in samples.read_text().splitlines()} >= {"system"}
