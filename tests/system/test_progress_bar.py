"""The progress bar: a terminal alone has one, and log lines take its place."""

import io
import logging
import re
import sys

import pytest

from refocused.system.logs import PAUSE_SECONDS, ProgressBar, erasure, start_screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(terminal: Terminal) -> list[str]:
    """What a terminal of 60 columns shows: what is erased is gone."""
    text = re.sub(r"\x1b\[\d+m", "", terminal.getvalue())  # colours
    return [re.sub(".*\r\x1b\\[2K", "", line) for line in text.split("\n")]


def test_log_lines_take_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now, terminal = [0.0], Terminal()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    start_screen(0)
    bar = ProgressBar(terminal, 2000, lambda step: "left 48 s", clock=lambda: now[0])
    bar.show(500)
    assert re.fullmatch(r"step 500/2,000 \S+ +25.0% \| left 48 s", lines_of(terminal)[-1])
    assert len(lines_of(terminal)[-1]) < 60
    bar.show(501)  # too soon
    logging.getLogger("refocused.x").info("step 501 | loss 2.5")
    assert lines_of(terminal) == ["step 501 | loss 2.5", ""]
    now[0] += PAUSE_SECONDS
    bar.show(502)
    assert lines_of(terminal)[0] == "step 501 | loss 2.5"
    assert lines_of(terminal)[-1].startswith("step 502/2,000 ")


def test_what_is_no_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert erasure(io.StringIO()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert erasure(Terminal()) == ""
