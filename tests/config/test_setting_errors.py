"""Mistakes in run files and overrides: each is reported with its place and a remedy.

`setting_errors.txt` has cases with all that is printed of them. A case begins with `> run` or
`> mixture`, the file of `run_texts.py`, then edits of it (`file`: the whole) and settings of the
command line.
`.venv/bin/python tests/config/test_setting_errors.py` writes the file anew: read what has changed.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from run_texts import MIXTURE, SMALL_RUN, problems, written

GOLDEN = Path(__file__).with_name("setting_errors.txt")
ODD = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 100, "n_inner": 200, "n_layer": 1}
ODD |= {"n_head": 1, "n_positions": 64}


def answered(case: str, folder: Path) -> str:
    """Return a case with its problems, a line each, without the folder of the files."""
    name, *parts = case.removeprefix("> ").split(" | ")
    text, overrides = {"run": SMALL_RUN, "mixture": MIXTURE}[name], list[str]()
    for part in parts:
        before, arrow, after = part.partition(" => ")
        if before == "file":
            text = json.loads(after)
        elif arrow:
            assert json.loads(before) in text
            text = text.replace(json.loads(before), json.loads(after), 1)
        else:
            overrides.append(part)
    lines = problems(written(folder, text), *overrides)
    return "\n".join([case, *(line.replace(f"{folder}/", "") for line in lines)])


def cases_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("> ")]


def transcript(folder: Path) -> str:
    for name, content in (("odd", ODD), ("own", {"zero_optimization": {"stage": 2}})):
        kind = folder / {"odd": "models", "own": "deepspeed"}[name]
        kind.mkdir()
        (kind / f"{name}.json").write_text(json.dumps(content))
    (folder / "runs").mkdir()
    found = [answered(case, folder / "runs") for case in cases_of(GOLDEN.read_text())]
    text = "\n\n".join(found).replace(f"{folder}/", "")
    return re.sub(r"There are (\w+, )+", "There are ..., ", text) + "\n"


def test_each_mistake_is_reported_as_agreed(tmp_path: Path) -> None:
    assert transcript(tmp_path) == GOLDEN.read_text()


def test_a_file_that_is_not_text_and_a_name_that_is_not_allowed_are_reported(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, name="no name.yaml")
    assert problems(file)[0].startswith(f"{file}: run.name = 'no name' (from the file's name): a ")
    file.write_bytes(b"run: \xff\xfe")
    assert problems(file) == [f"{file}: not UTF-8 text (byte 5). Is it a run file?"]


@pytest.mark.slow
def test_what_an_error_quotes_has_a_bounded_length(tmp_path: Path) -> None:
    file = written(tmp_path)
    [problem] = problems(file, f"optimizer.lr={'x' * 100_000}")
    assert len(problem) < 2100
    assert problem.startswith("command line: optimizer.lr = 'xxx")
    assert problem.endswith("xxx': expected a number such as 1000 or 2.5e-4, without quotes")
    lines = problems(file, *(f"optimizer.key_{number}=1" for number in range(5000)))
    assert len(lines) == 201
    assert lines[-1] == "... and 4,800 more lines"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(transcript(Path(place)))
    sys.exit()
