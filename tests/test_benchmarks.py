"""Every benchmark starts, without the packages that it measures ours beside."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if '"__main__"' in path.read_text()]


@pytest.fixture(scope="module", autouse=True)
def imported_for_now() -> Iterator[None]:
    """Let the scripts import each other, and nobody else afterwards: their names are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("DS_ACCELERATOR", "cpu")  # one of them sets it
        yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_how_it_is_used(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith(f"usage: {script.name} ")
