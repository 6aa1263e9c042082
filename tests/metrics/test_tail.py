from __future__ import annotations

from pathlib import Path

import pytest

from refocused.metrics.jsonl import JsonLinesTail, number, read_json, read_small, whole_number


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
