from __future__ import annotations

import functools
import http.server
import json
import shlex
import threading
from pathlib import Path

import pytest
from data.text_samples import random_texts, tiny_bpe, word_file

from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, identity_of, open_tokenizer

TEXT = "the cat's 3 hats\n\n  <|endoftext|> Hëllo 漢字 \ud83d".encode("utf-8", "replace").decode()


def refused(choice: TokenizerChoice) -> str:
    with pytest.raises(ShardError) as caught:
        open_tokenizer(choice)
    return str(caught.value)


def test_bytes_are_utf_8() -> None:
    tokenizer = open_tokenizer(TokenizerChoice("bytes"))
    assert bytes(tokenizer.encode(TEXT)).decode() == TEXT
    assert (tokenizer.end_of_text_id, tokenizer.vocabulary) == (256, 257)


def test_byte_pairs_are_those_of_tiktokens_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

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


def test_another_encoding_is_never_called_gpt2(tmp_path: Path) -> None:
    name = open_tokenizer(TokenizerChoice("gpt2", bpe_folder=tiny_bpe(tmp_path))).name
    assert name.startswith("bpe-")


def test_changed_files_are_seen_though_their_path_is_the_same(tmp_path: Path) -> None:
    folder = tiny_bpe(tmp_path)
    open_tokenizer(TokenizerChoice("gpt2", bpe_folder=folder))
    lines = (folder / "vocab.bpe").read_text().splitlines()
    (folder / "vocab.bpe").write_text("\n".join(lines[:-1]))
    assert "not of one encoding" in refused(TokenizerChoice("gpt2", bpe_folder=folder))


def test_missing_byte_pair_files_are_asked_for(tmp_path: Path) -> None:
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


def test_damaged_byte_pair_files_are_refused(tmp_path: Path) -> None:
    folder = tiny_bpe(tmp_path)
    (folder / "encoder.json").write_text("{")
    assert "not those of a GPT-2 encoding" in refused(TokenizerChoice("gpt2", bpe_folder=folder))


def test_a_file_neither_pads_nor_cuts_nor_adds(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(TokenizerChoice(str(word_file(tmp_path / "tokenizer.json"))))
    assert tokenizer.encode("the cat the").tolist() == [0, 1, 0]
    assert tokenizer.end_of_text_id == 3
    assert tokenizer.vocabulary == 4


def test_the_end_of_text_in_a_text_is_text(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(TokenizerChoice(str(word_file(tmp_path / "tokenizer.json"))))
    assert tokenizer.end_of_text_id not in tokenizer.encode("the <|endoftext|> cat")


def test_the_end_of_text_of_a_file_can_be_named(tmp_path: Path) -> None:
    file = str(word_file(tmp_path / "tokenizer.json", ends="<stop>"))
    assert "--end-of-text" in refused(TokenizerChoice(file))
    assert open_tokenizer(TokenizerChoice(file, end_of_text="<stop>")).end_of_text_id == 3
    assert "no token '<end>'" in refused(TokenizerChoice(file, end_of_text="<end>"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model": 1}))
    assert "no file of the tokenizers library" in refused(TokenizerChoice(str(other)))
    assert "neither gpt2 nor bytes" in refused(TokenizerChoice("gpt3"))


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has `someone/model` alone."""

    content = b""
    fetched = 0

    def do_HEAD(self) -> None:
        found = self.path == "/someone/model/resolve/main/tokenizer.json"
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(self.content) if found else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        Hub.fetched += 1
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_tokenizer_of_the_hub_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

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
    assert tokenizer.name == identity_of(TokenizerChoice(str(tmp_path / "words.json")))
    assert "the hub gave no tokenizer.json" in missing and "name its path" in missing
    assert "the hub gave no" in refused(TokenizerChoice("hub:no such name"))


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    one, other = word_file(tmp_path / "a.json"), word_file(tmp_path / "b.json")
    different = word_file(tmp_path / "c.json", ends="</s>")
    names = [identity_of(TokenizerChoice(str(file))) for file in (one, other, different)]
    assert names[0] == names[1] != names[2]
    assert identity_of(TokenizerChoice("gpt2")) == "gpt2"
    folder = tiny_bpe(tmp_path)
    made = TokenizerChoice("gpt2", bpe_folder=folder)
    assert identity_of(made) == open_tokenizer(made).name != "gpt2"
