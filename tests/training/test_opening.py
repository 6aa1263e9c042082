from __future__ import annotations

from refocused.config.data import DataConfig
from refocused.training.opening import tokenizer_lines


def test_a_tokenizer_that_is_named_and_not_held_is_said_before_training() -> None:
    (line,) = tokenizer_lines(DataConfig(source="tokens", tokenizer="gpt2"))
    assert "final_model/ will hold no tokenizer" in line
    assert "Set data.bpe_folder" in line


def test_nothing_is_said_where_it_travels_or_is_not_named() -> None:
    for settings in ({"bpe_folder": "bpe", "tokenizer": "gpt2"}, {"tokenizer": "bytes"}, {}):
        assert tokenizer_lines(DataConfig(source="tokens", **settings)) == []
