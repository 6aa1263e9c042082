"""Start real ranks on this machine for an all-reduce and the first step of a run.

Each rank is a process that runs this module: `python -m refocused.doctor.ranks TASK`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from refocused.bucket.open_bucket import BY_ENVIRONMENT, Access
from refocused.doctor.finding import Finding, size
from refocused.system.atomic_files import replace_file
from refocused.system.errors import RefocusedError, counted
from refocused.system.launchers import free_port
from refocused.system.world import DeviceKind, World, join_world, lost_connection

LONGEST_SECONDS = 900.0
POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 3.0  # for the other ranks to report, once a rank has failed
SHOWN_CHARACTERS = 600
# One direction of an NVLink of the A100 and H100. Assumed: the share of all links that a large
# all-reduce reaches, and the least that PCIe gives.
LINK_BYTES_PER_SECOND = 25e9
REACHED_SHARE = 0.4
LEAST_PCIE_BYTES_PER_SECOND = 2e9
REPEATS = 10
LATE = "no result before the time-out"


class RankTask(pydantic.BaseModel, frozen=True):
    """What the ranks do: an all-reduce of `payload_bytes` (0: none), then the first step of a run.

    `config`, `overrides` and `name` are those of the command line. The output and the reports of
    the ranks are written to `folder`.
    """

    folder: Path
    device: str
    payload_bytes: int
    config: str
    overrides: tuple[str, ...] = ()
    name: str | None = None
    access: Access = BY_ENVIRONMENT


@dataclasses.dataclass(frozen=True, slots=True)
class RanksOutcome:
    """Results of rank 0 (`allreduce`, `step`); if a rank failed, what it was doing, and why."""

    ranks: int
    results: Mapping[str, Mapping[str, Any]]
    doing: str | None = None
    failure: str | None = None


def judge_allreduce(outcome: RanksOutcome, *, device: DeviceKind, nvlinks: int | None) -> Finding:
    """Report whether the ranks can communicate, and how fast.

    `nvlinks` is the smallest number of active links of a GPU.
    """
    library = "NCCL" if device == "cuda" else "gloo"
    if outcome.doing in ("join", "allreduce"):
        fix = "NCCL_DEBUG=INFO shows more; check /dev/shm, firewalls and NCCL_SOCKET_IFNAME."
        text = (
            f"{counted(outcome.ranks, 'rank')} cannot communicate over {library}: {outcome.failure}"
        )
        return Finding("allreduce", "fail", text, fix if device == "cuda" else None)
    found = outcome.results.get("allreduce")
    if found is None:
        return Finding("allreduce", "ok", "not needed by a single rank")
    if not found["is_right"]:
        text = f"{library} returns wrong sums over {counted(outcome.ranks, 'rank')}"
        fix = "Try NCCL_P2P_DISABLE=1; if that helps, ask for another machine."
        return Finding("allreduce", "fail", text, fix)
    speed = float(found["bus_bytes_per_second"])
    text = (
        f"{library}, {counted(outcome.ranks, 'rank')}: {speed / 1e9:.2f} GB/s bus bandwidth "
        f"({found['payload_bytes'] / 2**20:.0f} MiB in {found['seconds'] * 1e3:.1f} ms)"
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
    found = outcome.results["step"]
    if not found:
        return Finding("step", "ok", "the run is finished; it can be opened and loaded")
    memory = ""
    if found["peak_bytes"] is not None:
        memory = (
            f", {size(found['peak_bytes'])} of {size(found['gpu_bytes'])} a GPU "
            f"(planned {size(found['planned_bytes'])})"
        )
    return Finding(
        "step",
        "ok",
        f"{found['step']:,}, {found['tokens']:,} tokens, took {found['seconds']:.1f} s, loss "
        f"{found['loss']:.4f} (untrained {found['untrained_loss']:.4f}){memory}; ZeRO-"
        f"{found['zero_stage']}, micro-batch {found['micro']}, {found['compute']}; "
        f"{found['start_seconds']:.0f} s to start",
    )


def run_ranks(task: RankTask, *, ranks: int) -> RanksOutcome:
    """Start ranks on this machine as a launcher does, and wait for them or kill them."""
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",  # one host, in a batch script of SLURM, too
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in map(str, range(ranks)):
            with (task.folder / f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "refocused.doctor.ranks", task.model_dump_json()],
                    env={**environment, "RANK": rank, "LOCAL_RANK": rank},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            processes.append(process)
        has_ended = _wait(processes, until=time.monotonic() + LONGEST_SECONDS)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children, such as compilers
        for process in processes:
            process.communicate()
    return _outcome(task, [process.returncode for process in processes], has_ended=has_ended)


def _wait(processes: Sequence[subprocess.Popen[bytes]], *, until: float) -> bool:
    """Wait until all ranks have ended or one has failed; return False on a time-out."""
    has_failed = False
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True
        if any(codes) and not has_failed:
            has_failed, until = True, min(until, time.monotonic() + LAST_WORDS_SECONDS)
        time.sleep(POLL_SECONDS)
    return has_failed


def _outcome(task: RankTask, codes: Sequence[int], *, has_ended: bool) -> RanksOutcome:
    """Read the reports of the ranks; prefer failures that no other rank caused."""
    ranks, reports = len(codes), []
    for rank in range(ranks):
        file = task.folder / f"{rank}.json"
        reports.append(json.loads(file.read_bytes()) if file.is_file() else {"doing": "join"})
    results = {what: facts for what, facts in reports[0].items() if isinstance(facts, dict)}
    failed = [rank for rank in range(ranks) if "failure" in reports[rank]]
    if failed:
        rank = min(failed, key=lambda one: bool(reports[one]["is_echo"]))
        text = str(reports[rank]["failure"])
        where = "" if rank == 0 or f"rank {rank}" in text else f"rank {rank}: "
        return RanksOutcome(ranks, results, reports[rank]["doing"], where + text)
    dead = next((rank for rank in range(ranks) if codes[rank]), 0)
    if has_ended and not codes[dead]:
        return RanksOutcome(ranks, results)
    dead, text = (dead, f"rank {dead} {_end(codes[dead])}") if has_ended else (0, LATE)
    log = (task.folder / f"{dead}.log").read_text(errors="replace").splitlines()
    last = " / ".join([line.strip() for line in log if line.strip()][-3:])[-SHOWN_CHARACTERS:]
    return RanksOutcome(
        ranks, results, reports[0]["doing"], f"{text}. Last output: {last or 'none'}"
    )


def _end(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, probably for lack of memory (see dmesg)"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _run_rank(task: RankTask) -> int:
    """Do the task as one rank, and report progress and results in a file."""
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    report: dict[str, Any] = {}

    def note(**facts: Any) -> None:
        report.update(facts)
        file = task.folder / f"{os.environ['RANK']}.json"
        replace_file(file, json.dumps(report).encode())

    note(doing="join")
    try:
        world = join_world(task.device)
        os.environ["DS_ACCELERATOR"] = world.device_kind  # or DeepSpeed searches, with warnings
        note(doing="allreduce" if task.payload_bytes else "step")
        if task.payload_bytes:
            note(allreduce=_measure_allreduce(world, task.payload_bytes), doing="step")
        note(step=_step(task, world))
        world.leave()
        return 0
    except RefocusedError as error:
        note(failure=str(error), is_echo=False)
    except Exception as error:
        lost = lost_connection(error)
        traceback.print_exc()
        text = str(lost) if lost is not None else f"{type(error).__name__}: {error}"
        note(failure=text, is_echo=lost is not None)
    return 1


def _measure_allreduce(world: World, payload_bytes: int) -> dict[str, Any]:
    """Time an all-reduce and check its result; every rank must call.

    Bus bandwidth: each link of a ring carries 2 (n - 1) / n of the payload (NCCL tests,
    doc/PERFORMANCE.md).
    """
    import torch
    import torch.distributed as dist

    vector = torch.ones(payload_bytes // 4, device=world.device)
    dist.all_reduce(vector)
    is_right = bool((vector == world.world_size).all())
    vector.zero_()
    seconds = []
    for _ in range(REPEATS):
        world.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        vector[0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    slowest, wrong = world.largest([statistics.median(seconds), not is_right])
    share = 2 * (world.world_size - 1) / world.world_size
    return {
        "is_right": not wrong,
        "payload_bytes": payload_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": share * payload_bytes / slowest,
    }


def _step(task: RankTask, world: World) -> dict[str, Any]:
    """Start the run as a dry run, which is all that training does before its first step."""
    from refocused.config.load_run import load_run
    from refocused.train.lifecycle.job import Request
    from refocused.train.lifecycle.run import run
    from refocused.train.lifecycle.session import begin_session
    from refocused.train.lifecycle.trial import take_trial_step

    facts: dict[str, Any] = {}
    step = functools.partial(take_trial_step, facts)
    request = Request("auto", dry_run=True, command="doctor", access=task.access, at_the_end=step)
    loaded = load_run(task.config, task.overrides, name=task.name)
    began = time.monotonic()
    run(loaded, request, world, begin_session(world.rank))
    return facts and {**facts, "start_seconds": time.monotonic() - began - facts["seconds"]}


def _end_with_the_doctor() -> None:
    """Exit when the doctor, which holds the other end of stdin, has ended."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = _run_rank(RankTask.model_validate_json(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads sometimes abort a normal exit
