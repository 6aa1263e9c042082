"""A step's weights as transformers' own model has them: without the vocabulary's padding rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.step.step_directory import StepDirectory, read_mapping, run_settings
from refocused.config.model_shape import LARGEST_NUMBER, shape_from
from refocused.evaluate.weights import StepWeights, joined, open_weights
from refocused.models.families import transformers_config
from refocused.system.errors import CheckpointError
from refocused.tokenizers.encoders import BYTES, TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, check_vocabulary, tokenizer_file

# In the configuration: tokens of a training sequence, which may be fewer than the model can take.
# transformers keep what they do not know.
TRAINED_LENGTH = "trained_sequence_length"


class ModelWeights:
    """The tensors of the model that a step is, one tensor or one piece of it at a time.

    Attributes:
        step: Where they come from.
        settings: The run file that the step was trained under.
        config: transformers' configuration of the model; its `vocab_size` is V without padding,
            and it says how long the sequences were that the model was trained on.
        padded: The same with the rows that were trained.
        shapes: The shape of each tensor by transformers' name, in the model's order; tied ones
            under one name.
    """

    def __init__(self, weights: StepWeights) -> None:
        """Fit a step's weights to the model that its `model.json` describes.

        Raises:
            CheckpointError: They are of another model.
        """
        self.step: StepDirectory = weights.step
        self.weights = weights
        self.settings: Mapping[str, Mapping[str, Any]] = run_settings(self.step)
        shape = shape_from(read_mapping(self.step.model), where=str(self.step.model))
        model = self.settings["model"]
        rows = shape.padded_vocabulary(_count(model, "vocabulary_multiple", 128, self.step))
        trained_length = _count(model, "sequence_length", 0, self.step)
        dropout = model.get("dropout", 0.0)
        self.config, self.padded = (
            transformers_config(shape.settings, vocabulary=vocabulary, dropout=dropout)
            for vocabulary in (shape.vocabulary, rows)
        )
        setattr(self.config, TRAINED_LENGTH, trained_length)
        self._check(_shapes(self.padded))
        wanted = _shapes(self.config)
        self.shapes = {name: wanted[name] for name in weights.shapes}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as `StepWeights.pieces` does."""
        elements = torch.Size(self.shapes[name]).numel()
        return self.weights.pieces(name, elements=elements)

    def tensor(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one whole tensor, rounded to `dtype`."""
        return joined(self.pieces(name), self.shapes[name], dtype=dtype)

    def _check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        found = dict(self.weights.shapes)
        found |= {other: found[name] for other, name in self.weights.ties.items()}
        odd = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if odd:
            first = odd[0]
            raise CheckpointError(
                f"{self.step.path} holds another model than its model.json describes: {first} is "
                f"{found.get(first, 'missing')}, not {wanted.get(first, 'there')} ({len(odd)} such "
                "tensors). Use the version of refocused that wrote the checkpoint."
            )


def open_model_weights(step: StepDirectory) -> ModelWeights:
    """Verify every byte of a step, and find its model's weights.

    Raises:
        CheckpointError: A file of it is damaged or missing, or is not as it should be.
    """
    return ModelWeights(open_weights(step))


def network_class(config: Any) -> Any:
    """Return transformers' class of a causal language model."""
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _count(model: Mapping[str, Any], name: str, usual: int, step: StepDirectory) -> int:
    found = model.get(name, usual)
    if type(found) is not int or not 0 < found <= LARGEST_NUMBER:
        raise CheckpointError(
            f"{step.run}: model.{name} = {found!r:.80}: a whole number of at least 1 is wanted. "
            "Choose another step: python launch/checkpoints.py list"
        )
    return found


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, which takes no memory for that."""
    with torch.device("meta"):
        network = network_class(config)(config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def tokenizer_of(weights: ModelWeights, choice: TokenizerChoice | None = None) -> Any:
    """Return a step's tokenizer as transformers' own class.

    Args:
        weights: Of the step.
        choice: The tokenizer to take; None: the one that travelled in the step.

    Raises:
        CheckpointError: None travelled, and none is named.
        ShardError: Its files are missing or damaged, or it has ids that the model does not know.
    """
    content = _content(weights, choice)
    settings = weights.settings["data"]
    named = [settings.get(name) for name in ("document_id", "separator_id")]
    return as_transformers(
        content,
        end_of_text_id=next((number for number in named if number is not None), None),
        max_length=int(weights.config.max_position_embeddings),
    )


def travelled_tokenizer(weights: ModelWeights) -> Any:
    """Return the tokenizer that a step needs no help to find; None where its run names no files.

    Raises:
        ShardError: It is damaged, or has ids that the model does not know.
    """
    is_bytes = weights.settings["data"].get("tokenizer") == BYTES
    return tokenizer_of(weights) if is_bytes or weights.step.tokenizer.is_file() else None


def _content(weights: ModelWeights, choice: TokenizerChoice | None) -> bytes:
    vocabulary, step = int(weights.config.vocab_size), weights.step
    trained_on = weights.settings["data"].get("tokenizer", "unknown")
    if choice is None and step.tokenizer.is_file():
        content = step.tokenizer.read_bytes()
        check_vocabulary(content, vocabulary=vocabulary, where=str(step.tokenizer))
        return content
    if choice is None and trained_on == BYTES:
        choice = TokenizerChoice(BYTES)
    if choice is None:
        raise CheckpointError(
            f"{step.path} has no tokenizer (its run says data.tokenizer: {trained_on}, and names "
            "no files of it). Name it: --tokenizer gpt2 --bpe-folder FOLDER, --tokenizer hub:MODEL "
            "or --tokenizer FILE; an export may do without: --no-tokenizer."
        )
    return tokenizer_file(choice, vocabulary=vocabulary)
