import os
from pathlib import Path

import pytest

from refocused.system.atomic_files import replace_file, replace_folder, write_json_atomic


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
def test_new_content_replaces_the_old_and_leaves_no_temporary_file(
    tmp_path: Path, durable: bool, concurrent: bool
) -> None:
    path = tmp_path / "x.json"
    if not concurrent:
        (tmp_path / ".x.json.part").write_bytes(b"what a killed writer left")
    for content in (b"old and longer", b"new", b""):
        replace_file(path, content, durable=durable, concurrent=concurrent)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_cannot_be_written_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "x"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    assert path.read_text() == '{\n "loss": 1.0\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_despite_remains_of_a_killed_replacement(tmp_path: Path) -> None:
    for name in ("model", "fresh", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of {name}").touch()
    replace_folder(tmp_path / "fresh", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["of fresh"]
