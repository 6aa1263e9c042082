"""The scripts of `launch/`: the set-up of a machine, and how a command finds its packages."""

import dataclasses
import os
import re
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

SETUP, SCRIPT = ROOT / "launch" / "setup_environment.sh", ROOT / "launch" / "train.sh"
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
        "/",  # so a relative path means there what it means to train.py
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
    (tmp_path / "path").mkdir()  # as on Debian: there is no `python`
    (tmp_path / "path" / "python3").symlink_to(tmp_path / "bare" / "bin" / "python")
    return folder


def run_script(checkout: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd="/", input="said", capture_output=True, text=True)


def test_every_script_finds_the_environment_beside_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = checkout / ".venv" / "bin" / "python"
    program(python, f'echo ".venv: $*"; exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{checkout.parent}/path")
    assert len(SCRIPTS) == 11
    for script in SCRIPTS:
        file = checkout / "launch" / f"{script}.py"
        done = run_script(checkout, file, "a b", "-x")
        assert done.stdout.splitlines() == [
            f".venv: {file} a b -x",
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
        f"error: {bare} lacks packages that refocused needs, for example torch.\n"
        f"hint: Install them into .venv with: {checkout}/launch/setup_environment.sh\n"
    )


def test_the_packages_that_a_script_looks_for_are_those_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sought: list[str] = []
    monkeypatch.setattr("importlib.metadata.distribution", sought.append)
    assert missing_package() is None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sought == [Requirement(text).name for text in project["dependencies"]]
    # 60 MB that no run imports, unless it logs there.
    assert not {"matplotlib", "tensorboard", "wandb"} & {*sought}


def test_every_dependency_is_pinned_once_within_its_range() -> None:
    text = (ROOT / "requirements_training.txt").read_text()
    assert "written by launch/pin_requirements.sh from" in text
    pins = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {one.name: one for one in map(Requirement, project["dependencies"])}
    optional = {
        one.name: one
        for name in ("tensorboard", "wandb", "pictures", "parquet", "web")
        for one in map(Requirement, extras[name])
    }
    assert [pin.name for pin in pins] == [*required, *optional]
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert exact.version in (required | optional)[pin.name].specifier, pin


PYTHON = """
case "$*" in
--version) echo "Python $STAND_IN_VERSION" ;;
"-m venv"*)
    echo "venv" >> "$SAID"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python
    [ -z "$STAND_IN_BREAKS" ] || { touch .venv/broken; exit 1; } ;;
"-m pip --version") [ ! -e .venv/broken ] ;;
"-m pip install"*)
    echo "  Downloading https://index/one-1.0-py3-none-any.whl (1.5 GB)"
    echo "  Downloading two-1.0-py3-none-any.whl.metadata (27 kB)"
    echo "Installing collected packages: one, two"
    echo "$*" | sed 's/.*-check //' >> "$SAID" ;;
"-m compileall"*) echo "compiled" >> "$SAID"; exit 1 ;;
esac
"""


UV = """
case "$*" in
--version) ;;
venv*)
    echo "uv venv" >> "$SAID"
    mkdir -p .venv/bin && cp "$PYTHON" .venv/bin/python ;;
*) echo "uv $*" >> "$SAID" ;;
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
            [str(self.folder / "launch" / SETUP.name), *options],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return said.read_text().splitlines(), done.stdout + done.stderr

    def program(self, name: str, text: str) -> None:
        program(self.folder / "bin" / name, text)


@pytest.fixture
def machine(tmp_path: Path) -> FreshMachine:
    for name in ("launch", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(SETUP, tmp_path / "launch")
    (tmp_path / "requirements_training.txt").write_text("torch==1\nother==2\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    used = "bash env sh cat cksum cp dirname echo grep mkdir mktemp rm sed tee touch"
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
    assert re.findall(r"^setup: (?:\d+ s|    ) +(.+)", words, re.M) == [
        "a virtual environment",
        *("torch==1", "one-1.0, 1.5 GB", "unpacking"),
        *("1 packages and what they need", "one-1.0, 1.5 GB", "unpacking"),
        *("refocused", "one-1.0, 1.5 GB", "unpacking"),
        "compiling Python files",
    ]
    assert machine.set_up() == ([], "")
    (machine.folder / "requirements_training.txt").write_text("torch==1\n")
    told, _ = machine.set_up()
    assert "venv" not in told and "torch==1" in told


def test_a_relative_interpreter_is_that_of_the_folder_where_it_is_typed(
    machine: FreshMachine,
) -> None:
    told, _ = machine.set_up(PYTHON=f".{machine.folder}/bin/python")  # typed in /
    assert told[0] == "venv"


def test_paths_of_the_tests_are_those_of_the_folder_where_they_are_typed(tmp_path: Path) -> None:
    for folder in ("launch", "tests", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "test.sh", tmp_path / "launch")
    program(tmp_path / "launch" / "setup_environment.sh", "")
    program(tmp_path / ".venv" / "bin" / "pytest", 'pwd; printf "%s\\n" "$@"')
    (tmp_path / "tests" / "test_api.py").touch()
    typed = ["../launch/test.sh", "test_api.py::test_x", "-k", "tests"]
    done = subprocess.run(typed, cwd=tmp_path / "tests", capture_output=True, text=True)
    one = f"{tmp_path}/tests/test_api.py::test_x"
    assert done.stdout.splitlines() == [str(tmp_path), one, "-k", "tests"], done.stderr


def test_uv_installs_all_but_torch_where_it_works(machine: FreshMachine) -> None:
    machine.program("uv", UV)
    told, _ = machine.set_up()
    packages = ["-r requirements_training.txt", "--editable ."]
    assert told == [
        "uv venv",
        "torch==1",  # by pip
        *(f"uv pip install --python .venv/bin/python {one}" for one in packages),
        "compiled",
    ]
    assert machine.set_up() == ([], "")
    shutil.rmtree(machine.folder / ".venv")
    machine.program("uv", "exit 127")  # such as a shim of another Python's
    told, _ = machine.set_up()
    assert told[0] == "venv" and not any(line.startswith("uv ") for line in told)


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
