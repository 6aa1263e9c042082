from __future__ import annotations

import pynvml
from nvml_machine import Machine

from refocused.monitoring.gpu_driver import driver_versions


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
