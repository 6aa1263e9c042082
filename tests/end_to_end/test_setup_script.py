from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "setup_environment.sh"
PYTHON = """
case "$*" in
--version) echo "Python $STAND_IN_VERSION" ;;
"-m venv"*)
    echo "venv" >> "$SAID"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python
    [ -z "$STAND_IN_BREAKS" ] || { touch .venv/broken; exit 1; } ;;
"-m pip --version") [ ! -e .venv/broken ] ;;
"-m pip install"*) echo "$*" | sed 's/.*-check //' >> "$SAID" ;;
"-m compileall"*) echo "compiled" >> "$SAID"; exit 1 ;;
esac
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FreshMachine:
    """The script beside a requirements file, and programs that only note what they are told."""

    folder: Path

    def set_up(self, *options: str, code: int = 0, **variables: str) -> tuple[list[str], str]:
        """Run the script; return what the programs were told, and what the script said."""
        said = self.folder / "said"
        said.write_text("")
        environment = {
            "PATH": str(self.folder / "bin"),
            "PYTHON": str(self.folder / "bin" / "python"),
            "SAID": str(said),
            "STAND_IN_VERSION": "3.11.9",
            **variables,
        }
        done = subprocess.run(
            [str(self.folder / "launch" / SCRIPT.name), *options],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return said.read_text().splitlines(), done.stdout + done.stderr

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> FreshMachine:
    for name in ("launch", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch")
    (tmp_path / "requirements_training.txt").write_text("torch==1\nother==2\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    used = "bash env sh cat cksum cp dirname echo grep mkdir mktemp rm sed touch"
    for name in used.split():
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    machine = FreshMachine(tmp_path)
    machine.program("python", PYTHON)
    machine.program("apt-get", 'echo "apt-get $*" >> "$SAID"')
    machine.program("id", "echo 0")
    return machine


def test_a_fresh_machine_is_prepared_and_the_second_time_nothing_is_done(
    machine: FreshMachine,
) -> None:
    told, words = machine.set_up()
    assert told == ["venv", "torch==1", "-r requirements_training.txt", "--editable .", "compiled"]
    assert all((machine.folder / name).is_dir() for name in ("runs", "data", ".venv"))
    assert "--screen installs it" in words
    assert machine.set_up() == ([], "")
    (machine.folder / "requirements_training.txt").write_text("torch==1\n")
    told, _ = machine.set_up()
    assert "venv" not in told and "torch==1" in told


def test_the_system_is_changed_only_when_that_is_asked_for(machine: FreshMachine) -> None:
    machine.set_up()
    told, _ = machine.set_up("--screen")
    assert told == ["apt-get update", "apt-get install --yes --no-install-recommends screen"]
    machine.program("screen", "")
    assert machine.set_up("--screen") == ([], "")


def test_an_environment_that_was_broken_off_or_is_of_another_python_is_made_anew(
    machine: FreshMachine,
) -> None:
    machine.set_up(STAND_IN_BREAKS="yes", code=1)
    told, _ = machine.set_up()
    assert told[:2] == ["venv", "torch==1"]
    program = machine.folder / ".venv" / "bin" / "python"
    program.write_text(program.read_text().replace("$STAND_IN_VERSION", "3.12.1"))
    told, _ = machine.set_up(STAND_IN_VERSION="3.11.10")
    assert told[:2] == ["venv", "torch==1"]


def test_wrong_use_and_help(machine: FreshMachine) -> None:
    told, words = machine.set_up("--tset", code=2)
    assert told == [] and "--tset is no option" in words
    told, words = machine.set_up("--help")
    assert told == [] and words.startswith("Prepares a fresh machine") and "python3" in words
    assert "bash" not in words
