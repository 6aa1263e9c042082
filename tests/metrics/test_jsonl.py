import datetime
import errno
import json
import math
import os
import resource
from pathlib import Path

import pytest

from refocused.metrics.jsonl import (
    JsonLines,
    JsonLinesTail,
    number,
    read_json,
    read_small,
    whole_number,
    write_state,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "events.jsonl"


def write(path, *records):
    file = JsonLines(path)
    for record in records:
        file.write(record)
    file.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_appended_one_a_line_with_their_time(path):
    write(path, {"kind": "start", "text": "two\nlines"}, {"kind": "end", "path": path})
    write(path, {"kind": "again"})
    first, second, third = lines(path)
    assert (first["kind"], first["text"], third["kind"]) == ("start", "two\nlines", "again")
    assert second["path"] == str(path)
    time = str(first["time"])
    assert datetime.datetime.fromisoformat(time).utcoffset() == datetime.timedelta(0)
    assert time.endswith("Z") and len(time) == len("2026-01-31T12:00:00.000Z")


def test_a_line_that_a_crash_tore_is_ended_and_spoils_no_other(path):
    path.parent.mkdir()
    path.write_text('{"number": 1}\n{"numb')
    write(path, {"number": 3})
    first, torn, third = path.read_text().splitlines()
    assert (json.loads(first), torn) == ({"number": 1}, '{"numb')
    assert json.loads(third)["number"] == 3


def test_two_writers_do_not_mix_their_lines(path):
    one, two = JsonLines(path), JsonLines(path)
    for count in range(50):
        one.write({"writer": 1, "count": count, "text": "x" * 5000})
        two.write({"writer": 2, "count": count, "text": "y" * 5000})
    records = lines(path)
    for writer in (1, 2):
        counts = [record["count"] for record in records if record["writer"] == writer]
        assert counts == list(range(50))


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null(path, unknown):
    record: dict[str, object] = {"loss": unknown, "inner": {"loss": unknown}, "step": 3}
    write(path, record)
    write_state(path.parent / "state.json", record)
    for found in (lines(path)[0], json.loads((path.parent / "state.json").read_text())):
        assert found["loss"] is found["inner"]["loss"] is None
        assert found["step"] == 3


def test_a_full_disk_loses_lines_with_one_warning_and_no_later_line(path, caplog):
    file = JsonLines(path)
    file.write({"number": 1})
    room = path.stat().st_size + 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        file.write({"number": 2})
        file.write({"number": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write({"number": 4})
    [warning] = caplog.messages
    assert "Lines are lost until it can be written" in warning
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["number"], len(torn), json.loads(last)["number"]) == (1, 10, 4)


def failing(code):
    def fail(self, target):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_run_that_fails_on_a_full_disk_does_not_look_killed(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_state(path, {"status": "training", "step": 12, "tokens_per_second": 1234.5})
    size = path.stat().st_size
    monkeypatch.setattr(Path, "replace", failing(errno.ENOSPC))
    write_state(path, {"status": "failed", "step": 12})
    assert json.loads(path.read_text())["status"] == "failed"
    assert path.stat().st_size == size  # no reader finds it cut
    write_state(path, {"status": "failed", "step": 12, "text": "x" * 100_000})
    assert "text" not in json.loads(path.read_text())  # there is no room for it


def test_a_write_that_fails_leaves_the_old_state_and_warns(tmp_path, monkeypatch, caplog):
    path = tmp_path / "state.json"
    write_state(path, {"step": 1})
    monkeypatch.setattr(Path, "replace", failing(errno.EIO))
    write_state(path, {"step": 2})
    assert caplog.messages == [f"{path} was not renewed: Input/output error."]
    assert json.loads(path.read_text())["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_tail_reads_each_line_once_and_when_it_is_whole(tmp_path):
    file = tmp_path / "lines.jsonl"
    tail = JsonLinesTail(file)
    assert tail.records() == []
    file.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\x00\n[1]\n{"a": "caf\xe9"}\n{"a"')
    assert tail.records() == [{"a": 1}, {"a": "caf\ufffd"}]  # damaged lines are left out
    with file.open("a") as more:
        more.write(": 3}\n")
    assert tail.records() == [{"a": 3}]
    assert tail.records() == []
    # A file that was cut or replaced is read from its begin.
    file.write_text('{"a": 4}\n')
    assert tail.records() == [{"a": 4}]
    other = tmp_path / "other"
    other.write_text('{"a": 5}\n{"a": 6}\n')
    other.replace(file)
    assert tail.records() == [{"a": 5}, {"a": 6}]


def test_fields_of_another_kind_are_unknown():
    record = {"x": 2.5, "nan": math.nan, "flag": True, "text": "3", "n": 4}
    names = ("x", "nan", "flag", "text", "none", "n")
    assert [number(record, name) for name in names] == [2.5, None, None, None, None, 4]
    assert [whole_number(record, name) for name in ("x", "flag", "n")] == [None, None, 4]


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (b'{"a": 1}', None),
        (b"\0\0\0\0", "it is empty"),
        (b'{"a": ', "it is torn, or no JSON object"),
        (b"[1]", "it is torn, or no JSON object"),
    ],
)
def test_why_a_small_file_cannot_be_read(tmp_path, content, trouble):
    file = tmp_path / "state.json"
    assert read_small(file).trouble is None  # it does not exist, which is no trouble
    file.write_bytes(content)
    assert read_small(file).trouble == trouble
    assert (read_json(file) is None) == (trouble is not None)
