"""Every tokenizer as a `tokenizers` file, and as transformers' own class."""

from __future__ import annotations

from typing import Any

from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import (
    BPE_FILES,
    BYTES,
    BYTES_END_OF_TEXT,
    END_OF_TEXT,
    GPT2,
    USUAL_ENDS,
    GptTokenizer,
    TokenizerChoice,
    bpe_folder,
    load_content,
    spelt_bytes,
    tokenizer_faults,
    tokenizers_file,
)

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_file(choice: TokenizerChoice, *, vocabulary: int) -> bytes:
    """Return a tokenizer as the content of a `tokenizer.json`.

    It gives text the ids that `open_tokenizer` gives it, but for the spelling of special tokens in
    a text, which it takes for those tokens, as transformers do. Raises `ShardError` if its files
    are missing or damaged, or it has ids beyond the model's `vocabulary`.
    """
    if choice.name == BYTES:
        content = _bytes_file()
    elif choice.name == GPT2:
        content = _gpt2_file(choice)
    else:
        content = tokenizers_file(choice).read_bytes()
    check_vocabulary(content, vocabulary=vocabulary, where=f"tokenizer {choice.name}")
    return content


def check_vocabulary(content: bytes, *, vocabulary: int, where: str) -> None:
    """Raise `ShardError` if a tokenizer has ids that the model does not know."""
    ids = load_content(content, where=where).get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= vocabulary:
        raise ShardError(
            f"{where} has ids up to {largest:,}, and the model knows {vocabulary:,}. Name the "
            "tokenizer that made the data; a new run may set model.vocabulary=auto."
        )


def _bytes_file() -> bytes:
    """Write bytes as a byte-pair encoding without pairs: the id of a byte is the byte."""
    from tokenizers import Tokenizer, models

    by_byte = sorted(spelt_bytes().items(), key=lambda item: item[1])
    tokenizer = Tokenizer(models.BPE(vocab=dict(by_byte), merges=[]))
    return _finished(tokenizer, end_of_text_id=BYTES_END_OF_TEXT, splits_words=False)


def _gpt2_file(choice: TokenizerChoice) -> bytes:
    from tokenizers import Tokenizer, models

    folder = bpe_folder(choice)
    checked = GptTokenizer(folder)
    merges, vocabulary = (str(folder / name) for name in BPE_FILES)
    with tokenizer_faults(folder):
        model = models.BPE.from_file(vocabulary, merges)
    return _finished(Tokenizer(model), end_of_text_id=checked.end_of_text_id, splits_words=True)


def _finished(tokenizer: Any, *, end_of_text_id: int, splits_words: bool) -> bytes:
    """Give a model of bytes its spelling, its end-of-text token, and the form of a file."""
    from tokenizers import AddedToken, decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=splits_words
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    assert tokenizer.token_to_id(END_OF_TEXT) == end_of_text_id
    text: str = tokenizer.to_str()
    return text.encode()


def as_transformers(content: bytes, *, end_of_text_id: int | None, max_length: int) -> Any:
    """Make transformers' tokenizer of a `tokenizer.json`, for sequences of up to `max_length`.

    Without an `end_of_text_id`, the usual token separates documents, if there is one.
    """
    from transformers import PreTrainedTokenizerFast

    inner = load_content(content, where=TOKENIZER_FILE)
    inner.no_truncation()
    inner.no_padding()
    # What it puts around a text was not put around the documents that the model was trained on.
    inner.post_processor = None
    if end_of_text_id is not None:
        end = inner.id_to_token(end_of_text_id)
    else:
        end = next((token for token in USUAL_ENDS if inner.token_to_id(token) is not None), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
