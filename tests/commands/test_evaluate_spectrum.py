from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from refocused.commands.main import run_command
from refocused.models.families import register_families
from refocused.models.ten.ten import TenConfig, TenForCausalLM

main = functools.partial(run_command, "evaluate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    register_families()
    shape = {"vocab_size": 64, "hidden_size": 16, "num_eigenstates": 4}
    config = TenConfig(num_hidden_layers=2, max_position_embeddings=100, **shape)
    TenForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_table_and_a_picture_tell_the_horizons(folder: Path, capsys: Any) -> None:
    out = folder / "spectrum.png"
    assert main(["spectrum", str(folder), "--picture", str(out)]) == 0
    told = capsys.readouterr().out
    heading, first, *_, last = told.splitlines()
    assert heading.split() == ["PART", "MODES", "HORIZON", "IN", "TOKENS", "RADIANS", "A", "TOKEN"]
    assert first.split()[:2] == ["model.layers.0.mixer.cells.0", "8"]
    assert len(first.split()) == 8
    assert last == f"{out}: drawn"
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert main(["spectrum", str(folder), "--picture", str(out), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["part"] for part in parts] == [f"model.layers.{i}.mixer.cells.0" for i in (0, 1)]
    assert 50 < parts[0]["longest_tokens"] < 100


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{model}", "--picture", "spectrum.jpg"], 2, "give it a name that ends in .png"),
        (["{model}", "--picture", "/nowhere/spectrum.png"], 1, "cannot be written"),
        (["gpt2_tiny", "--picture", "spectrum.png"], 2, "positions meet by attention"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    folder: Path, capsys: Any, arguments: list[str], code: int, said: str
) -> None:
    assert main(["spectrum", *(text.format(model=folder) for text in arguments)]) == code
    assert said in capsys.readouterr().err
