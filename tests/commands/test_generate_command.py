"""`launch/generate.py`: prompts in, texts and their pace out, one message for what cannot be."""

import functools
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from evaluate.small_models import small_model
from ranks import ROOT

from refocused.commands.main import run_command

main = functools.partial(run_command, "generate")


class Typed(io.TextIOWrapper):
    """Lines that a person types, or that come through a pipe."""

    def __init__(self, text, *, at_terminal):
        super().__init__(io.BytesIO(text))
        self._at_terminal = at_terminal

    def isatty(self):
        return self._at_terminal


def give(monkeypatch, text, *, at_terminal):
    monkeypatch.setattr(sys, "stdin", Typed(text, at_terminal=at_terminal))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_terminal)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A transformers folder."""
    return saved_model("gpt2", tmp_path_factory.mktemp("model"))


def saved_model(family, folder):
    model = small_model(family)
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def generated(capture, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capture.readouterr().out)


def test_prompts_come_from_anywhere_and_are_written_together(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "whole.txt").write_text("two\nlines\n")
    (tmp_path / "lines.txt").write_text("one\n\nanother \u6f22\n")
    files = ("--file", tmp_path / "whole.txt", "--lines", tmp_path / "lines.txt")
    told = generated(capsys, folder, "a", "b", *files, "--n=2", "--tokens", "3")
    prompts = [answer["prompt"] for answer in told["answers"]]
    assert prompts[::2] == prompts[1::2] == ["a", "b", "two\nlines", "one", "another \u6f22"]
    assert main([str(folder), "a", "b", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("--- 1 (tokens, 3 tokens)\na")
    give(monkeypatch, b"through a\npipe\n", at_terminal=False)
    assert main([str(folder), "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("through a\npipe")


def test_lines_that_are_typed_are_continued_one_by_one(folder, monkeypatch, capsys):
    give(monkeypatch, b"", at_terminal=True)
    typed = Mock(side_effect=["first", "", "x" * 64, "second", EOFError])
    monkeypatch.setattr("builtins.input", typed)
    assert main([str(folder), "--tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2
    assert err.count("[4 tokens in ") == 2
    assert "error: The prompt has 64 tokens" in err


def test_each_turn_of_a_conversation_has_a_seed_of_its_own(folder, monkeypatch, capsys):
    given = [str(folder), "--tokens", "20", "--temperature", "1", "--top-k", "0", "--seed"]
    alone = []
    for seed in ("5", "6"):
        assert main([*given, seed, "def f"]) == 0
        alone.append(capsys.readouterr().out.strip().removeprefix("def f"))
    give(monkeypatch, b"", at_terminal=True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=["def f", "def f", EOFError]))
    assert main([*given, "5"]) == 0
    assert alone[0] != alone[1]
    assert capsys.readouterr().out.strip() == "\n".join(alone).strip()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ("{} x --device gpu", "--device gpu: ", 2),
        ("foreign x", "foreign cannot be loaded by transformers: ", 1),
    ],
)
def test_what_a_library_refuses_is_one_message(
    folder, tmp_path, monkeypatch, capsys, arguments, message, code
):
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    Path("foreign/config.json").write_text('{"model_type": "none_such"}')
    assert main(arguments.format(folder).split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


SPY = """
import os, pathlib
pathlib.Path(os.environ["SENTINEL"]).touch()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class Config(GPT2Config):
    model_type = "spy"
class Model(GPT2LMHeadModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder, copy, *, in_file):
    """Copy a model whose config or tokenizer needs Python code that lies in the folder."""
    shutil.copytree(folder, copy)
    (copy / "spy.py").write_text(SPY)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {
            "model_type": "spy",
            "auto_map": {"AutoConfig": "spy.Config", "AutoModelForCausalLM": "spy.Model"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Tokenizer",
            "auto_map": {"AutoTokenizer": [None, "spy.Tokenizer"]},
        },
    }
    file = copy / in_file
    file.write_text(json.dumps(json.loads(file.read_text()) | changes[in_file]))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "in_file"),
    [
        (["generate", "{}", "some text", "--tokens", "2"], "config.json"),
        (["generate", "gs", "some text", "--tokens", "2"], "config.json"),
        (["generate", "{}", "some text", "--tokens", "2"], "tokenizer_config.json"),
        (["evaluate", "{}", "--tasks", "text.txt", "--device", "cpu"], "config.json"),
    ],
)
def test_code_in_a_model_folder_is_never_run(folder, tmp_path, emulator, command, in_file):
    if in_file == "tokenizer_config.json":  # transformers have a tokenizer of their own for GPT-2
        folder = saved_model("ten", tmp_path / "ten")
    source = with_code(folder, tmp_path / "spy", in_file=in_file)
    named, model = str(source), str(source)
    if command[1] == "gs":
        named = f"{emulator.url}/models/spy"
        model = f"data/models/{named.partition('://')[2]}"
        for path in source.iterdir():
            emulator.put(f"models/spy/{path.name}", path.read_bytes())
    (tmp_path / "text.txt").write_text("some text to score")
    done = subprocess.run(
        [sys.executable, str(ROOT / f"launch/{command[0]}.py"), named, *command[2:]],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"SENTINEL": str(tmp_path / "sentinel")},
        check=False,
    )
    assert not (tmp_path / "sentinel").exists(), done.stdout + done.stderr
    assert done.returncode == 1, done.stderr
    assert f"{model}/{in_file} needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("family", ["resonance", "ten"])
def test_our_own_families_load_without_the_code_beside_them(family, tmp_path, monkeypatch, capsys):
    saved = saved_model(family, tmp_path / family)
    own = with_code(saved, tmp_path / "copy", in_file="config.json")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"model_type": family}))
    monkeypatch.setenv("SENTINEL", str(tmp_path / "sentinel"))
    assert main([str(own), "def f", "--tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("def f")
    assert not (tmp_path / "sentinel").exists()


def test_a_step_is_picked_from_the_list(sample_run, monkeypatch, capsys):
    from refocused.commands import generate

    sample_run.save_readable(10)
    sample_run.mirror(sample_run.save_readable(20), keep=False)
    monkeypatch.setenv("TERM", "dumb")  # without bold headings
    asked: list[str] = []

    def note(request, arguments):
        asked.append(f"{arguments.run} {request}")
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "model_source", note)
    for typed in (b"\n", b"7\n10\n"):
        give(monkeypatch, typed, at_terminal=True)
        assert main([]) == 130
    assert asked == ["runs/one latest", "runs/one 10"]
    err = capsys.readouterr().err
    assert "STEP   SAVED" in err and "Which checkpoint? [latest]" in err
    assert "no checkpoint '7'" in err
