from __future__ import annotations

import contextlib
import errno
import pickletools
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from refocused.engine.shard_files import HashingCheckpointEngine

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


OBJECTS = {
    "zero_stage": ZeroStageEnum.weights,
    "loss_scaler": DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False, dtype=torch.float16),
    "param_slice_mappings": [{"weight": fragment_address(numel=3, start=4)}],
}


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_written_holds_plain_values_and_deepspeed_gets_its_objects_back(
    tmp_path: Path, copied: bool
) -> None:
    engine, file = HashingCheckpointEngine(), tmp_path / "states.pt"
    engine.create(None)
    with engine.copying() if copied else contextlib.nullcontext():
        engine.save({"optimizer_state_dict": OBJECTS}, str(file))
    engine.write_copies()
    pickled = torch._C.PyTorchFileReader(str(file)).get_record("data.pkl")
    named = {arg for code, arg, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert named == {"torch float16"}
    read = engine.load(str(file))["optimizer_state_dict"]
    assert read["zero_stage"] == 3 and type(read["zero_stage"]) is int
    assert read["param_slice_mappings"] == [{"weight": {"numel": 3, "start": 4}}]
    assert type(read["loss_scaler"]) is DynamicLossScaler
    assert vars(read["loss_scaler"]) == vars(OBJECTS["loss_scaler"])


def test_what_an_earlier_version_wrote_is_loaded_as_its_objects(tmp_path: Path) -> None:
    scaler = LossScaler(scale=1.0)
    torch.save({"optimizer_state_dict": {"loss_scaler": scaler}}, tmp_path / "states.pt")
    read = HashingCheckpointEngine().load(str(tmp_path / "states.pt"))["optimizer_state_dict"]
    assert type(read["loss_scaler"]) is LossScaler
    assert vars(read["loss_scaler"]) == vars(scaler)
