"""The walks of `launch/test.sh --null-gpu` fit the package: they themselves need torch for CUDA."""

import os
import subprocess
import sys

import pytest
from ranks import ROOT

PATCH_ALL = """
import importlib, null_gpu_patches, sitecustomize
assert sitecustomize.PATCHED == set(null_gpu_patches.PATCHES)
for name in sorted(sitecustomize.PATCHED):
    importlib.import_module(name)
from refocused.engine.finite_updates import UpdateOutcome
assert UpdateOutcome(False).was_finite()
"""


@pytest.mark.slow  # imports torch and DeepSpeed
def test_all_that_the_walks_patch_is_there() -> None:
    folders = (ROOT / "tests" / "null_gpu" / "inside", ROOT, ROOT / "tests")
    imports = os.pathsep.join(map(str, folders))
    environment = os.environ | {"PYTHONPATH": imports, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", PATCH_ALL], env=environment, check=True, timeout=200)


def test_a_wrong_word_names_the_walks() -> None:
    command = [sys.executable, ROOT / "tests" / "null_gpu" / "walks.py", "warp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "compiled-3" in done.stderr and "torch 2.11.0 and " in done.stderr
