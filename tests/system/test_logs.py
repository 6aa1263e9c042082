import contextlib
import logging
import re
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
