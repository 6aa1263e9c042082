"""Tokenizers in the form of transformers' own class."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.tokenizers.encoders import USUAL_ENDS, load_content
from refocused.tokenizers.tokenizer_json import TOKENIZER_FILE


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


def _end_of_text(ids: Mapping[str, int], wanted: int | None) -> str | None:
    if wanted is not None:
        return next((token for token, number in ids.items() if number == wanted), None)
    return next((token for token in USUAL_ENDS if token in ids), None)
