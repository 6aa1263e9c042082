from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from refocused.evaluate.load_model import load_model
from refocused.evaluate.zero_files import Fragment, ZeroFiles, find_layout
from refocused.system.errors import CheckpointError

SMALL = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8,
         "vocab_size": 9}  # fmt: skip
MODULE = {"module": {"a": torch.zeros(3)}, "shared_params": None, "param_shapes": [{"a": (3,)}]}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ({}, {}),
        ({"module": 5}, {}),
        (MODULE | {"module": {"a": 5}}, {}),
        (MODULE | {"shared_params": 5}, {}),
        (MODULE, {}),
        (MODULE | {"param_shapes": 5}, {"fp32_flat_groups": []}),
        (MODULE | {"param_shapes": [{"a": "x"}]}, {"fp32_flat_groups": []}),
        (MODULE, {"fp32_flat_groups": 5}),
        (MODULE, {"fp32_flat_groups": [None]}),
        (MODULE | {"frozen_param_shapes": None}, {"fp32_flat_groups": [torch.zeros(2)]}),
    ],
)
def test_unexpected_contents_of_a_checkpoint_are_named(
    model: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    contents = {"model.pt": model, "optim.pt": {"optimizer_state_dict": optimizer}}
    files: Any = types.SimpleNamespace(
        model=["model.pt"], optimizer=["optim.pt"], content=contents.__getitem__
    )
    with pytest.raises(CheckpointError, match=r"is not as DeepSpeed 0\.19 writes|elements"):
        find_layout(files, stage=3, dtype="bf16")


def test_elements_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    torch.save({"masters": [torch.zeros(3)]}, tmp_path / "x.pt")
    manifest = types.SimpleNamespace(files=(), zero_stage=3, world_size=0)
    step: Any = types.SimpleNamespace(path=tmp_path, manifest=manifest)
    files = ZeroFiles(step)
    assert files.elements(Fragment("x.pt", ("masters", 0), 1, 2)).tolist() == [0, 0]
    with pytest.raises(CheckpointError, match=r"x\.pt lacks elements of 0"):
        files.elements(Fragment("x.pt", ("masters", 0), 1, 3))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMALL | {"n_layer": 10**6}, "1,000,000 layers, and at most 1,000"),
        (SMALL | {"vocab_size": 10**9}, r"describes 8,0\d\d,\d{3},\d{3} parameters, and its"),
        (SMALL | {"n_head": "x"}, "cannot be loaded by transformers"),
        (SMALL | {"n_head": 0}, "cannot be loaded by transformers"),
        ("[" * 200_000, "it nests over 100 levels"),
    ],
)
def test_a_config_of_a_larger_model_than_its_files_is_refused(
    tmp_path: Path, config: object, message: str
) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, without_tokenizer=True)
