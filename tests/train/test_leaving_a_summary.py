from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from refocused.train.lifecycle.shutdown import leave_summary


def test_a_run_that_ends_leaves_its_summary(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"run": "one", "status": "stopped"}))
    leave_summary(tmp_path)
    assert (tmp_path / "SUMMARY.md").read_text().startswith("# one: stopped\n")
    assert (tmp_path / "summary.html").is_file()


def test_one_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".SUMMARY.md.part").mkdir()
    with caplog.at_level(logging.WARNING):
        leave_summary(tmp_path)
    assert "SUMMARY.md was not written (IsADirectoryError" in caplog.text
    assert "--summary" in caplog.text
