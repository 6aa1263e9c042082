"""Generation: the model's own choices, for any batch, cache and family."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from evaluate.small_models import CONTEXT, FAMILIES, ROWS, bytes_tokenizer, small_model
from hypothesis import given
from hypothesis import strategies as st

from refocused.evaluate.generation import Sampling, Writing, generate
from refocused.system.errors import ConfigError
from refocused.tokenizers.tokenizer_json import as_transformers

GREEDY = Sampling(tokens=20, temperature=0.0)
PROMPTS = ["def f(x):", "a", "while True:", "import os"]


def likeliest(model, prompt, *, tokens):
    """The greedy continuation by whole forward passes, up to the end of text."""
    ids = list(prompt.encode())
    for _ in range(tokens):
        with torch.no_grad():
            logits = model.network(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1, :257].argmax()))
        if ids[-1] == 256:
            break
    return ids[len(prompt.encode()) :]


def as_text(ids):
    text: str = bytes_tokenizer().decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_the_argmax_of_full_passes(family):
    model = small_model(family)
    found = generate(model, PROMPTS, GREEDY, batch=3)
    assert [answer.prompt for answer in found.answers] == [0, 1, 2, 3]
    wanted = [likeliest(model, prompt, tokens=20) for prompt in PROMPTS]
    assert [answer.text for answer in found.answers] == [as_text(ids) for ids in wanted]
    assert [answer.tokens for answer in found.answers] == [len(ids) for ids in wanted]
    assert found.tokens == sum(map(len, wanted))
    assert len({tuple(ids) for ids in wanted}) > 1  # the texts differ


def test_padding_ids_are_never_drawn():
    model = small_model()
    with torch.no_grad():
        model.network.get_output_embeddings().weight[257:] *= 50
    sampling = Sampling(tokens=30, temperature=5.0, top_k=0, samples=8)
    seen: list[int] = []
    model.network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"].flatten().tolist()),
        with_kwargs=True,
    )
    generate(model, ["a"], sampling)
    assert max(seen) <= 256
    assert len(set(seen)) > 50


def test_a_seed_repeats_its_draws_and_leaves_others_unchanged():
    model = small_model()
    sampling = Sampling(tokens=12, samples=3)
    torch.manual_seed(5)
    undisturbed = torch.rand(1)
    torch.manual_seed(5)
    texts = [answer.text for answer in generate(model, ["x", "y"], sampling).answers]
    assert torch.equal(torch.rand(1), undisturbed)
    assert len(texts) == 6 and len(set(texts)) == 6
    again = generate(model, ["x", "y"], sampling)
    assert [answer.text for answer in again.answers] == texts
    other = generate(model, ["x", "y"], dataclasses.replace(sampling, seed=1))
    assert [answer.text for answer in other.answers] != texts


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_each_sampling_limit_ends_at_the_likeliest(narrow):
    sampling = Sampling(**{"tokens": 20, "top_k": 0, "temperature": 2.0, **narrow})  # type: ignore[arg-type]
    model = small_model()
    drawn = generate(model, PROMPTS, sampling)
    assert drawn.answers == generate(model, PROMPTS, GREEDY).answers
    free = generate(model, PROMPTS, Sampling(tokens=20, top_k=0, temperature=2.0))
    assert free.answers != drawn.answers


def test_a_penalty_keeps_a_model_from_repeating():
    model = small_model("gpt_neox", spread=0.02)
    plain = generate(model, ["abcabc"], GREEDY).answers[0].text
    punished = dataclasses.replace(GREEDY, repetition_penalty=1e6)
    varied = generate(model, ["abcabc"], punished).answers[0].text
    assert varied != plain
    assert not set(varied) & set("abc")


def test_a_stop_string_ends_a_text_before_it():
    model = small_model()
    plain = generate(model, PROMPTS, GREEDY).answers
    stop = plain[0].text[7:9]
    stopped = generate(model, PROMPTS, dataclasses.replace(GREEDY, stops=("\0\0", stop))).answers
    assert stopped[0].ended == "stop string"
    assert stopped[0].text == plain[0].text.partition(stop)[0]
    for one, other in zip(plain, stopped, strict=True):
        assert other.text == one.text.partition(stop)[0]


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_the_streamed_pieces_are_the_text(stops):
    model = small_model()
    pieces: list[str] = []
    sampling = Sampling(tokens=60, temperature=3.0, top_k=0, stops=stops)
    found = generate(model, ["a"], sampling, show=pieces.append)
    assert "".join(pieces) == found.answers[0].text
    assert len(pieces) > 10
    assert 0 < found.first_seconds < found.seconds


def words_of(kind):
    """A tokenizer of the words w0 to w298, each with its space, whose decoder strips the first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    begin = "" if kind == "WordPiece" else "\u2581"
    pieces = ["<unk>", *(f"{begin}w{number}" for number in range(ROWS - 1))]
    if kind == "WordPiece":
        model: Any = models.WordPiece(
            {piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.Whitespace(),
            decoders.WordPiece(),
        )
    else:
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        )
    if kind == "Llama 2":
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    content = tokenizer.to_str().encode()
    return as_transformers(content, end_of_text_id=None, max_length=CONTEXT)


@pytest.mark.parametrize("kind", ["Metaspace", "Llama 2", "WordPiece"])
def test_an_answer_keeps_the_space_after_its_prompt(kind):
    model = dataclasses.replace(small_model(), tokenizer=words_of(kind))
    pieces: list[str] = []
    (answer,) = generate(model, ["w7 w8"], GREEDY, show=pieces.append).answers
    assert re.fullmatch(r"( w\d+){20}", answer.text)
    assert "".join(pieces) == answer.text
    both = generate(model, ["w7", "w7 w8"], GREEDY).answers  # the first one is padded
    assert both[0].text[:2] == " w" and both[1].text == answer.text
    word = answer.text.split(" ")[1]
    stopped = generate(model, ["w7 w8"], dataclasses.replace(GREEDY, stops=(f" {word}",)))
    assert (stopped.answers[0].text, stopped.answers[0].ended) == ("", "stop string")


@pytest.mark.parametrize(("family", "limited"), [("gpt2", True), ("resonance", False)])
def test_a_text_ends_where_the_context_does(family, limited):
    model = small_model(family)
    with torch.no_grad():
        model.network.get_output_embeddings().weight[256] = 0.0  # no end of text
    sampling = dataclasses.replace(GREEDY, tokens=CONTEXT)
    answer, short = generate(model, ["a" * 40, "b"], sampling).answers
    assert (answer.tokens, answer.ended) == ((24, "context") if limited else (64, "tokens"))
    assert short.tokens == (63 if limited else 64)
    if limited:
        with pytest.raises(ConfigError, match=r"Prompt 2 has 64 tokens.*context of 64.*Shorten"):
            generate(model, ["a", "a" * CONTEXT], sampling)


def test_unusable_prompts_are_rejected():
    with pytest.raises(ConfigError, match=r"^The prompt is empty\. Give a text"):
        generate(small_model(), [""], GREEDY)
    with pytest.raises(ConfigError, match="same text 2 times"):
        Sampling(temperature=0.0, samples=2)


CHARACTERS = st.text("ab \n\u00e9\u6f22\U0001f600")


def decode(ids):
    return bytes(ids).decode(errors="replace")


def written(tokens, stops=()):
    """Follow one row token by token; return the pieces that are shown."""
    pieces: list[str] = []
    writing = Writing(decode, start=0, ends=[256], stops=stops, show=pieces.append)
    for count in range(1, len(tokens) + 1):
        if bool(writing(torch.tensor([tokens[:count]]), torch.empty(0))):
            break
    return pieces, writing


def test_incomplete_characters_are_held_back():
    assert written([*b"a\x80\xffb", 256, 256])[0] == ["a", "", "", "\ufffd\ufffdb", "", ""]


@given(CHARACTERS, st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3))
def test_stop_strings_and_partial_characters_are_not_shown(text, stops):
    ids = [*text.encode(), 256]
    shown, writing = written(ids, stops)
    wanted, _, ended = writing.result(0, ids)
    read = text[
        : min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    ]
    assert wanted == min((read.partition(stop)[0] for stop in stops), key=len, default=read)
    assert ended == ("stop string" if any(stop in text for stop in stops) else "end of text")
    assert wanted.startswith("".join(shown)) and not any(
        piece.endswith("\ufffd") for piece in shown
    )
    writing.finish(wanted)
    assert "".join(shown) == wanted
