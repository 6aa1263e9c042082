from __future__ import annotations

from pathlib import Path

import pytest
from data.text_samples import random_texts, write_jsonl, write_parquet

from refocused.prepare import text_inputs
from refocused.prepare.text_inputs import Span, find_inputs, plan_tasks
from refocused.system.errors import ShardError


def refused(*arguments: object) -> str:
    with pytest.raises(ShardError) as caught:
        find_inputs([str(one) for one in arguments])
    return str(caught.value)


def test_folders_are_read_in_name_order_and_files_as_named(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/a/1.jsonl", "b/.hidden/3.txt", "b/readme.md", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_inputs([str(tmp_path / "b"), str(tmp_path / "a.txt")])
    assert [file.path.name for file in found] == ["2.txt", "1.jsonl", "a.txt"]
    assert found[2].size == 5


def test_a_changed_file_of_the_same_size_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one" + " " * 300_000 + "end")
    before = find_inputs([str(path)])
    path.write_text("one" + " " * 300_000 + "and")
    assert find_inputs([str(path)]) != before


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.html").touch()
    (tmp_path / "empty").mkdir()
    assert "prepare_data sync gs://b/c" in refused("gs://b/c")
    assert "no such file" in refused(tmp_path / "b.txt")
    assert "no known form" in refused(tmp_path / "a.html")
    assert "no text is below it" in refused(tmp_path / "empty")
    assert "named twice" in refused(tmp_path / "a.txt", tmp_path)


def test_small_files_share_a_task_and_large_ones_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 1000)
    for name in ("1.txt", "2.txt", "3.txt"):
        (tmp_path / name).write_text("x" * 400)
    large = tmp_path / "4.jsonl"
    large.write_text("x" * 2500)
    write_jsonl(tmp_path / "5.jsonl.gz", random_texts(200))
    write_parquet(tmp_path / "6.parquet", random_texts(200, words=200), group=100)
    tasks = plan_tasks(find_inputs([str(tmp_path)]))
    spans = [task.spans for task in tasks]
    assert spans[0] == tuple(Span(tmp_path / f"{n}.txt") for n in (1, 2, 3))
    assert spans[1:3] == [(Span(large, 0, 1000),), (Span(large, 1000, 2000),)]
    assert spans[3][0] == Span(large, 2000, 2500)
    assert Span(tmp_path / "5.jsonl.gz") in spans[3]
    assert spans[4:] == [(Span(tmp_path / "6.parquet", n, n + 1),) for n in range(2)]
    assert all(task.bytes > 0 for task in tasks)
