"""The wheel: what it holds, and that it trains outside of a checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from ranks import ROOT

from refocused import __version__
from refocused.commands.main import COMMANDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]
SHORT = (
    "evaluation.sequences=8 evaluation.sample_tokens=4 evaluation.interval=3 checkpoint.interval=3"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution builds, without the network."""
    folder = tmp_path_factory.mktemp("build")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True)
    with tarfile.open(folder / f"refocused-{__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    command = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", folder, "."]
    subprocess.run(command, cwd=folder / f"refocused-{__version__}", check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_the_package_and_all_of_config(wheel: Path) -> None:
    listed = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "refocused",
        "config",
    ]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {
        name.replace("config/", "refocused/shipped/", name.startswith("config/")): ROOT / name
        for name in names.splitlines()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert sorted(found) == sorted(expected)
        assert all(archive.read(name) == file.read_bytes() for name, file in expected.items())


def test_an_installed_wheel_trains_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", *OFFLINE, wheel], check=True)
    command = [environment / "bin" / "refocused", "train"]
    bare = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert bare.returncode == 2 and bare.stderr.endswith("python -m pip install torch\n")
    # The packages of this environment, but not the checkout, whose .pth file is nested here.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    deepspeed = environment / "bin" / "deepspeed"  # as pip writes it beside the package
    deepspeed.write_text(f"#!{python}\nfrom deepspeed.launcher.runner import main\nmain()\n")
    deepspeed.chmod(0o755)
    folder.mkdir()

    def run(*words: str) -> str:
        others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{environment / 'bin'}:{others['PATH']}"
        done = subprocess.run(
            words, cwd=folder, env={**others, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def refocused(*words: str) -> str:
        return run("refocused", *words)

    where = run("python", "-P", "-c", "import refocused; print(refocused.__file__)")
    assert where == f"{packages}/refocused/__init__.py\n"
    assert refocused("--version") == f"refocused {__version__}\n"
    for command in COMMANDS:
        assert f"refocused {command}" in refocused(command, "--help")
    assert "gpt2_1b" in refocused("--completion", "bash")
    assert "gpt2 12 x 768" in refocused(
        "estimate-cost", "--config", "gpt2_124m", "--per-hour", "24"
    )
    assert list(folder.iterdir()) == []

    trained = refocused("train", "--config", "demo", "run.steps=3", *SHORT.split())
    assert "git -" in trained and "done  step 3 of 3" in trained
    assert "refocused train --config demo" in trained  # how to train on
    # Two ranks, which find the run file by the path that it has in a checkout.
    config = ("--config", "config/runs/demo.yaml")
    trained = refocused("launch", *config, "run.steps=6", *SHORT.split())
    assert "done  step 6 of 6" in trained and "refocused launch --config" in trained
    listed = refocused("checkpoints", "list", "--run", "demo")
    assert [line.split()[0] for line in listed.splitlines()[1:3]] == ["6", "3"]
    assert {path.name for path in folder.iterdir()} == {"runs", "data"}
