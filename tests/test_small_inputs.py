import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_inputs


@pytest.mark.slow
def test_a_small_hostile_file_ends_in_one_sentence_and_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, small_inputs.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(found) == list(small_inputs.CASES), done.stderr[-2000:]
    odd = {name: end for name, end in found.items() if end.startswith(("TRACEBACK", "ACCEPTED"))}
    assert not odd
    assert all(len(end) < 2000 for end in found.values())
