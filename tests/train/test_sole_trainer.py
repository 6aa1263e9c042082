from __future__ import annotations

import threading
from pathlib import Path

import pytest

from refocused.system.errors import TrainingError
from refocused.system.locks import FileLock
from refocused.train.lifecycle.run_folder import claim_run


def test_a_second_start_is_refused_while_the_first_one_trains(tmp_path: Path) -> None:
    first = claim_run(tmp_path)
    with pytest.raises(TrainingError, match="is being trained by another process") as told:
        claim_run(tmp_path, timeout_seconds=0.0)
    assert "launch/stop.py" in str(told.value)
    first.release()
    claim_run(tmp_path, timeout_seconds=0.0).release()


def test_a_start_waits_for_one_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claim_run(tmp_path)
    asked = []

    class Watched(FileLock):
        def acquire(self) -> bool:
            asked.append(super().acquire())
            if len(asked) == 2:  # refused twice: now the other one ends
                threading.Thread(target=first.release).start()
            return asked[-1]

    monkeypatch.setattr("refocused.train.lifecycle.run_folder.FileLock", Watched)
    claim_run(tmp_path).release()
    assert asked[:2] == [False, False] and asked[-1]


def test_runs_of_other_names_do_not_meet(tmp_path: Path) -> None:
    one = claim_run(tmp_path / "one", timeout_seconds=0.0)
    other = claim_run(tmp_path / "other", timeout_seconds=0.0)
    one.release()
    other.release()
