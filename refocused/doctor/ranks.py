"""Start a run's ranks as its command does, for an all-reduce and the first step."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.doctor.finding import Finding
from refocused.system.errors import ExitCode, TrainingError, counted
from refocused.system.number_text import size_text
from refocused.system.world import DeviceKind

LONGEST_SECONDS = 900.0
GRACE_SECONDS = 30  # for the ranks to end after that
# One direction of an NVLink of the A100 and H100. Assumed: the share of all links that a large
# all-reduce reaches, and the least that PCIe gives.
LINK_BYTES_PER_SECOND = 25e9
REACHED_SHARE = 0.4
LEAST_PCIE_BYTES_PER_SECOND = 2e9
LATE = "no result before the time-out"


@dataclasses.dataclass(frozen=True, slots=True)
class RanksOutcome:
    """Results of rank 0 (`allreduce`, `step`); if the start failed, in which of them, and why."""

    ranks: int
    results: Mapping[str, Any]
    doing: str | None = None
    failure: str | None = None


def judge_allreduce(outcome: RanksOutcome, *, device: DeviceKind, nvlinks: int | None) -> Finding:
    """Report whether the ranks can communicate, and how fast.

    `nvlinks` is the smallest number of active links of a GPU.
    """
    library = "NCCL" if device == "cuda" else "gloo"
    if outcome.doing == "allreduce":
        fix = "NCCL_DEBUG=INFO shows more; check /dev/shm, firewalls and NCCL_SOCKET_IFNAME."
        text = (
            f"{counted(outcome.ranks, 'rank')} cannot communicate over {library}: {outcome.failure}"
        )
        return Finding("allreduce", "fail", text, fix if device == "cuda" else None)
    result = outcome.results.get("allreduce")
    if result is None:
        return Finding("allreduce", "ok", "not needed by a single rank")
    if not result["is_right"]:
        text = f"{library} returns wrong sums over {counted(outcome.ranks, 'rank')}"
        fix = "Try NCCL_P2P_DISABLE=1; if that helps, ask for another machine."
        return Finding("allreduce", "fail", text, fix)
    speed = float(result["bus_bytes_per_second"])
    text = (
        f"{library}, {counted(outcome.ranks, 'rank')}: {speed / 1e9:.2f} GB/s bus bandwidth "
        f"({result['payload_bytes'] / 2**20:.0f} MiB in {result['seconds'] * 1e3:.1f} ms)"
    )
    least = REACHED_SHARE * (nvlinks or 0) * LINK_BYTES_PER_SECOND or LEAST_PCIE_BYTES_PER_SECOND
    if device == "cuda" and speed < least:
        text = f"{text}; at least {least / 1e9:.0f} are usual, so every step is slower"
        fix = "Check nvidia-smi topo -m, and which links NCCL uses (NCCL_DEBUG=INFO)."
        return Finding("allreduce", "warn", text, fix)
    return Finding("allreduce", "ok", text)


def judge_step(outcome: RanksOutcome) -> Finding:
    """Report the result of the step."""
    if outcome.failure is not None:
        return Finding("step", "fail", f"failed: {outcome.failure}")
    result = outcome.results["step"]
    if not result:
        return Finding("step", "ok", "the run is finished; it can be opened and loaded")
    memory = ""
    if result["peak_bytes"] is not None:
        memory = (
            f", {size_text(result['peak_bytes'])} of {size_text(result['gpu_bytes'])} a GPU "
            f"(planned {size_text(result['planned_bytes'])})"
        )
    return Finding(
        "step",
        "ok",
        f"{result['step']:,}, {result['tokens']:,} tokens, took {result['seconds']:.1f} s, loss "
        f"{result['loss']:.4f} (untrained {result['untrained_loss']:.4f}){memory}; ZeRO-"
        f"{result['zero_stage']}, micro-batch {result['micro_batch_size']}, {result['compute']}; "
        f"{result['start_seconds']:.0f} s to start",
    )


def start_ranks(arguments: Sequence[str], *, ranks: int) -> RanksOutcome:
    """Start the run by its own supervisor, as a dry run with a trial, and wait for the end of all.

    `arguments` are those of `train`.
    """
    with tempfile.TemporaryDirectory(prefix="refocused-doctor-") as name:
        results_file, output_file = Path(name, "trial.json"), Path(name, "stderr.txt")
        command = [sys.executable, "-P", "-m", "refocused.commands.launch", *arguments]
        command += ["--dry-run", "--first-step", str(results_file), "--grace", str(GRACE_SECONDS)]
        imports = os.pathsep.join(path for path in sys.path if path)
        with output_file.open("wb") as output:
            launch = subprocess.Popen(
                command,
                env={**os.environ, "RANKS": str(ranks), "PYTHONPATH": imports},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
        is_late = False
        try:
            launch.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            launch.terminate()
            code = launch.wait()
        results = json.loads(results_file.read_bytes()) if results_file.is_file() else {}
        lines = output_file.read_text(errors="replace").splitlines()
    if code == ExitCode.OK:
        return RanksOutcome(ranks, results)
    lines = [line.strip() for line in lines if not line.startswith(("warning:", "hint:"))]
    words = [line.removeprefix("error: ") for line in lines if line]
    # A wrong setting does not reach the other ranks; its error cuts what is too long.
    is_apart = results or code == ExitCode.WRONG_USE
    text = str(TrainingError(" / ".join([LATE] * is_late + words) or f"exit code {code}"))
    return RanksOutcome(ranks, results, "step" if is_apart else "allreduce", text)
