from __future__ import annotations

import sys
import time
from pathlib import Path

import pynvml
import pytest
from nvml_machine import Machine

from refocused.monitor.sampler import gpu_reader
from refocused.monitor.sampler.gpu_reader import NoGpusError, driver_versions, gpu_capabilities
from refocused.system.errors import RefocusedError


def test_versions_are_told_or_unknown(eight_gpus: Machine) -> None:
    pynvml.nvmlInit()
    try:
        assert driver_versions() == (None, None)
        eight_gpus.driver(driver="570.86.15", cuda=12080)
        assert driver_versions() == ("570.86.15", (12, 8))
        eight_gpus.driver(cuda=13010)
        assert driver_versions() == ("570.86.15", (13, 1))
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture
def in_a_process(
    eight_gpus: Machine, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """The eight GPUs, also for a process that is started here."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent))
    return eight_gpus


def test_another_process_counts_the_gpus(in_a_process: Machine) -> None:
    assert gpu_capabilities() == [None] * 8  # the stand-in tells no capability
    for index in range(7):
        in_a_process.gpu(index, capability=90)
    in_a_process.gpu(7, capability=75)
    assert gpu_capabilities() == [(9, 0)] * 7 + [(7, 5)]
    in_a_process.gpu(3, lost=1)
    assert gpu_capabilities()[3] is None


def test_a_machine_without_a_driver_has_none() -> None:
    assert gpu_capabilities() == []


def test_a_driver_at_fault_is_named(in_a_process: Machine) -> None:
    in_a_process.driver(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(NoGpusError, match="Restart the machine") as caught:
        gpu_capabilities()
    assert caught.value.is_fault


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import time; time.sleep(600)", RefocusedError, r"not answer within 1 s.*run\.device=cpu"),
        ("import os; os.abort()", NoGpusError, "ended with code -6"),
    ],
)
def test_a_driver_that_hangs_or_crashes_harms_its_own_process_alone(
    monkeypatch: pytest.MonkeyPatch, program: str, kind: type[RefocusedError], words: str
) -> None:
    monkeypatch.setattr(gpu_reader, "QUERY", [sys.executable, "-c", program])
    monkeypatch.setattr(gpu_reader, "LIMIT_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(kind, match=words):
        gpu_capabilities()
    assert time.monotonic() - began < 60
