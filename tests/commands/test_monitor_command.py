import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitor.watched_run import GPU, new_run
from ranks import until

from refocused.commands import monitor
from refocused.system.processes import liveness_of, this_process

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "monitor.py"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run `one` below runs/ of the current folder, which this process trains."""
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "runs")
    run.begin(pid=this_process().pid, pid_started=this_process().started)
    run.gpus(GPU)
    return run


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"pid": 1, "pid_started": -1}, "gone"),
        ({"pid": 1, "pid_started": -1, "host": "another"}, "elsewhere"),
        ({}, None),
        ({"pid": "x", "pid_started": 1}, None),
    ],
)
def test_the_process_of_a_state_is_looked_for(state, expected):
    assert liveness_of(state) == expected


def test_no_form_of_it_imports_torch_nor_writes(run):
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    program = (
        "import sys; from refocused.commands.main import run_command;"
        "forms = ('--once', '--json', '--list');"
        "codes = [run_command('monitor', [form, 'one']) for form in forms];"
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
def test_a_locale_without_utf8_gets_ascii(run, locale, found):
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
def test_what_python_sets_for_itself_says_nothing_of_the_terminal(encoding, environment, expected):
    assert monitor.has_utf8_terminal(encoding, environment) is expected


@pytest.mark.slow
def test_collect_samples_a_machine_until_it_is_interrupted(tmp_path):
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
