"""A machine with eight GPUs, for the tests that ask for one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from nvml_machine import Machine, build_stand_in


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in library, compiled once."""
    return build_stand_in(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def eight_gpus(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Eight healthy GPUs, which the real pynvml in this process talks to."""
    ctypes.CDLL(str(nvml_library))  # pynvml asks for a library of this name: it is loaded already
    machine = Machine(tmp_path / "gpus.txt", gpus=8)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    return machine
