"""What a checkpoint file may hold, and what of it is never run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from refocused.errors import CheckpointError
from refocused.inference.zero_files import load_mapped


class Runs:
    """Unpickling it freely makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    file, folder = tmp_path / "states.pt", tmp_path / "made"
    torch.save({"module": Runs(folder)}, file)
    with pytest.raises(CheckpointError, match=r"states.pt cannot be read .*posix\.mkdir"):
        load_mapped(file)
    assert not folder.exists()
    torch.load(file, weights_only=False)
    assert folder.exists()  # the file would have done it


@pytest.mark.parametrize("content", [b"", b"no zip file at all", b"PK\3\4" + bytes(100)])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "states.pt"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_mapped(file)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "states.pt"
    torch.save({"module": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_mapped(file)
