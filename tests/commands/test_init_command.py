"""`init`: run files by questions on a terminal, by options, and as copies of shipped ones."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refocused.commands.main import run_command
from refocused.config import shipped_files
from refocused.config.load_run import load_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    np.save("tokens/web.npy", np.arange(200_000, dtype=np.uint16) % 251)


def init(*words: str) -> int:
    return run_command("init", words)


def test_questions_are_asked_on_a_terminal_until_the_answers_fit() -> None:
    Path("web").mkdir()
    Path("web/a.txt").write_text("text")
    answers = ["texts", "web", "tokens", "none", "2", "A9", "A100 80GB", "3", "40", "mine.yaml"]
    main, terminal = pty.openpty()
    os.write(main, "".join(f"{answer}\n" for answer in answers).encode())
    code = "from refocused.commands.main import run_command; run_command('init', [])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(main)
    os.close(terminal)
    asked = done.stderr.splitlines()
    assert asked[0].startswith("Token files (folder or gs:// address): There is no folder 'texts'")
    assert asked[1].startswith("Token files (folder or gs:// address): web: no token files; it ")
    assert asked[2].startswith("Token files (folder or gs:// address): Number of GPUs [8]: 'none'")
    assert asked[2].endswith("expected a whole number of at least 1, such as 8 or 1e8")
    assert asked[3].startswith(
        "Number of GPUs [8]: Kind of GPU [H100 SXM]: --gpu 'A9' is not a known"
    )
    loaded = load_run("mine.yaml")
    assert (loaded.config.cost.per_hour_usd, loaded.config.cost.budget_usd) == (3, 40)
    assert "for 2 x A100 80GB" in Path("mine.yaml").read_text()
    assert "estimate_cost.py --config mine.yaml --gpus 2 --gpu 'A100 80GB" in done.stdout


def test_options_answer_every_question(capsys: Capture) -> None:
    options = "one.yaml --data tokens --gpus 1 --gpu L4 --per-hour 1 --budget 0.001 --yes"
    assert init(*options.split()) == 0
    said = capsys.readouterr().out
    assert said.startswith("Wrote one.yaml.\ndata     189,440 tokens; ")
    assert "note: the budget of $0.00 ends the run before its last step." in said
    assert load_run("one.yaml").config.data.source == "tokens"
    assert run_command("train", ["--config", "one.yaml", "--print-config"]) == 0


def test_a_folder_of_text_leads_to_tokenize_with_the_tokenizer_that_was_given(
    capsys: Capture,
) -> None:
    Path("web").mkdir()
    Path("web/a.txt").write_text("text")
    assert init("--data", "web", "--tokenizer", "gpt2", "--bpe-folder", "my bpe") == 1
    error = capsys.readouterr().err
    assert "web: no token files; it holds 1 .txt file. Tokenize them: " in error
    assert "tokenize web --out data/tokens --tokenizer gpt2 --bpe-folder 'my bpe'; " in error
    assert not Path("run.yaml").exists()


def test_the_folder_of_the_tokenizer_s_files_stays(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "two.yaml --data tokens --tokenizer gpt2 --bpe-folder bpe --gpus 1 --gpu L4 --yes"
    assert init(*options.split()) == 1
    assert "bpe does not have them. Download the two files" in capsys.readouterr().err
    vocabulary = "refocused.data.manifest.vocabulary."
    monkeypatch.setattr(f"{vocabulary}tokenizer_vocabulary", lambda data: 50_257)
    monkeypatch.setattr(f"{vocabulary}decide_vocabulary", lambda loaded: loaded)
    assert init(*options.split()) == 0
    data = load_run("two.yaml").config.data
    assert (data.tokenizer, data.bpe_folder) == ("gpt2", "bpe")
    assert init("three.yaml", "--data", "tokens", "--bpe-folder", "bpe", "--yes") == 2
    assert "bpe_folder holds gpt2's files, and tokenizer is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", [file.stem for file in (shipped_files() / "runs").iterdir()])
def test_a_copy_of_a_shipped_run_file_is_the_same_run_under_its_own_name(
    name: str, capsys: Capture
) -> None:
    assert init("--from", name, "mine.yaml") == 0
    text = Path("mine.yaml").read_text()
    assert text == (shipped_files() / "runs" / f"{name}.yaml").read_text()
    copy, shipped = load_run("mine.yaml"), load_run(name)
    named = shipped.config.run.model_copy(update={"name": "mine"})
    assert copy.config == shipped.config.model_copy(update={"run": named})
    assert (copy.shape, copy.fragment) == (shipped.shape, shipped.fragment)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "YOUR-BUCKET" in line]
    said = capsys.readouterr().out
    assert ("Set your bucket" in said) == bool(lines) and all(str(one) in said for one in lines)


def test_one_name_of_the_new_file_is_enough(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        init("a.yaml", "--out", "b.yaml", "--from", "demo")
    assert "unrecognized arguments: --out b.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mine.yaml", "Name the token files with --data DIR_OR_URL, or a run file with --from."),
        ("--from demos mine.yaml", "no file demos.yaml. Did you mean demo?"),
        (
            "--from demo old.yaml",
            "old.yaml exists. Name another file, or overwrite it with --force",
        ),
        ("--from demo no/x.yaml", "no/x.yaml: there is no folder no. Make it first."),
        ("--from demo .x.yaml", "run.name = '.x' (from the file's name): a run's name is letters"),
        ("--data tokens --budget 5", "--budget needs --per-hour USD, the price of the machine."),
        ("--from demo --data tokens", "--data has no effect with --from, which copies a run file"),
        ("--from demo --gpus 2 x.yaml", "--gpus has no effect with --from"),
        ("--from demo --pad-id 0 x.yaml", "--pad-id has no effect with --from"),
        ("--data none", "There is no folder 'none'. To make token files of texts: "),
    ],
)
def test_what_cannot_be_written_is_refused_and_changes_nothing(
    words: str, said: str, capsys: Capture
) -> None:
    Path("old.yaml").write_text("mine: true\n")
    assert init(*words.split()) == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"tokens", "old.yaml"}
    assert Path("old.yaml").read_text() == "mine: true\n"
