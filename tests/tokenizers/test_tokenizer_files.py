"""The file that travels with a model gives text the ids that the data has."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.text_samples import random_texts, tiny_bpe, word_file
from tokenizers import Tokenizer

from refocused.prepare.texts.text_documents import train_byte_pairs
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, open_tokenizer
from refocused.tokenizers.tokenizer_json import (
    as_transformers,
    byte_lengths,
    check_vocabulary,
    tokenizer_file,
)


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


def lengths_of(content, *, ends=(), end_of_text_id=None, vocabulary=512):
    loaded = as_transformers(content, end_of_text_id=end_of_text_id, max_length=9)
    return byte_lengths(loaded, vocabulary=vocabulary, ends=ends)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_lengths_of_a_texts_ids_are_its_bytes(tmp_path, number):
    choice = choices(tmp_path)[number]
    encoder = open_tokenizer(choice)
    lengths = lengths_of(tokenizer_file(choice, vocabulary=512))
    assert lengths.shape == (512,) and lengths.max() > (number > 0)
    for text in [*random_texts(20), "\x00\x7f  \té \u6f22\u5b57 \U0001f642", "<|endoftext|>"]:
        assert lengths[encoder.encode(text)].sum() == len(text.encode())
    # Neither the end of a text nor padding stands for any.
    assert not lengths[encoder.end_of_text_id] and not lengths[encoder.vocabulary :].any()


def test_ids_that_end_documents_and_special_tokens_stand_for_no_text():
    inner = json.loads(train_byte_pairs(random_texts(40), vocabulary=290))
    size = len(inner["model"]["vocab"])
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    inner["added_tokens"] += [
        {"id": size, "content": "<pad>", "special": True, **added},
        {"id": size + 1, "content": "\u6f22 ", "special": False, **added},
    ]
    content, ids = json.dumps(inner).encode(), inner["model"]["vocab"]
    assert lengths_of(content)[[size, size + 1, ids["a"], ids["b"]]].tolist() == [0, 4, 1, 1]
    found = lengths_of(content, ends=(None, ids["a"], 700), end_of_text_id=ids["b"])
    assert found[[size, size + 1, ids["a"], ids["b"]]].tolist() == [0, 4, 0, 0]


SPACE_FIRST = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
LOST = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
STRIPPED = {"id": 290, "content": "<a>", "special": False, "lstrip": True, "rstrip": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.update(normalizer={"type": "Lowercase"}),
        lambda inner: inner.update(pre_tokenizer=SPACE_FIRST | {"use_regex": True}),
        lambda inner: inner.update(pre_tokenizer={"type": "Whitespace"}),
        lambda inner: inner["pre_tokenizer"]["pretokenizers"].insert(0, LOST),
        lambda inner: inner["model"].update(end_of_word_suffix="</w>"),
        lambda inner: inner["model"]["vocab"].pop("\u0120"),  # the byte of a space
        lambda inner: inner["added_tokens"].append(
            STRIPPED | {"single_word": False, "normalized": False}
        ),
    ],
)
def test_the_lengths_of_ids_that_are_not_the_bytes_of_a_text_are_unknown(change):
    inner = json.loads(train_byte_pairs(random_texts(40), vocabulary=290))
    if inner["pre_tokenizer"]["type"] != "Sequence":
        inner["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [inner["pre_tokenizer"]]}
    inner["model"]["merges"] = []
    assert lengths_of(json.dumps(inner | {"normalizer": {"type": "NFC"}}).encode()) is not None
    change(inner)
    assert lengths_of(json.dumps(inner).encode()) is None


def test_words_have_no_known_length(tmp_path):
    assert lengths_of(word_file(tmp_path / "words.json").read_bytes()) is None
