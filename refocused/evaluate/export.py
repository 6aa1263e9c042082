"""From a step directory to a transformers folder: written a piece at a time, checked, renamed."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from refocused.evaluate.export_check import largest_difference
from refocused.evaluate.model_card import model_card
from refocused.evaluate.model_weights import ModelWeights, network_class
from refocused.evaluate.modeling_file import add_modeling_file
from refocused.evaluate.safetensors_files import (
    TORCH_DTYPES,
    Dtype,
    StreamedTensor,
    write_safetensors,
)
from refocused.system.atomic_files import fsync_directories, fsync_path
from refocused.system.errors import CheckpointError

FILE_BYTES = 5_000_000_000
LEFTOVER_AGE_S = 3600.0
# Where transformers' files have kept an older name than its modules.
_NAMES_IN_FILES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: The transformers folder.
        bytes: Bytes of all its files.
        parameters: Of the model, padding rows of the vocabulary left out.
        logit_difference: Largest difference to the step's own model, of its largest logit; None:
            not compared.
    """

    folder: Path
    bytes: int
    parameters: int
    logit_difference: float | None


def export_step(
    weights: ModelWeights,
    folder: Path,
    *,
    tokenizer: Any,
    dtype: Dtype = "bf16",
    file_bytes: int = FILE_BYTES,
    compare: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Exported:
    """Write a step as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    It appears under its name when it is whole and compared. Writing takes the memory of a piece of
    one tensor, the comparison that of the model in float32.

    Args:
        weights: Of the step.
        folder: The folder to make.
        tokenizer: transformers' tokenizer; None: the folder has none.
        dtype: What the weights are rounded to.
        file_bytes: Most bytes of one file of weights.
        compare: Load the folder again and compare its weights and logits with the step's.
        say: Told each stage.

    Raises:
        CheckpointError: The folder exists, cannot be written, or is not the step's model.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already. Remove it, or name another folder.")
    _clean_leftovers(folder)
    staging = folder.with_name(f"{_staging_prefix(folder)}{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        say("writing the weights")
        _write(weights, staging, tokenizer=tokenizer, dtype=dtype, file_bytes=file_bytes)
        if compare:
            say("loading it again, to compare")
        difference = largest_difference(weights, staging, dtype=dtype) if compare else None
        fsync_directories(staging)
        staging.rename(folder)
        fsync_path(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder} was not written: {error.strerror or error}. What was written of it is "
            "removed. Make room on that disk, or name another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Exported(folder, _size(folder), _parameters(weights), difference)


def _write(
    weights: ModelWeights, folder: Path, *, tokenizer: Any, dtype: Dtype, file_bytes: int
) -> None:
    config = _config(weights, tokenizer, dtype=dtype)
    names = _NAMES_IN_FILES.get(config.model_type, {})
    tensors = [
        StreamedTensor(names.get(name, name), shape, weights.pieces(name))
        for name, shape in weights.shapes.items()
    ]
    write_safetensors(folder, tensors, dtype=dtype, file_bytes=file_bytes)
    add_modeling_file(config, folder)
    config.save_pretrained(folder)
    _generation_config(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    card = model_card(weights, dtype=dtype, parameters=_parameters(weights))
    (folder / "README.md").write_text(card)
    for path in folder.iterdir():
        fsync_path(path)


def _config(weights: ModelWeights, tokenizer: Any, *, dtype: Dtype) -> Any:
    """Return the configuration with what only an export says."""
    config = type(weights.config).from_dict(weights.config.to_dict())
    config.architectures = [network_class(config).__name__]
    config.dtype = TORCH_DTYPES[dtype]
    # llama.cpp's converter reads these two names, which transformers 5 no longer writes.
    if config.model_type == "gpt2":
        config.n_ctx = config.n_positions
    elif config.model_type == "gpt_neox":
        config.rotary_pct = config.rope_parameters["partial_rotary_factor"]
    if tokenizer is not None:
        config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    return config


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

    end = config.eos_token_id
    return GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)


def _parameters(weights: ModelWeights) -> int:
    return sum(torch.Size(shape).numel() for shape in weights.shapes.values())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _staging_prefix(folder: Path) -> str:
    return f".{folder.name}.exporting-"


def _clean_leftovers(folder: Path) -> None:
    """Remove what killed exports to this folder left, when nobody has written there for an hour."""
    for path in folder.parent.glob(f"{_staging_prefix(folder)}*"):
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        if time.time() - newest > LEFTOVER_AGE_S:
            shutil.rmtree(path, ignore_errors=True)
