import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port

from refocused.doctor.ranks import RanksOutcome, RankTask, judge_allreduce, judge_step, run_ranks

STEP = {
    "step": 1,
    "untrained_loss": 10.8,
    "loss": 10.7,
    "tokens": 524_288,
    "seconds": 1.5,
    "start_seconds": 40.0,
    "micro": 4,
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
            RanksOutcome(8, {}, "join", "no port"),
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


def task(folder: Path, **facts: Any) -> RankTask:
    return RankTask(folder=folder, config="no_such_run", payload_bytes=2**16, **facts)


@pytest.mark.slow
def test_real_ranks_that_fail_are_told_of_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}.items():  # a batch script's
        monkeypatch.setenv(name, value)
    refused = run_ranks(task(tmp_path, device="cuda"), ranks=2)
    assert (refused.doing, refused.results) == ("join", {})
    assert "torch sees no GPU" in str(refused.failure)
    (tmp_path / "cpu").mkdir()
    on_cpu = task(tmp_path / "cpu", device="cpu")
    broken = run_ranks(on_cpu, ranks=2)
    assert broken.doing == "step" and "no file no_such_run.yaml" in str(broken.failure)
    assert broken.results["allreduce"]["is_right"]
    (tmp_path / "cpu" / "0.json").unlink()
    (tmp_path / "cpu" / "1.json").unlink()
    monkeypatch.setattr("refocused.doctor.ranks.LONGEST_SECONDS", 0.3)
    late = run_ranks(on_cpu, ranks=2)
    assert late.failure is not None and "no result before the time-out" in late.failure


@pytest.mark.slow
def test_a_rank_ends_with_the_doctor_that_started_it(tmp_path: Path) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [
        sys.executable,
        "-m",
        "refocused.doctor.ranks",
        task(tmp_path, device="cpu").model_dump_json(),
    ]
    environment = {**os.environ, **alone, **address}
    waiting = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(2)
    assert waiting.stdin is not None
    waiting.stdin.close()  # as when its doctor was killed
    assert waiting.wait(60) == 1
