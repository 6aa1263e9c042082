"""The tokenizer that belongs to a model: the one that travelled with it, or the one named."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.errors import CheckpointError
from refocused.inference.model_weights import ModelWeights
from refocused.shards.tokenizer_files import TOKENIZER_FILE, check_vocabulary, tokenizer_file
from refocused.shards.tokenizers import BYTES, USUAL_ENDS, TokenizerChoice, load_content


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


def as_transformers(content: bytes, *, end_of_text_id: int | None, max_length: int) -> Any:
    """Make transformers' tokenizer of a `tokenizer.json`.

    Args:
        content: Of the file.
        end_of_text_id: Id that separates documents; None: the usual token for it, if there is one.
        max_length: Longest sequence of the model.
    """
    from transformers import PreTrainedTokenizerFast

    inner = load_content(content, where=TOKENIZER_FILE)
    inner.no_truncation()
    inner.no_padding()
    # What it puts around a text was not put around the documents that the model was trained on.
    inner.post_processor = None
    end = _end_of_text(inner.get_vocab(with_added_tokens=True), end_of_text_id)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TOKENIZER_FILE
        inner.save(str(file))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            bos_token=end,
            eos_token=end,
            pad_token=end,
            model_max_length=max_length,
            clean_up_tokenization_spaces=False,
        )


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


def _end_of_text(ids: Mapping[str, int], wanted: int | None) -> str | None:
    if wanted is not None:
        return next((token for token, number in ids.items() if number == wanted), None)
    return next((token for token in USUAL_ENDS if token in ids), None)
