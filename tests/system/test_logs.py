"""Log lines on the terminal, in its place a progress bar, and in files."""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refocused.system import logs

logger = logging.getLogger("refocused.somewhere")
LIBRARIES = ("DeepSpeed", "torch", "transformers", "google", "urllib3")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process's loggers as they were."""
    root = logging.getLogger("refocused")
    levels = {name: logging.getLogger(name).level for name in (*LIBRARIES, "refocused")}
    before = (root.handlers[:], root.propagate)
    yield
    for handler in root.handlers:
        with contextlib.suppress(OSError):  # a full disk refuses the last line once more
            handler.close()
    root.handlers[:], root.propagate = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def speak() -> None:
    logger.debug("unheard")
    logger.info("step %d", 1)
    logger.warning("disk is nearly full")
    logger.error("it broke")


@pytest.mark.parametrize(
    ("rank", "out", "err"),
    [(0, "step 1\n", "warning: disk is nearly full\nerror: it broke\n"), (1, "", "")],
)
def test_only_rank_0_prints_bare_results_and_marked_warnings_once(
    capsys: pytest.CaptureFixture[str], rank: int, out: str, err: str
) -> None:
    logs.start_screen(rank)
    logs.start_screen(rank)
    speak()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (out, err)
    for name in LIBRARIES:
        assert logging.getLogger(name).getEffectiveLevel() == logging.WARNING


def test_lines_in_files_carry_time_rank_and_level(tmp_path: Path) -> None:
    logs.start_screen(3)
    logs.start_files(tmp_path / "logs", 3)
    speak()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-3.log"]
    lines = (tmp_path / "logs" / "rank-3.log").read_text().splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    wanted = ["INFO step 1", "WARNING disk is nearly full", "ERROR it broke"]
    for line, rest in zip(lines, wanted, strict=True):
        assert re.fullmatch(f"{time} rank 3 {rest}", line), line
    for _ in range(2):  # the first rank writes the training log too, and appends
        logs.start_screen(0)
        logs.start_files(tmp_path / "first", 0)
        logger.info("begun")
    for name in ("rank-0.log", "training.log"):
        assert (tmp_path / "first" / name).read_text().count("rank 0 INFO begun\n") == 2


def test_a_full_disk_loses_lines_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    logs.start_screen(1)
    logs.start_files(tmp_path, 1)
    speak()
    assert capsys.readouterr().err == ""


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
    logs.start_screen(0)
    bar = logs.ProgressBar(terminal, 2000, lambda step: "left 48 s", clock=lambda: now[0])
    bar.show(500)
    assert re.fullmatch(r"step 500/2,000 \S+ +25.0% \| left 48 s", lines_of(terminal)[-1])
    assert len(lines_of(terminal)[-1]) < 60
    bar.show(501)  # too soon
    logging.getLogger("refocused.x").info("step 501 | loss 2.5")
    assert lines_of(terminal) == ["step 501 | loss 2.5", ""]
    now[0] += logs.PAUSE_SECONDS
    bar.show(502)
    assert lines_of(terminal)[0] == "step 501 | loss 2.5"
    assert lines_of(terminal)[-1].startswith("step 502/2,000 ")


def test_what_is_no_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.erasure(io.StringIO()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert logs.erasure(Terminal()) == ""
