"""How commands read numbers and print quantities, tables and progress; how they end."""

import argparse
import importlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands.run_samples import Terminal
from ranks import ROOT

from refocused.commands import train
from refocused.commands.arguments import Parser
from refocused.commands.main import COMMANDS, VERBS, run_command
from refocused.commands.output import count, positive, progress_line, ratio, table
from refocused.system.number_text import age, count_text, size_text


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("checkpoints plot --run .", "--out"),
        ("evaluate compare none --tasks none --picture a.png", "--picture"),
        ("prepare_data inspect none --picture a.png", "--picture"),
    ],
)
def test_a_picture_that_nothing_can_draw_is_refused_before_the_work(
    command, option, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    name, *given = command.split()
    assert run_command(name, given) == 2
    install = f"{sys.executable} -m pip install matplotlib"
    assert capsys.readouterr().err == f"error: {option} needs matplotlib. Install it: {install}\n"


@pytest.mark.parametrize(
    ("spell", "texts"),
    [
        (size_text, {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2.5e9: "2.5 GB", 3e12: "3.0 TB"}),
        (count_text, {12_345: "12,345", 3.4e6: "3.40 M", 51.6e9: "51.60 B"}),
        (age, {-5: "just now", 59: "just now", 125: "2 min ago", 11_400: "3 h ago"}),
        (age, {3 * 86400 + 7200: "3 d ago"}),
    ],
)
def test_quantities_are_spelt_for_people(spell, texts):
    assert {number: spell(number) for number in texts} == texts


def test_what_follows_two_dashes_is_no_option():
    parser = Parser("x")
    parser.add_argument("texts", nargs="*")
    parser.group("options")("--max-steps N", "a number")
    read = parser.read(["--max_steps", "3", "--", "--a_text_b", "c_d"])
    assert (read.max_steps, read.texts) == ("3", ["--a_text_b", "c_d"])


def test_the_home_folder_is_meant_by_a_tilde_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = Parser("x")
    parser.add_argument("folder", type=Path)
    parser.group("output")("--out FILE", "a file", type=Path)
    read = parser.read(["--out=~/a.png", "~/b"])
    assert (read.out, read.folder) == (Path("/home/me/a.png"), Path("/home/me/b"))


@pytest.mark.parametrize(
    ("read", "numbers", "wrong"),
    [
        (count, {"1": 1, "1e8": 10**8, "100_000": 10**5, "1.5M": 1_500_000}, "0 -1 1.5 x 1e nan"),
        (count, {"9007199254740993": 9007199254740993}, "1e400 1e9999999 9223372036854775808"),
        (ratio, {"0": 0.0, "0.5": 0.5}, "-0.1 1.1 x nan"),
        (positive, {"7.92": 7.92}, "0 inf nan x"),
    ],
)
def test_numbers_are_read_in_every_usual_form(read, numbers, wrong):
    assert {text: read(text) for text in numbers} == numbers
    for text in wrong.split():
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_table_is_plain_off_a_terminal_and_fits_one(monkeypatch, stream):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "25")
    note = "a note [of] several :words: that needs some room"
    lines = table([("10", note), ("1,000", "")], "STEP", "NOTE", file=stream)
    heading, first, *others = lines
    assert heading == "STEP    NOTE"
    if stream.isatty():
        assert len(others) == 2 and max(map(len, (first, *others))) <= 40
    else:
        assert (first, others) == (f"10      {note}", ["1,000"])


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_moves_on_a_terminal_and_is_a_line_now_and_then_elsewhere(monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    now = 100.0
    with progress_line("sync", stream=stream):
        pass
    assert stream.getvalue() == ""  # nothing was shown
    with progress_line("sync", stream=stream, clock=lambda: now) as show:
        show(40_000_000, 100_000_000)
        for _ in range(20):
            now += 1
            show(40_000_000 + 1_000_000 * int(now - 100), 100_000_000, "3 of 5 objects")
    printed = stream.getvalue()
    # What was done by the first call does not count for the rate.
    assert "sync  60.0 % 60.0/100.0 MB 1.0 MB/s left 0:00:40 3 of 5 objects" in printed
    moves, lines = printed.count("\r"), printed.count("\n")
    assert (moves >= 20, lines) == ((True, 1) if stream.isatty() else (False, 2))


@pytest.mark.parametrize("command", VERBS)
def test_help_shows_every_verb_and_imports_nothing_slow(command):
    slow = "torch numpy matplotlib google ruamel pydantic rich pyarrow tiktoken"
    code = (
        "import sys; from refocused.commands.main import VERBS, run_command\n"
        "for verb in ('', *VERBS[sys.argv[1]]):\n"
        "    try: run_command(sys.argv[1], [*verb.split(), '--help'])\n"
        "    except SystemExit as ended: assert not ended.code\n"
        f"print({{*'{slow}'.split()}} & set(sys.modules))"
    )
    options = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", code, command], **options)
    assert done.stdout.endswith("\nset()\n")
    assert all(
        f"usage: refocused {command} {verb}".rstrip() in done.stdout for verb in VERBS[command]
    )


EMPTY = (None, False, [], argparse.SUPPRESS)  # defaults that are not shown
ALL = [(name, verb) for name in COMMANDS for verb in VERBS.get(name, {"": ()})]


def parser_of(command, verb, monkeypatch):
    """Return the parser of a command with all options, without running the command."""
    module = VERBS.get(command, {}).get(verb, (command,))[0]
    functions = importlib.import_module(f"refocused.commands.{module}")
    if command not in VERBS:
        return functions.build_parser()
    parser = Parser(f"refocused {command} {verb}".rstrip())
    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(Parser, "read", Mock(side_effect=InterruptedError))
        getattr(functions, f"run_{verb or command}".replace("-", "_"))(parser)
    return parser


@pytest.mark.parametrize(("command", "verb"), [*ALL, ("launch", "")])
def test_help_shows_defaults_in_one_style_and_examples_that_parse(command, verb, monkeypatch):
    parser = parser_of(command, verb, monkeypatch)
    said = parser.format_help()
    assert parser.examples and argparse.SUPPRESS not in said
    for example in parser.examples:
        assert f"\nExample: {parser.prog} {example}".rstrip() + "\n" in said
        words = shlex.split(example)
        if command == "launch":  # which passes on what it does not know
            train.read_arguments(parser.parse_known_args(words)[1])
        else:
            parser.read(words)
    entries = [entry.split("\n\n")[0] for entry in re.split(r"\n  (?=-)", said)[1:]]
    for entry in entries:
        option = re.search(r"--([\w-]+)", entry)
        assert option is not None
        has_default = parser.get_default(option[1].replace("-", "_")) not in EMPTY
        assert not has_default or "(default: " in " ".join(entry.split()), entry
        assert not re.search(r" \([\d.e,]+\)$", entry), entry


@pytest.mark.parametrize("command", ["prepare_data.py --help", "checkpoints.py list"])
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(tmp_path, command):
    (tmp_path / "runs" / "one" / "checkpoints").mkdir(parents=True)
    script, argument = command.split()
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / script, argument],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_broken_connections_stay_errors_and_do_not_end_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_command("prepare_data", ["--help"])
    run_command("checkpoints", ["list"])
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
