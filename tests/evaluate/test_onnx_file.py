"""An ONNX file answers as the model does, at other lengths than it was traced with."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from evaluate.small_models import small_model

from refocused.evaluate import onnx_file
from refocused.evaluate.onnx_file import require_onnx, write_onnx
from refocused.system.errors import CheckpointError


def test_what_has_no_such_form_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="family ten is not exported to ONNX, only gpt2 and"):
        require_onnx("ten")
    monkeypatch.setattr(onnx_file, "PACKAGES", (*onnx_file.PACKAGES, "no_such_package"))
    with pytest.raises(CheckpointError, match=r"no_such_package\. Install: pip install"):
        require_onnx("gpt2")


@pytest.mark.slow
def test_a_file_is_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in onnx_file.PACKAGES:
        pytest.importorskip(name)
    small_model().network.save_pretrained(tmp_path)
    require_onnx("gpt2")
    assert write_onnx(tmp_path).is_file()
    monkeypatch.setattr(onnx_file, "_difference", lambda *_: float("nan"))
    with pytest.raises(CheckpointError, match=r"is not the model.*folder itself is good"):
        write_onnx(tmp_path)
    assert not (tmp_path / "model.onnx").exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # as a disk that is full
    try:
        with pytest.raises(CheckpointError, match=r"model\.onnx was not written: File too large"):
            write_onnx(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("model.onnx*"))
