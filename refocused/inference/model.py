"""A model to ask: from a step directory or a transformers folder, on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from refocused.checkpoints.manifest import MANIFEST
from refocused.checkpoints.step_directory import read_step
from refocused.errors import CheckpointError
from refocused.inference.model_weights import ModelWeights, network_class, open_model_weights
from refocused.inference.safetensors_files import TORCH_DTYPES, Dtype
from refocused.inference.tokenizer import as_transformers, tokenizer_of
from refocused.models.build import register_families
from refocused.shards.tokenizer_files import tokenizer_file
from refocused.shards.tokenizers import TokenizerChoice

ATTENTION = "sdpa"  # transformers' own choice is slower on some machines


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for questions, with what belongs to it.

    Attributes:
        network: transformers' model, in evaluation mode, without padding rows.
        tokenizer: transformers' tokenizer; None: the model goes without.
        source: Where it came from.
        facts: What is known of its training: run, step, tokens, data, losses; empty for a
            transformers folder.
    """

    network: Any
    tokenizer: Any
    source: Path
    facts: Mapping[str, Any]


def load_model(
    source: Path,
    *,
    dtype: Dtype = "bf16",
    device: str = "cpu",
    tokenizer: TokenizerChoice | None = None,
    without_tokenizer: bool = False,
) -> LoadedModel:
    """Load a step directory, or a folder of transformers' form, as it is on the disk.

    Args:
        source: The folder.
        dtype: What the weights are rounded to.
        device: Where the model goes.
        tokenizer: The tokenizer to take; None: the one that is there.
        without_tokenizer: Load a model that has none.

    Raises:
        CheckpointError: It is neither, or damaged, or has no tokenizer.
        ShardError: The tokenizer is damaged, or has ids that the model does not know.
    """
    if (source / MANIFEST).is_file():
        weights = open_model_weights(read_step(source))
        chosen = None if without_tokenizer else tokenizer_of(weights, tokenizer)
        names, kind = weights.shapes, TORCH_DTYPES[dtype]
        tensors = {name: weights.tensor(name, dtype=kind) for name in names}
        network = build_network(weights.config, tensors, dtype=dtype).to(device)
        return LoadedModel(network, chosen, source, facts_of(weights))
    if (source / "config.json").is_file():
        return _load_folder(
            source, dtype=dtype, device=device, choice=tokenizer, without=without_tokenizer
        )
    raise CheckpointError(
        f"{source} is no model: it has neither {MANIFEST} (a step directory) nor config.json (a "
        "transformers folder). Choose a step: python launch/checkpoints.py list"
    )


def build_network(config: Any, tensors: Mapping[str, Tensor], *, dtype: Dtype) -> Any:
    """Build transformers' model out of its tensors, in evaluation mode, on the CPU.

    Args:
        config: transformers' configuration.
        tensors: All of them, tied ones under one name; those of the right type are not copied.
        dtype: What the model computes in.
    """
    be_quiet()
    network = network_class(config).from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=TORCH_DTYPES[dtype],
        attn_implementation=ATTENTION,
    )
    return network.eval()


def facts_of(weights: ModelWeights) -> dict[str, Any]:
    """Say where a step's model comes from."""
    manifest = weights.step.manifest
    names = ("run", "step", "tokens", "parameters", "loss", "validation_loss", "data_fingerprint")
    return {name: getattr(manifest, name) for name in names}


def load_network(folder: Path, *, dtype: Dtype) -> Any:
    """Load a folder of transformers' form, in evaluation mode, on the CPU; nothing is fetched.

    Raises:
        OSError: A file is missing.
        ValueError: The model is of no known kind.
    """
    import transformers

    be_quiet()
    register_families()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=TORCH_DTYPES[dtype],
        attn_implementation=ATTENTION,
        local_files_only=True,
        use_safetensors=True,
    )
    return network.eval()


def _load_folder(
    source: Path, *, dtype: Dtype, device: str, choice: TokenizerChoice | None, without: bool
) -> LoadedModel:
    try:
        network = load_network(source, dtype=dtype)
        tokenizer = None if without else _tokenizer_beside(source, network.config, choice)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be loaded by transformers: {error}") from None
    return LoadedModel(network.to(device), tokenizer, source, {})


def _tokenizer_beside(source: Path, config: Any, choice: TokenizerChoice | None) -> Any:
    import transformers

    if choice is None:
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    end = config.eos_token_id
    return as_transformers(
        tokenizer_file(choice, vocabulary=int(config.vocab_size)),
        end_of_text_id=end if isinstance(end, int) else None,
        max_length=int(config.max_position_embeddings),
    )


def be_quiet() -> None:
    """Keep transformers' progress bars off the screen."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
