from __future__ import annotations

import json
from pathlib import Path

from refocused.train.lifecycle.launch_session import write_summary


def test_a_run_that_ends_leaves_its_summary(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"run": "one", "status": "stopped"}))
    assert write_summary(tmp_path) == ""
    assert (tmp_path / "SUMMARY.md").read_text().startswith("# one: stopped\n")
    assert (tmp_path / "summary.html").is_file()
    (tmp_path / ".SUMMARY.md.part").mkdir()
    trouble = write_summary(tmp_path)
    assert "SUMMARY.md was not written" in trouble and "Is a directory" in trouble
    assert f"launch/monitor.py {tmp_path} --summary" in trouble
