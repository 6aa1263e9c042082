import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end.tiny import tiny_run
from ranks import ROOT, carrying, until

from refocused.doctor.ranks import RanksOutcome, judge_allreduce, judge_step, start_ranks

STEP = {
    "step": 1,
    "untrained_loss": 10.8,
    "loss": 10.7,
    "tokens": 524_288,
    "seconds": 1.5,
    "start_seconds": 40.0,
    "micro_batch_size": 4,
    "zero_stage": 3,
    "compute": "sdpa, 24 blocks compiled",
    "planned_bytes": 20 * 10**9,
    "peak_bytes": 21 * 10**9,
    "gpu_bytes": 85 * 10**9,
}


def summed(bus_gb_per_second: float, *, is_right: bool = True) -> RanksOutcome:
    facts = {"is_right": is_right, "payload_bytes": 2**28, "seconds": 1e-3}
    facts["bus_bytes_per_second"] = bus_gb_per_second * 1e9
    return RanksOutcome(8, {"allreduce": facts})


@pytest.mark.parametrize(
    ("outcome", "device", "nvlinks", "level", "words"),
    [
        (summed(370), "cuda", 18, "ok", "NCCL, 8 ranks: 370.00 GB/s bus bandwidth (256 MiB in"),
        (summed(90), "cuda", 18, "warn", "at least 180 are usual"),
        (summed(20), "cuda", 0, "ok", "20.00 GB/s"),
        (summed(0.5), "cuda", None, "warn", "at least 2 are usual"),
        (summed(0.1), "cpu", None, "ok", "gloo"),
        (summed(370, is_right=False), "cuda", 18, "fail", "returns wrong sums"),
        (
            RanksOutcome(8, {}, "allreduce", "no port"),
            "cuda",
            18,
            "fail",
            "cannot communicate over NCCL: no p",
        ),
        (RanksOutcome(1, {}, "step", "no data"), "cuda", 18, "ok", "not needed by a single rank"),
    ],
)
def test_allreduce(
    outcome: RanksOutcome, device: Any, nvlinks: int | None, level: str, words: str
) -> None:
    finding = judge_allreduce(outcome, device=device, nvlinks=nvlinks)
    assert finding.level == level
    assert words in finding.text


def test_step() -> None:
    finding = judge_step(RanksOutcome(8, {"step": STEP}))
    assert finding.level == "ok"
    assert "21.0 GB of 85.0 GB a GPU (planned 20.0 GB)" in finding.text
    without: dict[str, Any] = {**STEP, "peak_bytes": None, "gpu_bytes": None}
    assert "a GPU" not in judge_step(RanksOutcome(8, {"step": without})).text
    finished = judge_step(RanksOutcome(8, {"step": {}}))
    assert (finished.level, "the run is finished" in finished.text) == ("ok", True)
    failed = judge_step(RanksOutcome(8, {}, "step", "Out of GPU memory on rank 3"))
    assert (failed.level, failed.text) == ("fail", "failed: Out of GPU memory on rank 3")


@pytest.mark.slow
def test_why_real_ranks_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}.items():  # a batch script's
        monkeypatch.setenv(name, value)
    refused = start_ranks(["--config", "no_such_run"], ranks=2)
    assert (refused.doing, refused.results) == ("step", {})
    assert str(refused.failure).startswith("no file no_such_run.yaml. There are demo, ")
    tiny = ["--config", "tiny.yaml", "run.device=cpu"]
    broken = start_ranks([*tiny, "model.start_from=gone"], ranks=2)
    assert broken.doing == "step" and broken.results["allreduce"]["is_right"]
    text = "model.start_from = 'gone' is neither a folder with a config.json or a manifest.json, "
    assert broken.failure is not None and broken.failure.startswith(text)
    assert broken.failure.endswith("RUN[:STEP].")
    monkeypatch.setattr("refocused.doctor.ranks.LONGEST_SECONDS", 0.3)
    late = start_ranks(tiny, ranks=2)
    assert late.failure is not None and late.failure.startswith("no result before the time-out")
    assert not list(tmp_path.glob("refocused*"))


@pytest.mark.slow
def test_the_ranks_end_with_the_doctor_that_started_them(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    doctor = subprocess.Popen(
        [sys.executable, ROOT / "launch" / "doctor.py", "--config", "tiny.yaml", "run.device=cpu"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )

    def left() -> list[int]:
        return [one.pid for one in carrying("TMPDIR", str(tmp_path)) if one.pid != doctor.pid]

    until(lambda: len(left()) > 3)
    doctor.kill()
    doctor.communicate()
    until(lambda: not left())
