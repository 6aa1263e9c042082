"""Figures and reports of benchmarks, and the paths through them that other tests do not walk."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import ROOT, carrying, until

FOLDER = ROOT / "benchmarks"


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


def test_a_report_says_what_each_default_rests_on(imported_for_now: None, tmp_path: Path) -> None:
    from certify_report import write_report

    row = {"slice": "124M", "what": "step", "case": "124M, 4 x 8"}
    told = [
        row | {"form": "ours", "default": True, "ms": 50.0, "tokens_per_second": 640.0},
        row | {"form": "ours", "default": True, "ms": 40.0, "tokens_per_second": 800.0},
        row | {"form": "eager", "instead": "model.compile=off", "ms": 60.0, "mfu": 0.4},
        row | {"form": "nanoGPT's loop", "error": "RuntimeError: no", "trace": ["line 1"]},
        row | {"form": "ours", "what": "waits", "host_share": 0.5, "waits": 2, "places": {"a": 2}},
    ]
    write_report(tmp_path / "report.md", told, waiting=["fp8"])
    page = (tmp_path / "report.md").read_text()
    compared = (
        "| model.compile=off | 124M: 124M, 4 x 8 | 40.00 ms | 60.00 ms | 1.50 times as long |"
    )
    assert compared in page
    (unsupported,) = re.findall("resting on nothing here: (.*)\\.", page)
    assert "model.head," in unsupported and "model.compile" not in unsupported
    assert "| ours | 40.00 ms | 800 | - | 2.0 |" in page  # the last measurement, with its waits
    assert "- 124M: 124M, 4 x 8: nanoGPT's loop: step: RuntimeError: no\n\n```\nline 1\n" in page
    assert "Not run to their ends: fp8." in page


NOT_FINITE = """
import torch, step_contenders as contenders
build = contenders.Setup.model
def model(setup):
    built = build(setup)
    torch.nn.init.constant_(next(built.parameters()), float("nan"))
    return built
contenders.Setup.model = model
setup = contenders.Setup(1, 64, 64, length=8, micro_batch_size=1, gradient_accumulation_steps=2)
step = contenders.ours(setup, 1, contenders.alone())
step(), step()
"""


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_with_its_reason() -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "benchmarks", "tests"))
    command = [sys.executable, "-c", NOT_FINITE]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Loss is not finite on rank 0 at step 1 (random tokens; random tokens)" in done.stderr


@pytest.mark.slow
def test_a_stopped_certificate_keeps_its_results_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "certify_gpu.py"), "--tiny", "--out", str(tmp_path)]
    report = tmp_path / "report.md"
    with subprocess.Popen([*command, "--only", "machine,kernels"], start_new_session=True) as run:
        until(lambda: report.exists() and "| chunked | " in report.read_text(), seconds=240)
        run.terminate()
    assert run.returncode == 143
    assert not list(carrying("PYTHONPATH", f"{ROOT}{os.pathsep}"))  # its slices ended, too
    assert "| chunked | " in report.read_text()
    done = subprocess.run([*command, "--seconds", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "0 failures; not run: train, exact, tests" in done.stderr  # `machine` came to its end


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_certificate_walks_its_whole_path_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "certify_gpu.py"), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    page = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, page
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    (exact,) = (row for row in results if "last bit" in row["what"])
    assert exact["losses"] and exact["checkpoint"]
    assert "Not complete" not in page and "## Failures\n\nNone." in page
    assert re.search("tests marked gpu: .* passed|skipped", page)
    unsupported = re.findall("resting on nothing here: (.*)\\.", page)
    # A CPU runs neither the Triton kernels nor a fused loss in float32.
    assert unsupported == ["model.head, model.scan"]


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
