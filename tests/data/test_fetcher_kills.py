from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KILLS = 30


def test_a_killed_fetcher_leaves_no_wrong_shard_and_a_right_one_is_not_fetched_again(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("fetcher_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "--kills", str(KILLS), "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["interrupted"] > 0  # the kills met downloads and conversions halfway
    assert report["ranged"] > 0  # and shards that come by ranges
    assert (report["wrong"], report["again"], report["left"]) == ([], [], [])
