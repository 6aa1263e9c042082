"""What is written a piece at a time is what the safetensors library reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refocused.evaluate.safetensors_files import (
    INDEX,
    TORCH_DTYPES,
    Dtype,
    StreamedTensor,
    write_safetensors,
)

TENSORS = {
    "first": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "second.weight": torch.randn(4, generator=torch.Generator().manual_seed(2)),
    "third": torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(3)),
}


def streamed() -> list[StreamedTensor]:
    return [
        StreamedTensor(name, tuple(tensor.shape), tensor.flatten().split(3))
        for name, tensor in TENSORS.items()
    ]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_one_file_holds_all(tmp_path: Path, dtype: Dtype) -> None:
    (file,) = write_safetensors(tmp_path, streamed(), dtype=dtype, file_bytes=1000)
    assert file == tmp_path / "model.safetensors"
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == TORCH_DTYPES[dtype]
        assert torch.equal(found[name], tensor.to(TORCH_DTYPES[dtype]))


def test_several_files_are_within_the_limit_and_indexed(tmp_path: Path) -> None:
    files = write_safetensors(tmp_path, streamed(), dtype="fp32", file_bytes=50)
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * (15 + 4 + 8)
    assert list(index["weight_map"]) == list(TENSORS)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])
    first, second = (sum(t.nbytes for t in load_file(file).values()) for file in files[:2])
    assert (first, second) == (60, 48)  # the first tensor alone is above the limit


def test_nothing_is_written_over(tmp_path: Path) -> None:
    write_safetensors(tmp_path, streamed(), dtype="fp32", file_bytes=1000)
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path, streamed(), dtype="fp32", file_bytes=1000)
