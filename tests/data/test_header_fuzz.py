from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CASES = 2000


def test_damaged_and_lying_headers_give_tokens_or_a_named_error_in_little_memory() -> None:
    script = Path(__file__).with_name("header_fuzz.py")
    done = subprocess.run(
        [sys.executable, str(script), "--cases", str(CASES), "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["crashes"] == []
    assert sum(sum(count.values()) for count in report["counts"].values()) == CASES
    assert all(min(count.values()) > 0 for count in report["counts"].values())  # both outcomes
