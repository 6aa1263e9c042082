"""Text that grows token by token is the text of all tokens, and is shown no sooner than it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from refocused.evaluate.written_text import GrowingText, Writing, cut_at_stop

CHARACTERS = st.text("ab \n\u00e9\u6f22\U0001f600")


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(CHARACTERS)
def test_characters_appear_whole(text: str) -> None:
    growing = GrowingText(decode)
    pieces = [growing.add(byte) for byte in text.encode()]
    assert "".join(pieces) == growing.text == text
    assert all(piece.isprintable() or "\n" in piece for piece in pieces if piece)


def test_bytes_that_are_no_text_wait_for_the_next_character() -> None:
    growing = GrowingText(decode)
    assert [growing.add(byte) for byte in b"a\x80\xffb"] == ["a", "", "", "\ufffd\ufffdb"]


def test_a_decoder_may_treat_the_first_token_otherwise() -> None:
    words = ["the", " cat", " sat"]
    growing = GrowingText(lambda ids: "".join(words[number] for number in ids).lstrip())
    assert [growing.add(number) for number in range(3)] == words


@given(CHARACTERS, st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    shown: list[str] = []
    writing = Writing(decode, rows=1, ends=[256], stops=stops, show=shown.append)
    done = False
    for byte in [*text.encode(), 256]:
        done = bool(writing(torch.tensor([[byte]]), torch.empty(0)))
        if done:
            break
    assert done
    before = cut_at_stop(text, stops, added=len(text))
    wanted = text if before is None else before
    assert wanted.startswith("".join(shown))
    assert (writing.lengths[0] is None) == (before is None)
    writing.finish(wanted)
    assert "".join(shown) == wanted
