"""The file that travels with a model gives text the ids that the data has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.text_samples import random_texts, tiny_bpe, word_file
from tokenizers import Tokenizer

from refocused.prepare.texts.text_documents import train_byte_pairs
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, open_tokenizer
from refocused.tokenizers.tokenizer_json import check_vocabulary, tokenizer_file


def choices(folder: Path) -> list[TokenizerChoice]:
    words = word_file(folder / "words.json")
    content = train_byte_pairs(random_texts(40), vocabulary=290)
    (folder / "trained.json").write_bytes(content)
    return [
        TokenizerChoice("bytes"),
        TokenizerChoice("gpt2", bpe_folder=tiny_bpe(folder / "bpe")),
        TokenizerChoice(str(words)),
        TokenizerChoice(str(folder / "trained.json")),
    ]


def opened(content: bytes) -> Any:
    return Tokenizer.from_str(content.decode())


@pytest.mark.parametrize("number", range(4))
def test_text_gets_the_ids_of_the_data(tmp_path, number):
    choice = choices(tmp_path)[number]
    wanted = open_tokenizer(choice)
    found = opened(tokenizer_file(choice, vocabulary=512))
    found.no_truncation()
    found.no_padding()
    for text in [*random_texts(20), "\x00\x7f\n\n  \té"]:
        assert np.array_equal(found.encode(text, add_special_tokens=False).ids, wanted.encode(text))
    if number != 2:  # bytes come back, and the end of text is one token
        text = "  Hëllo 漢字 🙂 ,\n it 's\t"
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text
        assert found.encode("<|endoftext|>").ids == [wanted.end_of_text_id]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    for choice, largest in zip(choices(tmp_path), (256, 262, 3, 289), strict=True):
        content = tokenizer_file(choice, vocabulary=largest + 1)
        with pytest.raises(
            ShardError, match=f"ids up to {largest}, but the model has only {largest}"
        ):
            tokenizer_file(choice, vocabulary=largest)
        with pytest.raises(ShardError, match="here has ids"):
            check_vocabulary(content, vocabulary=largest, where="here")


def test_trained_byte_pairs_depend_on_the_texts_alone():
    texts = random_texts(60)
    special = ("<|user|>", "<|endoftext|>")
    content = train_byte_pairs(texts, vocabulary=400, special_tokens=special)
    assert train_byte_pairs(iter(texts[::-1]), vocabulary=400, special_tokens=special) == content
    tokenizer = opened(content)
    assert [tokenizer.token_to_id(one) for one in ("<|endoftext|>", "<|user|>")] == [0, 1]
    tokens = tokenizer.encode("it's the the 1984 cat\r\n\r\n  sat!!\n don't").tokens
    assert {"\u0120the", "'s", "19", "84", "\u0120cat"} <= set(tokens)
    assert "".join(tokens).count("\u010a") == 3


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    for vocabulary, special in ((256, []), (257, ["<a>"]), (300, ["e"]), (300, [""])):
        with pytest.raises(ShardError, match="give at least"):
            train_byte_pairs(["text"], vocabulary=vocabulary, special_tokens=special)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ShardError, match=r"built from vocab.bpe and encoder.json"):
        tokenizer_file(TokenizerChoice("gpt2"), vocabulary=512)
    with pytest.raises(ShardError, match="there is no such file"):
        tokenizer_file(TokenizerChoice(str(tmp_path / "none.json")), vocabulary=512)
