"""Runs that are watched, and a machine with eight GPUs, for the tests that name them."""

import nvml_machine
import pynvml
import pytest
from monitor.watched_run import new_run


@pytest.fixture
def run(tmp_path):
    """A run that trains, with every file."""
    run = new_run(tmp_path)
    run.begin()
    return run


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch):
    """Eight healthy GPUs, which the real pynvml finds here and in processes started here."""
    machine = nvml_machine.Machine(tmp_path / "nvml", gpus=8)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: nvml_machine.Library())
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    for path in machine.paths:
        monkeypatch.syspath_prepend(path)
    return machine
