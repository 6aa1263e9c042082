from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from ranks import ROOT

from refocused.commands.main import missing_package

SCRIPT = ROOT / "launch" / "train.sh"
SCRIPTS = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_script_sets_up_and_hands_all_its_arguments_to_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch")
    program(tmp_path / "launch" / "setup_environment.sh", "echo set up")
    program(tmp_path / ".venv" / "bin" / "python", 'pwd; printf "%s\\n" "$@"; exit 5')
    done = subprocess.run(
        [str(tmp_path / "launch" / "train.sh"), "--restarts", "3", "--config", "a b"],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "set up",
        str(tmp_path),
        *("-P", "-m", "refocused.commands.launch"),
        *("--restarts", "3", "--config", "a b"),
    ]
    assert done.returncode == 5


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a script needs before it has found the packages, with commands that only speak."""
    folder = tmp_path / "checkout"
    commands = folder / "refocused" / "commands"
    commands.mkdir(parents=True)
    for name in ("pyproject.toml", "refocused/__init__.py", "refocused/commands/main.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "launch", folder / "launch")
    for script in SCRIPTS:
        speak = f"def main(argv): print({script!r}, argv, input()); return 3\n"
        (commands / f"{script}.py").write_text(speak)
    speak = "def run_verb(name, _, argv): print(name, argv, input()); return 3\n"
    (commands / "arguments.py").write_text(speak)
    venv.create(tmp_path / "bare", symlinks=True)  # an interpreter without any package
    return folder


def run_script(checkout: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd="/", input="said", capture_output=True, text=True)


def test_every_script_finds_the_environment_beside_it(checkout: Path) -> None:
    bare = checkout.parent / "bare" / "bin" / "python"
    python = checkout / ".venv" / "bin" / "python"
    program(python, f'echo ".venv: $*"; exec "{sys.executable}" "$@"')
    assert len(SCRIPTS) == 9
    for script in SCRIPTS:
        file = checkout / "launch" / f"{script}.py"
        done = run_script(checkout, bare, "-u", file, "a b", "-x")
        assert done.stdout.splitlines() == [
            f".venv: -u {file} a b -x",
            f"{script} ['a b', '-x'] said",
        ], done.stderr
        assert (done.returncode, done.stderr) == (3, "")


def test_an_environment_elsewhere_that_has_the_packages_is_used_as_it_is(checkout: Path) -> None:
    program(checkout / ".venv" / "bin" / "python", "echo restarted")
    done = run_script(checkout, sys.executable, checkout / "launch" / "stop.py", "one")
    assert (done.returncode, done.stdout) == (3, "stop ['one'] said\n"), done.stderr


@pytest.mark.parametrize("environment", ["none", "lacks the packages too"])
def test_the_command_that_is_missing_is_named(checkout: Path, environment: str) -> None:
    bare = checkout.parent / "bare" / "bin" / "python"
    if environment != "none":
        program(checkout / ".venv" / "bin" / "python", f'exec "{bare}" "$@"')
    done = run_script(checkout, bare, checkout / "launch" / "checkpoints.py", "list")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{bare} lacks packages that refocused needs, for example torch. Install them into .venv "
        f"with: {checkout}/launch/setup_environment.sh\n"
    )


def test_the_packages_that_a_script_looks_for_are_those_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sought: list[str] = []
    monkeypatch.setattr("importlib.metadata.distribution", sought.append)
    assert missing_package() is None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sought == [Requirement(text).name for text in project["dependencies"]]
