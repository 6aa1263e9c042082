from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refocused.metrics.jsonl import (
    JsonLines,
    JsonLinesTail,
    number,
    read_json,
    read_small,
    utc_now,
    whole_number,
    write_state,
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_appended_one_a_line_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    file = JsonLines(path)
    file.write({"kind": "start", "text": "two\nlines"})
    file.write({"kind": "end", "path": tmp_path})
    file.close()
    first, second = lines(path)
    assert (first["kind"], first["text"]) == ("start", "two\nlines")
    assert second["path"] == str(tmp_path)
    assert datetime.datetime.fromisoformat(str(first["time"])).utcoffset() == datetime.timedelta(0)


def test_an_earlier_file_is_continued(tmp_path: Path) -> None:
    for count in (1, 2):
        file = JsonLines(tmp_path / "events.jsonl")
        file.write({"number": count})
        file.close()
    assert [record["number"] for record in lines(tmp_path / "events.jsonl")] == [1, 2]


def test_a_line_that_a_crash_tore_is_ended_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"number": 1}\n{"numb')
    file = JsonLines(path)
    file.write({"number": 3})
    file.close()
    first, torn, third = path.read_text().splitlines()
    assert json.loads(first) == {"number": 1}
    assert torn == '{"numb'
    assert json.loads(third)["number"] == 3


def test_two_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    one, two = JsonLines(path), JsonLines(path)
    for count in range(50):
        one.write({"writer": 1, "number": count, "text": "x" * 5000})
        two.write({"writer": 2, "number": count, "text": "y" * 5000})
    records = lines(path)
    for writer in (1, 2):
        numbers = [record["number"] for record in records if record["writer"] == writer]
        assert numbers == list(range(50))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null(tmp_path: Path, number: float) -> None:
    file = JsonLines(tmp_path / "events.jsonl")
    file.write({"loss": number, "step": 3})
    write_state(tmp_path / "state.json", {"loss": number, "step": 3})
    for text in ((tmp_path / "events.jsonl").read_text(), (tmp_path / "state.json").read_text()):
        assert json.loads(text)["loss"] is None
        assert json.loads(text)["step"] == 3


def test_the_state_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, {"status": "training", "step": 1})
    with path.open() as reader:
        start = reader.read(5)
        write_state(path, {"status": "finished", "step": 2})
        old = json.loads(start + reader.read())  # who has the old one open reads it to its end
    assert (old["status"], old["step"]) == ("training", 1)
    assert json.loads(path.read_text())["status"] == "finished"
    assert list(tmp_path.iterdir()) == [path]


def failing(number: int) -> Callable[[Path, Path], None]:
    def fail(self: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_run_that_fails_on_a_full_disk_does_not_look_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_state(path, {"status": "training", "step": 12, "tokens_per_second": 1234.5})
    size = path.stat().st_size
    monkeypatch.setattr(Path, "replace", failing(errno.ENOSPC))
    write_state(path, {"status": "failed", "step": 12})
    assert json.loads(path.read_text())["status"] == "failed"
    assert path.stat().st_size == size  # no reader finds it cut
    write_state(path, {"status": "failed", "step": 12, "text": "x" * 100_000})
    assert "text" not in json.loads(path.read_text())  # there is no room for it


def test_a_write_that_fails_leaves_the_old_state_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    write_state(path, {"step": 1})

    with monkeypatch.context() as patched, heard(caplog):
        patched.setattr(Path, "replace", failing(errno.EIO))
        write_state(path, {"step": 2})
    assert [record.message for record in caplog.records] == [
        f"{path} was not renewed: Input/output error."
    ]
    assert json.loads(path.read_text())["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_loses_lines_with_one_warning_and_no_later_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = JsonLines(path)
    file.write({"number": 1})
    room = path.stat().st_size + 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with heard(caplog):
            file.write({"number": 2})
            file.write({"number": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write({"number": 4})
    assert len(caplog.records) == 1
    assert "Lines are lost until it can be written" in caplog.records[0].message
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first)["number"] == 1
    assert len(torn) == 10
    assert json.loads(last)["number"] == 4


@contextlib.contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let log lines reach pytest also after another test has set the package's logger up."""
    logger = logging.getLogger("refocused")
    before, logger.propagate = logger.propagate, True
    caplog.clear()
    yield
    logger.propagate = before


def test_the_time_of_day_is_utc_to_the_millisecond() -> None:
    now = utc_now()
    assert now.endswith("Z") and len(now) == len("2026-01-31T12:00:00.000Z")
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(now)
    assert abs(age) < datetime.timedelta(minutes=1)


def test_what_is_new_is_read_once_and_what_is_old_never_again(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    tail = JsonLinesTail(file)
    assert tail.records() == []
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert tail.records() == [{"a": 1}, {"a": 2}]
    read = tail.read_bytes
    with file.open("a") as more:
        more.write('{"a": 3}\n')
    assert tail.records() == [{"a": 3}]
    assert tail.read_bytes - read == len('{"a": 3}\n')
    assert tail.records() == []


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a"')
    tail = JsonLinesTail(file)
    assert tail.records() == [{"a": 1}]
    with file.open("a") as more:
        more.write(": 2}\n")
    assert tail.records() == [{"a": 2}]


def test_torn_lines_and_bytes_that_are_no_text_cost_only_themselves(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\x00\n[1]\n{"text": "caf\xe9"}\n{"a": 2}\n')
    records = JsonLinesTail(file).records()
    assert [record.get("a") for record in records] == [1, None, 2]
    assert records[1]["text"] == "caf�"


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"a": {number}}}\n' for number in range(1000)))
    tail = JsonLinesTail(file, last_bytes=30)
    assert tail.records() == [{"a": 998}, {"a": 999}]
    assert tail.read_bytes == 30


def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    tail = JsonLinesTail(file)
    tail.records()
    file.write_text('{"a": 3}\n')
    assert tail.records() == [{"a": 3}]
    other = tmp_path / "other"
    other.write_text('{"a": 4}\n{"a": 5}\n')
    other.replace(file)
    assert tail.records() == [{"a": 4}, {"a": 5}]


def test_fields_of_another_kind_are_unknown() -> None:
    record = {"x": 2.5, "nan": float("nan"), "flag": True, "text": "3", "n": 4}
    assert [number(record, name) for name in ("x", "nan", "flag", "text", "none", "n")] == [
        *(2.5, None, None, None, None, 4)
    ]
    assert [whole_number(record, name) for name in ("x", "flag", "n")] == [None, None, 4]


def test_a_small_file_that_is_missing_or_torn_holds_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none") is None
    (tmp_path / "torn").write_text('{"a": ')
    assert read_json(tmp_path / "torn") is None


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (b'{"a": 1}', None),
        (b"", "it is empty"),
        (b"\0\0\0\0", "it is empty"),
        (b'{"a": ', "it is torn, or no JSON object"),
        (b"[1]", "it is torn, or no JSON object"),
    ],
)
def test_why_a_small_file_cannot_be_read_is_told(
    tmp_path: Path, content: bytes, trouble: str | None
) -> None:
    file = tmp_path / "state.json"
    assert read_small(file).trouble is None  # it is not there, which is no trouble
    file.write_bytes(content)
    assert read_small(file).trouble == trouble
    assert (read_small(file).content is None) == (trouble is not None)
    file.unlink()
    file.mkdir()
    assert read_small(file).trouble == "Is a directory"
