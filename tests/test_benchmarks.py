"""Every benchmark starts, without the packages that it measures ours beside."""

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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


def test_the_horizons_of_a_changed_model_are_its_present_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import inspect_models

    (start, *_) = inspect_models.spectra(inspect_models.network_of("ten_nano"))
    network = inspect_models.network_of("ten_nano")
    with torch.no_grad():
        network.model.layers[0].mixer.cells[0].rate_shift[4] = -3.0
    (now, *_) = inspect_models.spectra(network)
    moved = (now.now.log_decay / start.now.log_decay).detach()
    assert float(moved[4]) == pytest.approx(torch.e**-3)
    assert moved.sum() - moved[4] == pytest.approx(len(moved) - 1)
    options = ["spectrum", "ten_nano", "--picture", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["x", *options, "--json", str(tmp_path / "a.json")])
    inspect_models.main()
    assert "ten_nano model.layers.3.mixer.cells.0" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["results"]
    (first, *_) = rows.values()
    assert first["longest_tokens"] == pytest.approx(499.7, abs=1)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_reading_and_writing_are_timed_by_a_clock() -> None:
    import inspect_models

    network, how = inspect_models.network_of("gpt2_tiny"), {"lengths": [8, 10**6], "batches": [3]}
    ticks = (float(tick**2) for tick in itertools.count())
    row, too_long = inspect_models.measure_speed(
        network, new_tokens=5, clock=lambda: next(ticks), **how
    )
    # The clock is read twice for each time: 1, 5, 9 s read, 13, 17, 21 s write, 25, 29, 33 s pass.
    assert row["written_per_second"] == pytest.approx(3 * 4 / (17 - 5))
    assert row["tokens_per_second"] == pytest.approx(24 / 29)
    assert "latency_seconds" not in too_long
    alike = (float(tick) for tick in itertools.count())
    row, _ = inspect_models.measure_speed(network, new_tokens=5, clock=lambda: next(alike), **how)
    assert row["written_per_second"] is None  # in the clock's noise


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_transformers_4_reads_every_export(tmp_path: Path) -> None:
    """With GPT-2's files in REFOCUSED_BPE_FOLDER llama.cpp reads them, too."""
    folder = os.environ.get("REFOCUSED_BPE_FOLDER")
    report = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "export_readers.py"), "--work", str(tmp_path / "work")]
    command += [] if folder is None else ["--bpe-folder", folder]
    done = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, check=False
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("the packages of the readers cannot be had: no package registry")
    assert done.returncode == 0, done.stderr
    for family, read in json.loads(report.read_text())["results"].items():
        assert read["transformers 5"].startswith("argmax 100 of 100, 0.0e+00")
        if family in ("nanochat", "resonance", "ten"):
            assert read["transformers 4.57"].startswith("FAILS: "), family
            continue
        _, difference = read["transformers 4.57"].split("argmax 100 of 100, ")
        assert float(difference) < 1e-6, family
        if folder is not None and family != "gpt_neox":
            _, difference = read["llama.cpp"].split("argmax 100 of 100, ")
            assert float(difference) < 1e-3, family
