"""Export a checkpoint to a transformers folder: written piece by piece, checked, renamed."""

from __future__ import annotations

import dataclasses
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.resume.step_contents import checked_trainer
from refocused.checkpoints.step.step_directory import read_mapping
from refocused.evaluate.load_model import build_network, load_network
from refocused.evaluate.model_weights import TRAINED_LENGTH, ModelWeights, network_class
from refocused.evaluate.modeling_file import add_modeling_file, modeling_name
from refocused.evaluate.safetensors_files import (
    TORCH_DTYPES,
    Dtype,
    StreamedTensor,
    write_safetensors,
)
from refocused.models.causal_lm import CausalLM
from refocused.system.atomic_files import fsync_directories, fsync_path
from refocused.system.errors import CheckpointError

CHECKED_TOKENS = 64
STRIDE = 7919  # a prime, so that the checked tokens are spread over the vocabulary
TOLERANCE = 1e-4  # of the largest logit, in float32: sums are ordered by the shapes of products


def largest_difference(weights: ModelWeights, folder: Path, *, dtype: Dtype) -> float:
    """Load an export as anybody would; return how far its logits are from the step's own.

    Every tensor has to be the step's, rounded, bit for bit. The logits are compared, in float32 and
    as a share of the largest, with those of the model that was trained: our head, padding rows
    and all, out of weights that are rounded alike.

    Raises:
        CheckpointError: A tensor or the logits differ.
    """
    length = min(CHECKED_TOKENS, int(weights.config.max_position_embeddings))
    ids = (torch.arange(length) * STRIDE % int(weights.config.vocab_size)).unsqueeze(0)
    wanted = _logits_as_trained(weights, ids, dtype=dtype)
    found = _logits_of_folder(weights, ids, folder, dtype=dtype)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCE:  # so that NaN fails too
        raise _differs(f"its logits are {difference:.1e} of the largest one away")
    return difference


def _logits_as_trained(weights: ModelWeights, ids: Tensor, *, dtype: Dtype) -> Tensor:
    """Return the logits `[1, T, V]` of the step's model, in float32."""
    kind, inner = TORCH_DTYPES[dtype], weights.weights
    tensors = {name: inner.tensor(name, dtype=kind).float() for name in inner.shapes}
    network = build_network(weights.padded, tensors, dtype="fp32")
    model = CausalLM(network, chunk_tokens=1)
    with torch.no_grad():
        return model.logits(ids)[..., : int(weights.config.vocab_size)].clone()


def _logits_of_folder(weights: ModelWeights, ids: Tensor, folder: Path, *, dtype: Dtype) -> Tensor:
    """Return the logits `[1, T, V]` of an export, in float32, after a look at each tensor."""
    try:
        network = load_network(folder, dtype="fp32")
    except (OSError, ValueError) as error:
        raise _differs(f"transformers cannot load it ({error})") from None
    found = dict(network.named_parameters()) | dict(network.named_buffers())
    for name in weights.shapes:
        if not torch.equal(found[name], weights.tensor(name, dtype=TORCH_DTYPES[dtype]).float()):
            raise _differs(f"its {name} is another")
    with torch.no_grad():
        logits: Tensor = network(ids).logits
    return logits


def _differs(how: str) -> CheckpointError:
    return CheckpointError(
        f"The exported model is not the one that was trained: {how}. The export is removed. Please "
        "report this with the versions of torch and transformers."
    )


def model_card(weights: ModelWeights, *, dtype: Dtype, parameters: int) -> str:
    """Write the README.md of an exported model.

    Args:
        weights: Of the step.
        dtype: What the exported weights are rounded to.
        parameters: Of the exported model.
    """
    manifest, config = weights.step.manifest, weights.config
    step = weights.step
    trainer = checked_trainer(read_mapping(step.trainer), where=str(step.path))
    cost = trainer["cost_usd"]
    rows = {
        "run": f"{manifest.run}, step {manifest.step:,}",
        "saved": manifest.created.isoformat(timespec="seconds"),
        "architecture": f"{config.model_type}, {parameters:,} parameters, stored as {dtype}",
        "context": _context(config),
        "vocabulary": f"{config.vocab_size:,} ids, {_tokenizer(weights.settings)}",
        "tokens": f"{manifest.tokens:,} trained on",
        "data": f"fingerprint {manifest.data_fingerprint}, order {manifest.data_order}",
        "training loss": _loss(manifest.loss),
        "validation loss": _loss(manifest.validation_loss),
        "time": f"{trainer['seconds'] / 3600:,.2f} h until this step was saved",
        "cost": "unknown" if cost is None else f"${cost:,.2f} until this step was saved",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    name = modeling_name(config)
    code = "" if name is None else f"It needs torch, transformers 5 and its code, {name}.py.\n\n"
    consent = "" if name is None else ", trust_remote_code=True"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {manifest.run}

A causal language model, pre-trained from scratch; it is not tuned to follow instructions.

| | |
|---|---|
{table}

{code}```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{consent})
tokenizer = AutoTokenizer.from_pretrained("."{consent})
```
"""


def _context(config: Any) -> str:
    trained, longest = getattr(config, TRAINED_LENGTH), config.max_position_embeddings
    fewer = f", of {longest:,} that it takes" if trained < longest else ""
    return f"trained on {trained:,} tokens at once{fewer}"


def _tokenizer(settings: Mapping[str, Any]) -> str:
    return f"tokenizer {settings['data'].get('tokenizer', 'unknown')}"


def _loss(loss: float | None) -> str:
    """Write a loss in nats a token, with its perplexity."""
    return (
        "not known"
        if loss is None
        else f"{loss:.4f} (perplexity {math.exp(min(loss, 100.0)):,.2f})"
    )


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
