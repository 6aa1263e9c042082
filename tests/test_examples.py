"""The scripts of `docs/examples` run as a user starts them, on one small run that they share."""

import os
import re
import subprocess
import sys

import pytest
from ranks import ROOT

# In the order of use, each with the last line that it prints.
PRINTED = {
    "estimate.py": r"8 x H100 SXM: \d+ h, \$[\d,]+ \(\$[\d,]+ to \$[\d,]+\), [\d.]+ GB a GPU",
    "start_training.py": r"that is \d\.\d{4} bits per byte",
    "load_and_generate.py": r"def (?s:.)+",
    "checkpoints.py": r"downloaded and verified: runs/copy/checkpoints/checkpoint_step_[24]0",
    "token_loader.py": r"step 20 loss \d\.\d{3}",
}


def printed(example, folder):
    """Run an example in a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "examples" / example],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
    return done.stdout.rstrip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_example_runs_as_printed(tmp_path):
    assert {path.name for path in (ROOT / "docs" / "examples").iterdir()} == set(PRINTED)
    for example, last in PRINTED.items():
        found = printed(example, tmp_path)
        assert re.search(rf"(\A|\n){last}\Z", found), found
    assert "continuing at Position(epoch=0, sequences=160" in printed("token_loader.py", tmp_path)
