"""Whether Triton's interpreter runs its kernels here, on the CPU (TRITON_INTERPRET=1)."""

import os
from importlib import metadata

import pytest
from packaging.version import Version

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHY_NOT = "" if INTERPRETED else "needs TRITON_INTERPRET=1"
try:
    IS_OLD = Version(metadata.version("triton")) < Version("3.7")
except metadata.PackageNotFoundError:
    IS_OLD, WHY_NOT = False, "needs Triton: pip install triton"
if INTERPRETED and IS_OLD and Version(metadata.version("numpy")) >= Version("2.5"):
    # It makes an int of an array of one element, which numpy 2.5 refuses; 3.7 squeezes it.
    WHY_NOT = "Triton 3.6's interpreter does not fit numpy 2.5"
needs_interpreter = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
