from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refocused.commands.main import VERBS, run_command

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("command", VERBS)
def test_every_verb_has_its_functions(command: str) -> None:
    for verb, (module, _) in VERBS[command].items():
        functions = importlib.import_module(f"refocused.commands.{module}")
        assert callable(getattr(functions, f"run_{verb or command}"))


def test_a_reader_that_leaves_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one" / "checkpoints").mkdir(parents=True)
    for command in (["prepare_data.py", "--help"], ["checkpoints.py", "list"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, REPOSITORY / "launch" / command[0], *command[1:]],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            timeout=60,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, "")


def test_broken_connections_stay_errors_and_do_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("prepare_data", ["--help"])
    run_command("checkpoints", ["list"])
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


def test_an_interrupted_command_leaves_its_threads_behind() -> None:
    """What threads do to an ordinary exit, a callback does here: it aborts the process."""
    script = (
        "import atexit, importlib, os\n"
        "from refocused.commands.main import VERBS, run_script\n"
        "def run(arguments):\n"
        "    raise KeyboardInterrupt\n"
        "module, _ = VERBS['checkpoints']['list']\n"
        "importlib.import_module(f'refocused.commands.{module}').run_list = run\n"
        "atexit.register(os.abort)\n"
        "run_script('checkpoints')\n"
    )
    command = [sys.executable, "-c", script, "list", "--run", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "Interrupted. The same command goes on from here.\n"
