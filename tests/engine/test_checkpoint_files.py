from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from refocused.engine.checkpoint_files import HashingCheckpointEngine, load_checked
from refocused.errors import CheckpointError

CONTENT = {"weights": torch.arange(100_000), "names": ["a", "b"]}


def test_the_engine_keeps_failures_and_goes_on(tmp_path: Path) -> None:
    engine = HashingCheckpointEngine()
    engine.create(None)
    engine.save(CONTENT, str(tmp_path / "missing" / "a.pt"))
    engine.save(CONTENT, str(tmp_path / "b.pt"))
    assert [file.path.name for file in engine.written] == ["b.pt"]
    assert [error.errno for error in engine.errors] == [errno.ENOENT]
    assert torch.equal(engine.load(str(tmp_path / "b.pt"))["weights"], CONTENT["weights"])


def test_each_save_starts_with_a_clean_slate(tmp_path: Path) -> None:
    engine = HashingCheckpointEngine()
    engine.create(None)
    engine.save(CONTENT, str(tmp_path / "missing" / "a.pt"))
    engine.save(CONTENT, str(tmp_path / "b.pt"))
    engine.create(None)
    assert (engine.written, engine.errors) == ([], [])


class Attack:
    """What a forged file could hold: unpickling it calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/nonexistent/forged"),))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"optimizer_state_dict": Attack()}, tmp_path / "forged.pt")
    for mapped in (False, True):
        with pytest.raises(CheckpointError, match=r"forged.pt cannot be read: Weights only load"):
            load_checked(tmp_path / "forged.pt", mapped=mapped)


def test_deepspeeds_own_small_classes_are_read(tmp_path: Path) -> None:
    content = {
        "scaler": DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False),
        "stage": ZeroStageEnum.weights,
        "address": fragment_address(numel=3, start=4),
    }
    torch.save(content, tmp_path / "small.pt")
    read = load_checked(tmp_path / "small.pt", mapped=True)
    assert read["scaler"].cur_scale == 2.0**16
    assert (read["stage"], read["address"]) == (content["stage"], content["address"])
