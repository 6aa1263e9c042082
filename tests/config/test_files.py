from __future__ import annotations

from pathlib import Path

import pytest

from refocused.config.files import REPOSITORY_CONFIG, find_config
from refocused.system.errors import ConfigError


def test_a_name_is_found_in_the_repository_with_and_without_its_ending() -> None:
    expected = REPOSITORY_CONFIG / "runs" / "demo.yaml"
    assert find_config("runs", "demo") == expected
    assert find_config("runs", "demo.yaml") == expected


def test_a_path_is_taken_as_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.touch()
    assert find_config("runs", file) == file


def test_the_config_folder_of_the_run_file_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "models" / "gpt2_tiny.json"
    own.parent.mkdir()
    own.touch()
    beside = tmp_path / "runs" / "mine.yaml"
    assert find_config("models", "gpt2_tiny", beside=beside) == own
    assert find_config("models", "neox_tiny", beside=beside).parent == REPOSITORY_CONFIG / "models"


def test_a_missing_file_names_a_near_one_and_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        find_config("deepspeed", "nvmee", beside=tmp_path / "runs" / "mine.yaml")
    wanted = "no file nvmee.json. Did you mean nvme? There are gather_once_a_step"
    assert wanted in str(failure.value)


def test_a_missing_path_is_not_searched_for_by_its_last_part() -> None:
    with pytest.raises(ConfigError):
        find_config("runs", "elsewhere/demo.yaml")
