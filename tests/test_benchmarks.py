"""Every benchmark starts, without the packages that it measures ours beside."""

import json
import re
import runpy
import subprocess
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


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts a dozen processes
def test_a_certificate_walks_its_whole_path_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, str(FOLDER / "certify_gpu.py"), "--tiny", "--out", str(out)]
    for minutes in ("0", "60"):  # the first sitting ends before it begins
        done = subprocess.run(
            [*command, "--minutes", minutes], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    content = json.loads((out / "certificate.json").read_text())
    assert content["left out"] == {}
    assert len(content["slices"]["gpt2_tiny: ours, ZeRO-3"]) == 2  # a round each way
    run = content["slices"]["run, deterministic"][0]
    assert run["same_losses"] and run["same_files"]
    page = (out / "report.md").read_text()
    assert "Not complete" not in page
    assert re.search(r"^[0-9]+ (passed|skipped).* \(exit code 0\)$", page, re.MULTILINE)
    assert "- SKIPPED " in page
    assert page.count("equal to the last bit") == 2
    assert {path.name for path in out.glob("*.png")} == {"memory.png", "speed.png", "steps.png"}
