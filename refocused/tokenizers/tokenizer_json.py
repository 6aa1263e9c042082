"""Convert a tokenizer to a `tokenizers` file, and load transformers' class of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refocused.system.atomic_files import read_regular
from refocused.system.errors import ShardError, tokenizer_errors
from refocused.tokenizers import encoders

TOKENIZER_FILE = "tokenizer.json"
_SPLITS = {"ByteLevel", "Split", "Digits", "Punctuation"}  # pre-tokenizers that keep the text
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes (RFC 3629, 1)


def tokenizer_file(choice: encoders.TokenizerChoice, *, vocabulary: int) -> bytes:
    """Return a tokenizer as the content of a `tokenizer.json`.

    It encodes as `open_tokenizer` does, except that special tokens are recognized in the text, as
    is usual in transformers. Raises also if it has ids beyond the `vocabulary`.
    """
    from tokenizers import Tokenizer, models

    if choice.name == encoders.BYTES:  # a byte-pair encoding without merges, whose ids are bytes
        by_byte = sorted(encoders.bytes_by_character().items(), key=lambda item: item[1])
        tokenizer = Tokenizer(models.BPE(vocab=dict(by_byte), merges=[]))
        content = _finished(tokenizer, encoders.BYTES_END_OF_TEXT, splits_words=False)
    elif choice.name == encoders.GPT2:
        folder = encoders.bpe_folder(choice)
        checked = encoders.GptTokenizer(folder)
        merges, ids = (str(folder / name) for name in encoders.BPE_FILES)
        with tokenizer_errors(folder):
            model = models.BPE.from_file(ids, merges)
        content = _finished(Tokenizer(model), checked.end_of_text_id, splits_words=True)
    else:
        content = read_regular(encoders.tokenizers_file(choice))
    check_vocabulary(content, vocabulary=vocabulary, where=f"tokenizer {choice.name}")
    return content


def check_vocabulary(content: bytes, *, vocabulary: int, where: str) -> None:
    """Raise `ShardError` if a tokenizer has ids beyond the model's vocabulary."""
    ids = encoders.load_content(content, where=where).get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= vocabulary:
        raise ShardError(
            f"{where} has ids up to {largest:,}, but the model has only {vocabulary:,} ids. Use "
            "the tokenizer of the data; a new run may set model.vocabulary=auto."
        )


def _finished(tokenizer: Any, end_of_text_id: int, *, splits_words: bool) -> bytes:
    """Add the byte-level decoder and the end-of-text token, and return the file's content."""
    from tokenizers import AddedToken, decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=splits_words
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(encoders.END_OF_TEXT, normalized=False, special=True)])
    assert tokenizer.token_to_id(encoders.END_OF_TEXT) == end_of_text_id
    text: str = tokenizer.to_str()
    return text.encode()


def byte_lengths(
    tokenizer: Any, *, vocabulary: int, ends: Sequence[int | None] = ()
) -> encoders.Ids | None:
    """Return how many bytes of text each id of a vocabulary stands for, `(vocabulary,)`.

    0 are special tokens, the `ends` of documents, and ids without a token. None: unknown, because
    the ids do not stand for all bytes of a text and for nothing else: the tokenizer is not
    byte-level, lacks bytes, puts a space before a text, or changes it. NFC is no such change: it
    only spells a character in another way.

    Args:
        tokenizer: transformers' class of a `tokenizer.json`; see `as_transformers`.
        vocabulary: Ids of the model, at least those of the tokenizer.
        ends: Ids that separate documents.
    """
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = inner["model"], inner["added_tokens"]
    splits = _parts(inner["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in splits}
    byte_of = encoders.bytes_by_character()
    if (
        model["type"] != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or "ByteLevel" not in kinds
        or kinds - _SPLITS
        or any(part.get("add_prefix_space") or part.get("behavior") == "Removed" for part in splits)
        or {part["type"] for part in _parts(inner["normalizer"], "normalizers")} - {"NFC"}
        or any(not row["special"] and (row["lstrip"] or row["rstrip"]) for row in added)
    ):
        return None
    names = {row["content"] for row in added}
    plain = {token: number for token, number in model["vocab"].items() if token not in names}
    in_text = {letter for letter, byte in byte_of.items() if byte not in _NEVER_IN_UTF8}
    if in_text - model["vocab"].keys() or set("".join(plain)) - byte_of.keys():
        return None
    lengths = np.zeros(vocabulary, np.int32)
    for token, number in plain.items():
        lengths[number] = len(token)
    for row in added:
        lengths[row["id"]] = 0 if row["special"] else len(row["content"].encode())
    lengths[[end for end in ends if end is not None and end < vocabulary]] = 0
    return lengths


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of a step of a `tokenizer.json`, which may be a sequence."""
    if step is None:
        return []
    return list(step[name]) if step["type"] == "Sequence" else [step]


def saved_files(content: bytes, end: str | None) -> dict[str, bytes]:
    """Return the files of a tokenizer in a checkpoint: its content, and the end-of-text token."""
    settings = json.dumps({"eos_token": end}).encode()
    return {TOKENIZER_FILE: content, encoders.TOKENIZER_CONFIG: settings}


def as_transformers(
    content: bytes, *, end_of_text_id: int | None, max_length: int, file: Path | None = None
) -> Any:
    """Return transformers' tokenizer of a `tokenizer.json`, for up to `max_length` tokens.

    Without an `end_of_text_id`, `found_end_of_text` finds the token, also beside a `file`.
    """
    from transformers import PreTrainedTokenizerFast

    inner = encoders.load_content(content, where=TOKENIZER_FILE)
    # The model was trained without the tokens that a post-processor puts around a text.
    inner.post_processor = None
    if end_of_text_id is None:
        end = encoders.found_end_of_text(inner, file)
    else:
        end = inner.id_to_token(end_of_text_id)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
