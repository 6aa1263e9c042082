from __future__ import annotations

from pathlib import Path

import pytest

from refocused.system.atomic_files import replace_folder, write_bytes_atomic, write_json_atomic


def test_a_write_replaces_the_whole_content_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_bytes_atomic(path, b"a long first content")
    write_json_atomic(path, {"step": 1})
    assert path.read_text() == '{\n "step": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    assert path.read_text() == '{\n "loss": 1.0\n}\n'


def test_a_folder_takes_a_name_from_another_whatever_was_killed_before(tmp_path: Path) -> None:
    for name in ("model", "fresh", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of {name}").touch()
    replace_folder(tmp_path / "fresh", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["of fresh"]
