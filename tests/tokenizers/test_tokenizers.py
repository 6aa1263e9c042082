import functools
import http.server
import json
import shlex
import threading
from pathlib import Path

import huggingface_hub
import pytest
import tiktoken
from data.text_samples import random_texts, tiny_bpe, word_file
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, described, open_tokenizer
from refocused.tokenizers.tokenizer_json import as_transformers

TEXT = "the cat's 3 hats\n\n  <|endoftext|> Hëllo 漢字 \ud83d".encode("utf-8", "replace").decode()

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"


def refused(choice: TokenizerChoice) -> str:
    with pytest.raises(ShardError) as caught:
        open_tokenizer(choice)
    return str(caught.value)


def test_bytes_are_utf_8():
    tokenizer = open_tokenizer(TokenizerChoice("bytes"))
    assert bytes(tokenizer.encode(TEXT)).decode() == TEXT
    assert (tokenizer.end_of_text_id, tokenizer.vocabulary) == (256, 257)


def test_byte_pairs_are_those_of_tiktokens_own_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = tiny_bpe(tmp_path)
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    theirs = tiktoken.Encoding(
        "theirs", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    ours = open_tokenizer(TokenizerChoice("gpt2", bpe_folder=folder))
    for text in (TEXT, *random_texts(20)):
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)
    assert ours.end_of_text_id == len(ranks)
    assert ours.vocabulary == len(ranks) + 1


def test_missing_byte_pair_files_are_named_with_their_download(tmp_path):
    assert "--bpe-folder" in refused(TokenizerChoice("gpt2"))
    folder = tmp_path / "two words"
    text, command, advice = refused(TokenizerChoice("gpt2", bpe_folder=folder)).splitlines()
    assert f"{folder} does not have them" in text
    hub = "https://huggingface.co/openai-community/gpt2/resolve/main"
    assert shlex.split(command) == [
        *("curl", "-L", "--create-dirs"),
        *("-o", str(folder / "vocab.bpe"), f"{hub}/merges.txt"),
        *("-o", str(folder / "encoder.json"), f"{hub}/vocab.json"),
    ]
    assert f"--bpe-folder '{folder}'" in advice


def test_a_file_neither_pads_nor_truncates_nor_adds_tokens(tmp_path):
    tokenizer = open_tokenizer(TokenizerChoice(str(word_file(tmp_path / "tokenizer.json"))))
    assert tokenizer.encode("the cat the").tolist() == [0, 1, 0]
    assert (tokenizer.end_of_text_id, tokenizer.vocabulary) == (3, 4)
    assert 3 not in tokenizer.encode("the <|endoftext|> cat")  # there it is text
    other = str(word_file(tmp_path / "other.json", ends="<stop>"))
    assert open_tokenizer(TokenizerChoice(other, end_of_text="<stop>")).end_of_text_id == 3


SPELT = ["E", "a E b", "xEy", "EE", " E", "E\nb \ue000 E"]


def saved(kind: str, file: Path) -> str:
    """Save a small tokenizer whose text would encode to its end-of-text token `E`."""
    letters = {letter: number for number, letter in enumerate("abxy E")}
    end = AddedToken("</s>", special=kind != "not special")
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel({"?": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "pieces":
        scores = [("?", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "abxy </s>E")]
        tokenizer = Tokenizer(models.Unigram(list(dict(scores).items()), unk_id=0))
    elif kind == "merges":
        parts = ["<", "/", "s", ">", "</", "s>", "</s>", "</s>a"]
        letters |= {part: len(letters) + number for number, part in enumerate(parts)}
        merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a")]
        tokenizer = Tokenizer(models.BPE(letters, merges))
    elif kind == "word pieces":
        pieces = {"?": 0, "</s>": 1, "a": 2, "b": 3, "##b": 4, "x": 5, "##a": 6, "##x": 7}
        tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "whole words":
        letters |= {part: len(letters) + number for number, part in enumerate("</s>")}
        letters["</s>"] = len(letters)
        tokenizer = Tokenizer(models.BPE(letters, [], ignore_merges=True))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer = Tokenizer(models.BPE({**letters, "<": 6, "/": 7, "s": 8, ">": 9}, []))
        if kind == "lower case":
            tokenizer.normalizer, end = normalizers.Lowercase(), AddedToken("</s>", normalized=True)
    tokenizer.add_special_tokens(["<pad>"])  # whose id must stay
    tokenizer.add_tokens([end]) if not end.special else tokenizer.add_special_tokens([end])
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(file))
    return str(file)


KINDS = ["not special", "words", "word pieces", "pieces", "merges", "whole words", "lower case"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_encodes_to_the_separator(tmp_path, kind):
    file = saved(kind, tmp_path / "tokenizer.json")
    library, tokenizer = Tokenizer.from_file(file), open_tokenizer(TokenizerChoice(file))
    library.encode_special_tokens = True
    texts = [text.replace("E", end) for text in SPELT for end in ("</s>", "</S>")]
    ids = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert any(tokenizer.end_of_text_id in one for one in ids)  # unless it is prevented
    for text in texts:
        assert tokenizer.end_of_text_id not in tokenizer.encode(text), text
    assert tokenizer.end_of_text_id == library.token_to_id("</s>")
    for text in ("ab xy", "a<more>b", "b a"):  # all other ids stay
        assert tokenizer.encode(text).tolist() == library.encode(text).ids
    assert tokenizer.vocabulary == library.get_vocab_size()


def test_a_special_end_of_text_is_preferred_to_a_tag_of_html(tmp_path):
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate("</seo>")}, []))
    tokenizer.add_tokens(["</s>"])
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(file := str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(TokenizerChoice(file)).end_of_text_id == tokenizer.token_to_id("<eos>")
    inner = as_transformers(Path(file).read_bytes(), end_of_text_id=None, max_length=9)
    assert inner.eos_token == "<eos>"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "tokenizer.json: several tokens may end a text (</s>, <eos>)"),
        ({CONFIG: {"eos_token": "<eos>"}, GENERATION: {"eos_token_id": 7}}, "<eos>"),
        ({CONFIG: {"eos_token": {"content": "</seo>", "lstrip": True}}}, "</seo>"),
        ({CONFIG: {"eos_token": None}, MAP: {"eos_token": {"content": "</s>"}}}, "</s>"),
        ({GENERATION: {"eos_token_id": 8}}, "</seo>"),
        ({CONFIG: {}, GENERATION: {"eos_token_id": [6]}}, "<eos>"),
        ({GENERATION: {"eos_token_id": [8, 6]}}, "several tokens may end a text (</seo>, <eos>)"),
        (
            {GENERATION: {"eos_token_id": -1}},
            "generation_config.json: the tokenizer has no token -1",
        ),
        ({CONFIG: {"eos_token": "<other>"}}, "config.json: the tokenizer has no token '<other>'"),
    ],
)
def test_the_named_end_of_text_is_taken_and_a_choice_is_asked_for(tmp_path, settings, expected):
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate("</seo>")}, []))
    tokenizer.add_special_tokens(["<eos>", "</s>", "</seo>"])  # two candidates, and another
    tokenizer.save(str(file := tmp_path / "tokenizer.json"))
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    choice = TokenizerChoice(str(file))
    loaded = functools.partial(
        as_transformers, file.read_bytes(), end_of_text_id=None, max_length=9, file=file
    )
    if tokenizer.token_to_id(expected) is None:
        assert expected in (said := refused(choice)) and "--end-of-text" in said
        with pytest.raises(ShardError, match=r"data\.document_id"):
            loaded()
    else:
        found, number = open_tokenizer(choice), tokenizer.token_to_id(expected)
        assert (found.end_of_text, found.end_of_text_id) == (expected, number)
        assert loaded().eos_token_id == number
    asked = open_tokenizer(TokenizerChoice(str(file), end_of_text="</s>"))
    assert asked.end_of_text_id == tokenizer.token_to_id("</s>")


def test_the_dropout_in_a_file_is_off(tmp_path):
    letters = {letter: n for n, letter in enumerate(("a", "b", "ab", "abab", "</s>"))}
    tokenizer = Tokenizer(models.BPE(letters, [("a", "b"), ("ab", "ab")], dropout=0.5))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(file := tmp_path / "tokenizer.json"))
    found = open_tokenizer(TokenizerChoice(str(file)))
    assert found.encode("abab" * 40).tolist() == [3] * 40
    theirs = as_transformers(file.read_bytes(), end_of_text_id=None, max_length=99)
    assert theirs("abab" * 40)["input_ids"] == [3] * 40
    theirs.save_pretrained(tmp_path / "export")
    saved = json.loads((tmp_path / "export" / "tokenizer.json").read_text())
    assert saved["model"]["dropout"] is None


def test_a_separator_that_unknown_characters_become_is_refused(tmp_path):
    unknown = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    unknown.save(file := str(tmp_path / "tokenizer.json"))
    content = json.loads(unknown.to_str())
    content["model"] |= {"vocab": {"</s>": 0, "a": 0, "?": 1}, "unk_token": "?"}
    (other := tmp_path / "other.json").write_text(json.dumps(content))
    assert "would end documents" in refused(TokenizerChoice(str(other)))  # `a` would
    said = "characters that it does not know become its end-of-text token '</s>'"
    assert said in refused(TokenizerChoice(file))


@pytest.mark.parametrize(
    ("file", "content", "choice", "said"),
    [
        ("encoder.json", "{", {"name": "gpt2"}, "not those of a GPT-2 encoding"),
        # Changed files are seen though their path is the same.
        ("vocab.bpe", "#version: 0.2\nt h\n", {"name": "gpt2"}, "vocab.bpe yields"),
        ("words.json", None, {"name": "words.json"}, "--end-of-text"),
        (
            "words.json",
            None,
            {"name": "words.json", "end_of_text": "<e>"},
            "no end-of-text token (<e>)",
        ),
        ("x.json", '{"model": 1}', {"name": "x.json"}, "the tokenizers library cannot use this"),
        ("x.json", None, {"name": "gpt3"}, "neither gpt2 nor bytes"),
    ],
)
def test_invalid_tokenizers_are_refused(tmp_path, monkeypatch, file, content, choice, said):
    monkeypatch.chdir(tmp_path)
    open_tokenizer(TokenizerChoice("gpt2", bpe_folder=tiny_bpe(tmp_path)))
    word_file(tmp_path / "words.json", ends="<stop>")
    if content is not None:
        (tmp_path / file).write_text(content)
    assert said in refused(TokenizerChoice(**choice, bpe_folder=tmp_path))


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has `someone/model` alone."""

    content = b""
    fetched = 0

    def do_HEAD(self) -> None:
        found = self.path == "/someone/model/resolve/main/tokenizer.json"
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "c" * 40)
        if not found:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(self.content) if found else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        Hub.fetched += 1
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_tokenizer_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    Hub.content, Hub.fetched = word_file(tmp_path / "words.json").read_bytes(), 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        download = functools.partial(
            huggingface_hub.hf_hub_download,
            endpoint=f"http://127.0.0.1:{server.server_port}",
            cache_dir=tmp_path / "cache",
        )
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        choice = TokenizerChoice("hub:someone/model")
        for _ in range(2):
            tokenizer = open_tokenizer(choice)
        missing = refused(TokenizerChoice("hub:someone/other"))
        server.shutdown()
        thread.join()
    assert open_tokenizer(choice).encode("cat the").tolist() == [1, 0]  # the hub is away
    assert Hub.fetched == 1
    assert tokenizer.name == described(TokenizerChoice(str(tmp_path / "words.json")))[0]
    assert (
        "tokenizer.json cannot be downloaded from the hub" in missing and "use its path" in missing
    )
    assert "cannot be downloaded from the hub" in refused(TokenizerChoice("hub:no such name"))


def test_a_file_is_known_by_its_content(tmp_path):
    one, other = word_file(tmp_path / "a.json"), word_file(tmp_path / "b.json")
    different = word_file(tmp_path / "c.json", ends="</s>")
    names = [described(TokenizerChoice(str(file)))[0] for file in (one, other, different)]
    assert names[0] == names[1] != names[2]
    assert described(TokenizerChoice("gpt2"))[0] == "gpt2"
    folder = tiny_bpe(tmp_path)
    made = TokenizerChoice("gpt2", bpe_folder=folder)
    assert described(made)[0] == open_tokenizer(made).name != "gpt2"


def test_a_long_run_takes_no_quadratic_time(tmp_path):
    """Under `--lowest`, too: tiktoken 0.12 would need hours, which the limit of a test ends."""
    choice = TokenizerChoice("gpt2", bpe_folder=tiny_bpe(tmp_path))
    ids = open_tokenizer(choice).encode("at" * 500_000)
    assert len(ids) == 500_000 and len(set(ids.tolist())) == 1
