"""Runs that are watched, and a machine with eight GPUs, for the tests that name them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from monitor.watched_run import WatchedRun, new_run
from nvml_machine import Machine, build_stand_in


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    """A run that trains, with every file."""
    run = new_run(tmp_path)
    run.begin()
    return run


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in library, compiled once."""
    return build_stand_in(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def eight_gpus(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Eight healthy GPUs, which the real pynvml finds here and in processes started here."""
    ctypes.CDLL(str(nvml_library))  # pynvml opens a library of this name: it is loaded already
    machine = Machine(tmp_path / "gpus.txt", gpus=8)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent))
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    return machine
