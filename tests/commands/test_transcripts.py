"""What every verb prints, compared with `transcripts/*.txt`, and what it says to each mistake.

A file is run from its top in the folder of its scene (`scenes.py`). `$ COMMAND` is a command of
refocused, or else of the shell; `>>> STATEMENT` changes the scene. Below a command stand its whole
standard output, `! ` and each line of standard error, and `[N]` for an exit code other than 0.
Times, rates, free space and folders differ between machines and are replaced. Write the files anew,
and review the difference:

    REFOCUSED_TRANSCRIPTS=write .venv/bin/python -m pytest tests/commands/test_transcripts.py
"""

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands.scenes import SCENES
from monitor.watched_run import NOW
from ranks import ROOT

from refocused import __version__
from refocused.commands.main import main

TRANSCRIPTS = Path(__file__).with_name("transcripts")
REPLACED = {
    re.escape(sys.executable): "python",
    rf"({re.escape(str(ROOT))}|\.)/launch/(\w+)\.(py|sh)": r"refocused \2",
    rf"\b{re.escape(__version__)}\b": "VERSION",
    r"doctor-[0-9a-f]{16}": "doctor-CANARY",
    r"\b(docstrings|tokenizer-\d+|tokens-\d+|d\d+)-[0-9a-f]{6}\b": r"\1-DIGEST",
    r"\b[\d.]+ .B free for": "N GB free for",
    r"\b[\d.]+ .B free$": "N GB free",
    r'"free": \d+': '"free": N',
}
TIMES = {
    r"\b(in|after|over|checks,) [\d.]+ (s|min)\b": r"\1 N \2",
    r"\b[\d,.]+ (tokens|items|.?B)/s": r"N \1/s",
    r"[\d.]+ s \([\d,.]+/s\)": "N s (N/s)",
    r"\([\d.]+ s\)": "(N s)",
    r'("(?:\w+_)?seconds"|"\w+_per_second"): [\d.e+-]+': r"\1: N",
}
COMPUTED = ("estimate_cost", "init", "monitor")  # what they print was measured by no clock


def normalized(text, folder, verb):
    """Replace what depends on the time, the folder and the machine."""
    text = text.replace(str(folder), "/scene")
    for pattern, replacement in (REPLACED if verb in COMPUTED else REPLACED | TIMES).items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")


def run(command, scene, capsys):
    """Run a command as its process would; return what it prints and its exit code, if not 0."""
    words = shlex.split(command)
    with pytest.MonkeyPatch.context() as patch:
        while re.fullmatch(r"[A-Z]+=\w+", words[0]):
            patch.setenv(*words.pop(0).split("="))
        if words[0] != "refocused":
            return subprocess.run(
                command, shell=True, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        patch.setattr(sys, "argv", words)
        patch.setattr(logging.root, "handlers", [])
        if scene.stdin is not None:
            patch.setattr(sys, "stdin", scene.stdin)
            scene.stdin = None
        try:
            code = main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    out, err = capsys.readouterr()
    lines = [*out.splitlines(), *(f"! {line}" for line in err.splitlines())]
    return "".join(f"{line}\n" for line in [*lines, *[f"[{int(code)}]"] * bool(code)])


@pytest.mark.parametrize("file", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_a_verb_prints_what_its_transcript_shows(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("time.time", lambda: NOW)
    scene = SCENES[file.stem](monkeypatch)
    capsys.readouterr()
    begin, *parts = re.split(r"(?m)^((?:#: .*\n)*(?:\$|>>>) .*\n)", file.read_text())
    written = [begin]
    for head in parts[::2]:
        command = head.splitlines()[-1]
        if command.startswith(">>> "):
            exec(command.removeprefix(">>> "), {"scene": scene, **scene.names})
            written.append(head)
        else:
            printed = normalized(
                run(command.removeprefix("$ "), scene, capsys), tmp_path, file.stem
            )
            written.append(f"{head}{printed}\n\n" if printed else f"{head}\n")
    if os.environ.get("REFOCUSED_TRANSCRIPTS") == "write":
        file.write_text("".join(written))
    assert "".join(written) == file.read_text()


def test_every_scene_has_a_transcript():
    assert {file.stem for file in TRANSCRIPTS.iterdir()} == set(SCENES)
